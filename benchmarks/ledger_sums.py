"""Consistency of the ledger, /metrics and the clients' own counts, and rows lost by a kill -9 of the server.

    python benchmarks/ledger_sums.py [--requests 10000] [--kills 5] [--model MODEL]

Requests of two tenants, mixed: streamed and whole, several choices, refused, failing in the model, and streams that
their clients leave after some pieces. Every row of the ledger is found by its request's id and compared with what its
client saw: prompt and completion tokens of answers that came to their end exactly, of abandoned ones at least as many
as were received. The sums of the ledger are those of /metrics.

Then the server is killed (SIGKILL) under load, started again on the same state, and asked which of the answers that
clients had seen whole are missing: none that is older than a second may be.

Prints a table and, as the last line, one JSON object; exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import BenchmarkServer

from tokenmill.server.state.server_state import FILE_NAME

KEYS = ("alice", "bob")
SCRIPT = [
    {"match": "fails", "say": ["some words ", {"fail": True}]},
    {"say": "word and another word " * 60, "token_delay_s": 0.0005},
]
KINDS = ("whole", "whole", "stream", "stream", "choices", "refused", "fails", "fails in a stream", "left", "left")
MOST_LOST_S = 1.0


@dataclass
class ClientRecord:
    """What a client knows of its request."""

    kind: str
    key: str
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    num_pieces: int = 0
    ended_s: float = 0.0  # when the client had all of it
    is_whole: bool = False


def body_of(kind: str, rng: random.Random) -> dict[str, Any]:
    prompt = f"{'fails' if kind.startswith('fails') else 'Tell'} {rng.randrange(10**9)} " + "x" * rng.randrange(200)
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": rng.randint(1, 40), "temperature": 0}
    if kind == "choices":
        body["n"] = rng.randint(2, 4)
    if kind == "refused":
        body["temperature"] = -1
    if kind in ("stream", "left", "fails in a stream") or (kind == "choices" and rng.random() < 0.5):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "left":
        body["max_tokens"] = 200
    if kind.startswith("fails"):
        body["max_tokens"] = 100
    return body


async def ask(port: int, name: str, seen: ClientRecord, rng: random.Random) -> None:
    """Send one request and note what comes back; `left`: go away after some pieces."""
    content = json.dumps(body_of(seen.kind, rng)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {seen.key}\r\n"
        f"x-request-id: {name}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    leaves_after = rng.randint(0, 20) if seen.kind == "left" else None
    try:
        writer.write(head.encode() + content)
        seen.status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if leaves_after == 0:
            return
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                note_usage(seen, event.get("usage"))
                seen.num_pieces += sum(bool(choice["text"]) for choice in event.get("choices", ()))
                if leaves_after is not None and seen.num_pieces >= leaves_after:
                    return
            elif line.startswith(b"data: [DONE]"):
                seen.is_whole = True
            elif line.startswith(b"{"):
                note_usage(seen, json.loads(line).get("usage"))
                seen.is_whole = True
        seen.ended_s = time.time()
    finally:
        writer.close()


def note_usage(seen: ClientRecord, usage: dict[str, int] | None) -> None:
    if usage:
        seen.prompt_tokens, seen.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def load(
    port: int, prefix: str, number: int, seed: int, seen: dict[str, ClientRecord], until_s: float = 1e12
) -> None:
    """So many requests of all kinds, forty at a time; a server that goes away ends it."""
    names = iter(range(number))

    async def client() -> None:
        for place in names:
            rng = random.Random(f"{seed}-{place}")
            name = f"{prefix}-{place}"
            seen[name] = ClientRecord(rng.choice(KINDS), rng.choice(KEYS))
            try:
                await ask(port, name, seen[name], rng)
            except (OSError, asyncio.IncompleteReadError, IndexError, ValueError):
                if time.time() < until_s:
                    return
                raise

    await asyncio.gather(*(client() for _ in range(40)))


def rows_of(folder: Path) -> dict[str, sqlite3.Row]:
    connection = sqlite3.connect(f"file:{folder / 'state' / FILE_NAME}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    rows = {row["request"]: row for row in connection.execute("SELECT * FROM usage")}
    connection.close()
    return rows


def differences(seen: dict[str, ClientRecord], rows: dict[str, sqlite3.Row]) -> list[str]:
    """Where a row is missing, or does not say what its client saw."""
    found = []
    for name, one in seen.items():
        row = rows.get(name)
        if row is None:
            found.append(f"{name} ({one.kind}) is not in the ledger")
        elif row["key"] not in (one.key,) and not row["key"]:
            found.append(f"{name} has no key")
        elif one.completion_tokens is not None and one.kind != "left":
            counted = row["prompt_tokens"], row["completion_tokens"]
            if counted != (one.prompt_tokens, one.completion_tokens):
                found.append(f"{name} ({one.kind}): {counted}, its client counts {one}")
        elif one.kind == "left" and row["completion_tokens"] < one.num_pieces and one.status == 200:
            found.append(f"{name} left after {one.num_pieces} pieces, and {row['completion_tokens']} are counted")
        elif one.kind == "refused" and (row["status"], row["completion_tokens"]) != (400, 0):
            found.append(f"{name} was refused, and counts {dict(row)}")
        elif one.kind.startswith("fails") and row["outcome"] != "error":
            found.append(f"{name} failed, and its outcome is {row['outcome']}")
    return found + [f"{name} is in the ledger, and nobody sent it" for name in rows if name not in seen]


def sums(server: BenchmarkServer, asked: argparse.Namespace) -> dict[str, Any]:
    """The three accounts of many requests."""
    seen: dict[str, ClientRecord] = {}
    began = time.perf_counter()
    asyncio.run(load(server.port, "sum", asked.requests, 1, seen))
    took_s = time.perf_counter() - began
    server.wait_idle()
    usage = [server.get("/v1/usage?group_by=", key)["data"][0] for key in KEYS]
    rows = rows_of(server.folder)
    faults = differences(seen, rows)
    both = {
        "prompt_tokens": "tokenmill_prompt_tokens_total",
        "completion_tokens": "tokenmill_generation_tokens_total",
    }
    totals = {}
    for name, series in both.items():
        in_rows, told = sum(row[name] for row in rows.values()), sum(one[name] for one in usage)
        counted = server.metric(series)
        totals[name] = [in_rows, told, int(counted)]
        if not in_rows == told == counted:
            faults.append(f"{name}: {in_rows} in rows, {told} by GET /v1/usage, {counted} by /metrics")
    device_s, busy_s = sum(one["device_s"] for one in usage), server.metric("tokenmill_engine_busy_seconds_total")
    if not 0 < device_s <= busy_s * 1.001:
        faults.append(f"{device_s} seconds of the device, and its steps took {busy_s}")
    kinds = Counter(f"{one.kind} {rows[name]['outcome'] if name in rows else 'none'}" for name, one in seen.items())
    return {
        "requests": len(seen), "seconds": round(took_s, 1), "kinds": dict(sorted(kinds.items())), "totals": totals,
        "device_s": round(device_s, 3), "busy_s": round(busy_s, 3), "faults": faults,
    }  # fmt: skip


def kills(model: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What a server that is killed under load has lost."""
    faults, ages, num_whole = [], [], 0
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        for number in range(asked.kills):
            seen: dict[str, ClientRecord] = {}
            with BenchmarkServer(model, keys=KEYS, folder=Path(folder)) as server:

                async def kill_under_load(
                    server: BenchmarkServer = server, seen: dict[str, ClientRecord] = seen, n: int = number
                ) -> float:
                    work = asyncio.create_task(load(server.port, f"kill{n}", 10**6, n, seen, 0.0))
                    await asyncio.sleep(random.Random(n).uniform(2.0, 4.0))
                    server.child.kill()
                    killed_s = time.time()
                    await asyncio.gather(work, return_exceptions=True)
                    return killed_s

                killed_s = asyncio.run(kill_under_load())
            with BenchmarkServer(model, keys=KEYS, folder=Path(folder)) as server:  # opens the same state
                rows = rows_of(server.folder)
            whole = {name: one for name, one in seen.items() if one.is_whole and one.ended_s < killed_s}
            num_whole += len(whole)
            lost = [killed_s - one.ended_s for name, one in whole.items() if name not in rows]
            ages.append(round(max(lost, default=0.0), 3))
            if ages[-1] > MOST_LOST_S:
                faults.append(f"a kill lost {len(lost)} of {len(whole)} rows, the oldest {ages[-1]} s old")
    return {"kills": asked.kills, "whole_answers": num_whole, "oldest_lost_s": ages, "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--model", help="a model instead of a scripted one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(SCRIPT))
        model = asked.model or f"scripted:{script}"
        with BenchmarkServer(model, keys=KEYS) as server:
            summed = sums(server, asked)
        for kind, count in summed["kinds"].items():
            print(f"{kind:28} {count}")
        print(f"totals (rows, usage, metrics): {summed['totals']}; device {summed['device_s']} of {summed['busy_s']} s")
        killed = kills(model, asked)
        print(f"kills: {killed['oldest_lost_s']} s old was the oldest lost row, of {killed['whole_answers']}")
    faults = summed["faults"] + killed["faults"]
    for fault in faults[:20]:
        print("FAULT", fault)
    print(json.dumps({"benchmark": "ledger_sums", "sums": summed, "kills": killed}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
