"""What a batch costs those who talk with the same server, and what `tokenmill batch` costs beside `LLM.generate`.

`interactive`: a server gets chats at random moments, the same ones alone and while a batch runs, in turns; what counts
is how much longer the first token takes (p95). The batch is made anew for each turn and cancelled after it. Without a
MODEL the core is one without a model, with the scheduler and limits of a CPU's: a step takes 4 ms and 0.4 ms a token,
as with a small model, and no processor time, so that a busy machine changes little.

`rows`: the same rows through `LLM.generate` and through `tokenmill batch`, each in a process of its own, in turns; what
counts is tokens a second without the start, which a run with few rows tells.

    python benchmarks/batch_jobs.py interactive [MODEL] [--rate 2] [--chats 60] [--rounds 2] [--lines 1000]
    python benchmarks/batch_jobs.py rows MODEL [--rows 500] [--max-tokens 32] [--rounds 5] [--threads 1]

Prints a table and, as the last line, one JSON object; exit code 1 if a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tokenmill import LLM, SamplingParams
from tokenmill.engine.results import RequestOutput

SENTENCE = "Once upon a time a miller lived beside a quiet river. "
CHAT_SENTENCES, CHAT_TOKENS = 8, 32
LINE_SENTENCES, LINE_TOKENS = 6, 48
FEW_ROWS = 16
STEP_S, TOKEN_S = 0.004, 0.0004  # of a core without a model


# ── chats beside a batch ───────────────────────────────────────────────────────────────────────────────


def run_core(token_id: int, folder: str, parent_pid: int) -> int:
    import stream_capacity

    runner = stream_capacity.Metronome(STEP_S, token_id, token_s=TOKEN_S)
    return stream_capacity.run_core(runner, folder, parent_pid, token_budget=512, max_running=64)


def run_front(port: int) -> int:
    import stream_capacity

    return stream_capacity.run_front("smollm2:135m", port, [__file__, "core"])


@contextmanager
def served(model: str | None, folder: str) -> Iterator[str]:
    """The address of `tokenmill serve MODEL`, or of a server whose core has no model."""
    import stream_capacity

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    real = ["-m", "tokenmill", "serve", str(model), "--port", str(port), "--state-dir", folder]
    command = [sys.executable, __file__, "front", str(port)] if model is None else [sys.executable, *real]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not stream_capacity.answers(port):
                assert server.poll() is None, "the server did not start"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGTERM)


def question(sentences: int, number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Story {number}. {SENTENCE * sentences} How does it go on?"}]


async def first_token_s(client: httpx.AsyncClient, model: str, number: int) -> float:
    """How long one chat waits for its first token; the rest of the answer is read too."""
    body = {
        "model": model,
        "messages": question(CHAT_SENTENCES, number),
        "max_tokens": CHAT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started, first = time.perf_counter(), math.nan
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if math.isnan(first) and '"content":"' in line and '"content":""' not in line:
                first = time.perf_counter() - started
    return first


async def chats(client: httpx.AsyncClient, model: str, options: argparse.Namespace, turn: int) -> list[float]:
    """The first-token times of chats that come at random moments, the same in every turn."""
    moments = random.Random(1)

    async def later(delay_s: float, number: int) -> float:
        await asyncio.sleep(delay_s)
        return await first_token_s(client, model, number)

    delay_s, waiting = 0.0, []
    for number in range(options.chats):
        delay_s += moments.expovariate(options.rate)
        waiting.append(asyncio.create_task(later(delay_s, 10_000 * turn + number)))
    return list(await asyncio.gather(*waiting))


async def new_batch(client: httpx.AsyncClient, model: str, num_lines: int, turn: int) -> str:
    body = {"model": model, "max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": url, "body": {**body, "messages": question(LINE_SENTENCES, -n)}}
        for n in range(turn * num_lines, (turn + 1) * num_lines)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    sent = await client.post("/v1/files", files={"file": content.encode()}, data={"purpose": "batch"})
    asked = {"input_file_id": sent.json()["id"], "endpoint": url, "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=asked)).json()
    while (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] < 1:
        await asyncio.sleep(0.1)
    return str(batch["id"])


async def beside_batches(url: str, options: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await chats(client, model, argparse.Namespace(chats=4, rate=4.0), 99)  # warm
        alone: list[float] = []
        beside: list[float] = []
        cancel_s: list[float] = []
        num_answered = 0
        for turn in range(options.rounds):
            alone += await chats(client, model, options, 2 * turn)
            batch_id = await new_batch(client, model, options.lines, turn)
            before = (await client.get(f"/v1/batches/{batch_id}")).json()["request_counts"]["completed"]
            beside += await chats(client, model, options, 2 * turn + 1)
            batch = (await client.get(f"/v1/batches/{batch_id}")).json()
            assert batch["status"] == "in_progress", "the batch was over before the chats: give it more --lines"
            num_answered += batch["request_counts"]["completed"] - before
            cancel_s.append(await cancelled_in_s(client, batch_id))
    found: dict[str, Any] = {"alone": percentiles(alone), "beside a batch": percentiles(beside)}
    return {**found, "lines answered": num_answered, "cancelled in s": [round(took_s, 2) for took_s in cancel_s]}


async def cancelled_in_s(client: httpx.AsyncClient, batch_id: str) -> float:
    """How long a batch takes from the wish to the state `cancelled`, with the lines answered so far in its file."""
    started = time.perf_counter()
    await client.post(f"/v1/batches/{batch_id}/cancel")
    while (batch := (await client.get(f"/v1/batches/{batch_id}")).json())["status"] != "cancelled":
        await asyncio.sleep(0.02)
    took_s = time.perf_counter() - started
    output = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    assert output.content.count(b"\n") == batch["request_counts"]["completed"], "answers of a cancelled batch are kept"
    return took_s


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50_ms": round(1000 * cuts[9], 1), "p95_ms": round(1000 * cuts[18], 1), "chats": len(values)}


def interactive(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="batch-jobs-") as folder, served(options.model, folder) as url:
        found = asyncio.run(beside_batches(url, options))
    for name in ("alone", "beside a batch"):
        row = found[name]
        print(f"{name:16}{row['p50_ms']:9.1f} ms p50 {row['p95_ms']:9.1f} ms p95   ({row['chats']} chats)")
    ratio = found["beside a batch"]["p95_ms"] / found["alone"]["p95_ms"]
    print(f"first token, p95: {ratio:.2f} times; {found['lines answered']} lines of batches were answered meanwhile")
    print(f"cancelled in {max(found['cancelled in s']):.2f} s at most")
    print(json.dumps({"benchmark": "batch_jobs interactive", "rate": options.rate, "ratio": round(ratio, 3), **found}))
    return 0 if ratio <= options.limit else 1


# ── rows offline ───────────────────────────────────────────────────────────────────────────────────────


def rows_s(way: str, prompts: list[str], folder: Path, options: argparse.Namespace) -> float:
    """How long a process takes that starts, answers all prompts in one of the two ways, writes the answers and ends."""
    source, target = folder / "rows.jsonl", folder / "answers.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    target.unlink(missing_ok=True)
    flags = ["--model", options.model, "--max-tokens", str(options.max_tokens)]
    if options.threads is not None:
        flags += ["--threads", str(options.threads)]
    by_batch = [sys.executable, "-m", "tokenmill", "batch", "--raw", "--temperature", "0", "--ignore-eos"]
    by_generate = [sys.executable, __file__, "generate"]
    command = [*(by_batch if way == "tokenmill batch" else by_generate), str(source), str(target), *flags]
    started = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    took_s = time.perf_counter() - started
    assert target.read_bytes().count(b"\n") == len(prompts), f"{way} lost rows"
    return took_s


def generate(source: Path, target: Path, options: argparse.Namespace) -> None:
    """What a user of the library writes instead of `tokenmill batch`."""
    llm = LLM(options.model, **({} if options.threads is None else {"threads": options.threads}))
    prompts = [str(json.loads(line)["prompt"]) for line in source.read_text().splitlines()]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    answers: list[RequestOutput] = llm.generate(prompts, params, progress=False)
    target.write_text("".join(json.dumps({"output": answer.outputs[0].text}) + "\n" for answer in answers))


def rows(options: argparse.Namespace) -> int:
    prompts = [f"Story {number}. {SENTENCE * 3}" for number in range(options.rows)]
    speeds: dict[str, list[float]] = {"LLM.generate": [], "tokenmill batch": []}
    with tempfile.TemporaryDirectory(prefix="batch-jobs-") as name:
        for turn in range(options.rounds):
            for way in list(speeds)[:: 1 if turn % 2 == 0 else -1]:
                start_s = rows_s(way, prompts[:FEW_ROWS], Path(name), options)
                more_s = rows_s(way, prompts, Path(name), options) - start_s
                speeds[way].append((options.rows - FEW_ROWS) * options.max_tokens / more_s)
    for way, values in speeds.items():
        print(f"{way:16}{statistics.median(values):9.0f} tokens/s  ({', '.join(f'{value:.0f}' for value in values)})")
    pairs = [one / other for one, other in zip(*speeds.values(), strict=True)]
    ratio = statistics.median(pairs)
    print(f"LLM.generate is {ratio:.3f} times as fast (median of pairs: {', '.join(f'{pair:.3f}' for pair in pairs)})")
    print(json.dumps({"benchmark": "batch_jobs rows", **speeds, "ratio": round(ratio, 3), "rows": options.rows}))
    return 0 if ratio <= options.limit else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    talk = kinds.add_parser("interactive")
    talk.add_argument("model", nargs="?")
    talk.add_argument("--rate", type=float, default=2.0, help="chats a second")
    talk.add_argument("--chats", type=int, default=60, help="in each turn")
    talk.add_argument("--rounds", type=int, default=2)
    talk.add_argument("--lines", type=int, default=1000)
    talk.add_argument("--limit", type=float, default=1.2)
    table = kinds.add_parser("rows")
    table.add_argument("model")
    table.add_argument("--rows", type=int, default=500)
    table.add_argument("--max-tokens", type=int, default=32)
    table.add_argument("--rounds", type=int, default=5)
    table.add_argument("--threads", type=int)
    table.add_argument("--limit", type=float, default=1.05)
    plain = kinds.add_parser("generate")
    plain.add_argument("source", type=Path)
    plain.add_argument("target", type=Path)
    plain.add_argument("--model", required=True)
    plain.add_argument("--max-tokens", type=int, required=True)
    plain.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.kind == "generate":
        generate(options.source, options.target, options)
        return 0
    return interactive(options) if options.kind == "interactive" else rows(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["core"]:
        sys.exit(run_core(int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    if sys.argv[1:2] == ["front"]:
        sys.exit(run_front(int(sys.argv[2])))
    sys.exit(main())
