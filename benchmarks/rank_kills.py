"""Ranks of a server killed at random moments: streams go on with the same tokens, and nothing is left behind.

    python benchmarks/rank_kills.py MODEL [--kills 50] [--tp 2] [--pp 1] [--streams 16] [--seed 0] [--stop]

A server with several ranks answers `--streams` requests at a time, greedy and sampled with seeds. In every round one of
its ranks, rank 0 among them, is killed (`--stop`: stopped) at a random moment: while the group loads after the last
death, while prompts are computed, or while answers are. All answers are compared with those of the undisturbed server.
Prints how soon the rest of a group was gone, the longest pause of a stream, and what is left at the end: children,
shared memory, descriptors of the server. One JSON object is the last line; the exit code is 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

MOMENTS = ("load", "prefill", "decode")
LIMIT_S = 120.0


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kept_descriptors(pid: int) -> int:
    """The descriptors that a process keeps: the fewest seen within a second, since a server closes the connections of
    clients that have just gone a moment after them."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.05)
    return min(counts)


def until(holds: Any, what: str) -> float:
    """Wait; seconds that it took."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > LIMIT_S:
            raise AssertionError(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - began_s


class RankServer:
    def __init__(self, asked: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.num_ranks = asked.tp * asked.pp
        command = [sys.executable, "-m", "tokenmill", "serve", asked.model, "--served-name", "m", "--port", str(port)]
        command += ["--tp", str(asked.tp), "--pp", str(asked.pp), "--threads", "1", "--max-context", "256"]
        self.log = open(asked.log, "w")  # noqa: SIM115  # as long as the server runs
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            return bool(httpx.get(f"{self.url}/health", timeout=5).json()["status"] == "ready")
        except (httpx.TransportError, KeyError, ValueError):
            return False

    def ranks(self) -> list[int]:
        """The processes of all ranks, rank 0 first; fewer while they start."""
        for core in children(self.process.pid):
            followers = [pid for pid in children(core) if is_there(pid)]
            if followers:
                return [core, *followers]
        return []

    def ask(self, number: int, num_tokens: int, first: threading.Event | None = None) -> tuple[str, float]:
        """An answer, streamed, and the longest time between two of its pieces."""
        prompt = f"Once upon a time number {number}" + " and on" * (number % 5 * 8)
        body = {"model": "m", "prompt": prompt, "stream": True, "max_tokens": num_tokens, "ignore_eos": True,
                "seed": number, "temperature": 0.8 * (number % 2)}  # fmt: skip
        until(self.is_ready, "ready")
        text, stall_s, before_s = "", 0.0, time.monotonic()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=LIMIT_S) as reply:
            if reply.status_code == 503:  # the engine starts again: clients come back
                reply.read()
                return self.ask(number, num_tokens, first)
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line[6:])
                    assert "error" not in piece, piece
                    text += piece["choices"][0]["text"] if piece["choices"] else ""
                    now_s = time.monotonic()
                    stall_s, before_s = max(stall_s, now_s - before_s), now_s
                    if first is not None:
                        first.set()
        assert line == "data: [DONE]" or not line, line
        return text, stall_s


def round_of(
    server: RankServer, asked: argparse.Namespace, draw: random.Random, moment: str, pool: Any
) -> dict[str, Any]:
    """Kill one rank while streams run; what came of it."""
    first = threading.Event()
    if moment != "load":
        until(server.is_ready, "ready")
        until(lambda: len(server.ranks()) == server.num_ranks, "all ranks")
    streams = [pool.submit(server.ask, number, asked.tokens, first) for number in range(asked.streams)]
    if moment == "load":  # the group that starts after the last death
        until(lambda: len(server.ranks()) == server.num_ranks, "ranks that load")
    elif moment == "decode":
        first.wait(LIMIT_S)
    time.sleep(draw.random() * 0.3)
    ranks = server.ranks()
    if not ranks:
        return {"moment": moment, "answers": [one.result() for one in streams]}
    victim = draw.choice(ranks)
    os.kill(victim, signal.SIGSTOP if asked.stop and victim != ranks[0] else signal.SIGKILL)
    gone_s = until(lambda: not any(is_there(pid) for pid in ranks), "the rest of the group is gone")
    return {
        "moment": moment, "rank": ranks.index(victim), "gone_s": gone_s, "answers": [one.result() for one in streams],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="stop ranks instead: their stacks are logged")
    parser.add_argument("--log", default=os.devnull, help="what the server prints goes to this file")
    asked = parser.parse_args()
    draw, shm = random.Random(asked.seed), set(os.listdir("/dev/shm"))
    server = RankServer(asked)
    rounds: list[dict[str, Any]] = []
    try:
        until(server.is_ready, "ready")
        with ThreadPoolExecutor(asked.streams) as pool:
            asking = [pool.submit(server.ask, number, asked.tokens) for number in range(asked.streams)]
            expected = [one.result()[0] for one in asking]
            descriptors = kept_descriptors(server.process.pid)
            moment = "decode"  # the first has no death before it
            while sum("rank" in one for one in rounds) < asked.kills:
                rounds.append(round_of(server, asked, draw, moment, pool))
                texts = [text for text, _ in rounds[-1]["answers"]]
                rounds[-1]["wrong"] = sum(text != right for text, right in zip(texts, expected, strict=True))
                rounds[-1]["stall_s"] = max(stall for _, stall in rounds[-1].pop("answers"))
                print(json.dumps(rounds[-1]), flush=True)
                moment = draw.choice(MOMENTS)
        until(server.is_ready, "ready")
        until(lambda: len(server.ranks()) == server.num_ranks, "all ranks")
        left = kept_descriptors(server.process.pid) - descriptors
        ranks = server.ranks()
    finally:
        server.process.terminate()
        server.process.wait(60)
    until(lambda: not any(is_there(pid) for pid in ranks), "the ranks end with their server")
    killed = [one for one in rounds if "rank" in one]
    found = {
        "kills": len(killed), "moments": Counter(one["moment"] for one in killed),
        "ranks": Counter(one["rank"] for one in killed),
        "streams": asked.streams * len(rounds), "wrong": sum(one["wrong"] for one in rounds),
        "gone_s": {"median": median(one["gone_s"] for one in killed), "max": max(one["gone_s"] for one in killed)},
        "stall_s": {"median": median(one["stall_s"] for one in killed), "max": max(one["stall_s"] for one in killed)},
        "descriptors_left": left, "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - shm),
    }  # fmt: skip
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
