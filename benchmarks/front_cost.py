"""What the front process costs beside the engine: many streams at once against a real server.

Starts `tokenmill serve`, asks every question once alone, then all streams at once, and compares the answers.
The front's cost is CPU time, which a busy machine does not change; it is set against the engine's time in steps and
against the engine's own CPU time. Prints a table and, as the last line, one JSON object.

    python benchmarks/front_cost.py [--model smollm2:135m] [--streams 64] [--tokens 64] [--limit 0.15]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

TOPICS = ("a river", "the moon", "old maps", "bread", "a lighthouse", "winter", "a clever dog", "trains")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    port = free_port()
    command = [sys.executable, "-m", "tokenmill", "serve", *arguments, "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
            try:
                wait_until_ready(server, client)
                yield server, client
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(60)


def wait_until_ready(server: subprocess.Popen[bytes], client: httpx.Client) -> None:
    while server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"the server ended with exit code {server.returncode}")


def body(number: int, model: str, num_tokens: int) -> dict[str, Any]:
    prompt = f"Story {number} is about {TOPICS[number]}. It begins like this:"
    drawn = {"temperature": 0.8, "seed": number, "ignore_eos": True, "max_tokens": num_tokens}
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **drawn}


def answer(client: httpx.Client, asked: dict[str, Any]) -> str:
    reply = client.post("/v1/chat/completions", json=asked)
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["message"]["content"])


def streamed(client: httpx.Client, asked: dict[str, Any]) -> str:
    text = ""
    with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    assert line == "" or line == "data: [DONE]", line
    return text


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def busy_s(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("tokenmill_engine_busy_seconds_total")).split()[1])


def measure(streams: int, num_tokens: int, arguments: list[str]) -> dict[str, Any]:
    with serving(arguments) as (server, client):
        model = client.get("/v1/models").json()["data"][0]["id"]
        asked = [body(number % len(TOPICS), model, num_tokens) for number in range(streams)]
        alone = [answer(client, one) for one in asked[: len(TOPICS)]]
        engine = child_of(server.pid)
        before = (cpu_s(server.pid), cpu_s(engine), busy_s(client), time.perf_counter())
        with ThreadPoolExecutor(streams) as pool:
            together = list(pool.map(lambda one: streamed(client, one), asked))
        after = (cpu_s(server.pid), cpu_s(engine), busy_s(client), time.perf_counter())
    frontend, engine_cpu, busy, wall = (b - a for a, b in zip(before, after, strict=True))
    return {
        "benchmark": "front_cost",
        "model": model,
        "streams": streams,
        "tokens_per_stream": num_tokens,
        "equal_to_single_runs": sum(alone[n % len(TOPICS)] == text for n, text in enumerate(together)),
        "wall_s": round(wall, 3),
        "front_cpu_s": round(frontend, 3),
        "engine_busy_s": round(busy, 3),
        "engine_cpu_s": round(engine_cpu, 3),
        "front_to_busy": round(frontend / busy, 4),
        "front_to_engine_cpu": round(frontend / engine_cpu, 4),
        "front_us_per_token": round(frontend / (streams * num_tokens) * 1e6, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=float, default=0.15, help="front / engine time; more is exit code 1")
    options = parser.parse_args()
    found = measure(options.streams, options.tokens, [options.model])
    for name, value in found.items():
        print(f"{name:22} {value}")
    print(json.dumps(found))
    is_good = found["equal_to_single_runs"] == options.streams and found["front_to_busy"] < options.limit
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
