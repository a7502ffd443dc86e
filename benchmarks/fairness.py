"""What a flood by one tenant does to nine polite ones, on a real server.

    python benchmarks/fairness.py [MODEL] [--flood 1000] [--seconds 25] [--max-running 16]

Without a MODEL a scripted one is served whose steps sleep, so that the figures are the scheduler's and the front's.

    alone       nine tenants ask now and then: the time to their first tokens
    flooded     the same, and a tenth has always a thousand requests under way: the time again, asked to be at most 2 x
    contended   all ten have always four requests under way, the tenth a thousand: seconds of the device that each was
                given, by the server's ledger, as Jain's index ((sum x)^2 / n sum x^2), asked to be at least 0.95
    work        a fixed set of requests, with a key for each tenant and with one key for all (first come, first
                served): seconds until all are answered, asked to be at least 97 % as fast

Prints a line a scene and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from served import BenchmarkServer

from tokenmill.bench.client import Client
from tokenmill.bench.dialects import RequestSpec, find_dialect
from tokenmill.bench.measures import percentile
from tokenmill.bench.request_records import BenchRecord

POLITE = tuple(f"polite-{number}" for number in range(9))
FLOOD = "flooding"
TIMEOUT_S = 600.0
WARM_UP_S = 3.0
SCRIPT = [{"say": "word ", "repeat": True, "delay_s": 0.004, "token_delay_s": 0.012}]


class TenantClients:
    """Clients of one server, one for each key."""

    def __init__(self, server: BenchmarkServer, num_ids: int) -> None:
        self.began = time.perf_counter()
        dialect = find_dialect("openai-completions")
        self._clients = {key: Client(server.url, dialect, "m", key, self.began) for key in server.keys}
        self._rng = random.Random(1)
        self._num_ids = num_ids

    async def ask(self, key: str, num_prompt: int, num_output: int) -> BenchRecord:
        client, record = self._clients[key], BenchRecord()
        ids = tuple(self._rng.randrange(100, self._num_ids) for _ in range(num_prompt))
        spec = RequestSpec(messages=(), output_len=num_output, input_len=num_prompt, prompt_ids=ids)
        record.sent_s = time.perf_counter() - self.began
        await client.fetch(client.encode(spec), record, TIMEOUT_S)
        return record

    async def keep_asking(self, key: str, num_prompt: int, pause_s: float, found: list[BenchRecord]) -> None:
        """Ask again and again, with a pause after each answer."""
        while True:
            found.append(await self.ask(key, num_prompt, 20))
            await asyncio.sleep(pause_s)

    def flood(self, key: str, number: int) -> list[asyncio.Task[None]]:
        """So many requests that are always under way."""
        return [asyncio.create_task(self.keep_asking(key, 100, 0.0, [])) for _ in range(number)]

    def burst(self, key: str, number: int) -> list[asyncio.Task[BenchRecord]]:
        return [asyncio.create_task(self.ask(key, 100, 20)) for _ in range(number)]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def polite_p95_s(tenants: TenantClients, seconds: float, num_flooding: int) -> tuple[float, int]:
    """The 95th percentile of polite first tokens, and of how many."""
    found: list[BenchRecord] = []
    flood = tenants.flood(FLOOD, num_flooding)
    began = time.perf_counter() - tenants.began
    polite = []
    for place, key in enumerate(POLITE):  # not all at once, nor in step
        await asyncio.sleep(0.2)
        polite.append(asyncio.create_task(tenants.keep_asking(key, 200, 2.5 * (1 + 0.17 * place), found)))
    await asyncio.sleep(max(0.0, began + seconds - (time.perf_counter() - tenants.began)))
    await end([*polite, *flood])
    times = [one.ttft_s for one in found if one.is_ok and one.sent_s > began + WARM_UP_S]
    return percentile(times, 95), len(times)


async def contended(
    server: BenchmarkServer, tenants: TenantClients, seconds: float, num_flooding: int
) -> dict[str, float]:
    """Seconds of the device that each tenant was given while all want more: from when each has had some answers."""
    tasks: list[asyncio.Task[Any]] = list(tenants.flood(FLOOD, num_flooding))
    answers: dict[str, list[BenchRecord]] = {key: [] for key in POLITE}
    for key in POLITE:
        tasks += [asyncio.create_task(tenants.keep_asking(key, 200, 0.0, answers[key])) for _ in range(4)]
    while min(map(len, answers.values())) < 4:
        await asyncio.sleep(0.1)
    before = await asyncio.to_thread(given, server)
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(given, server)
    await end(tasks)
    return {key: one - before[key] for key, one in after.items()}


def given(server: BenchmarkServer) -> dict[str, float]:
    """Seconds of the device by key, of requests that have ended so far."""
    return {key: server.get("/v1/usage?group_by=", key)["data"][0]["device_s"] for key in server.keys}


async def work_s(tenants: TenantClients, *, is_fair: bool) -> float:
    """Seconds that a set of requests takes: 120 of one tenant, and nine times six."""
    began = time.perf_counter()
    flood = tenants.burst(FLOOD, 120)

    async def polite(key: str) -> None:
        for _ in range(6):
            record = await tenants.ask(key, 200, 20)
            assert record.is_ok, record.detail

    await asyncio.gather(*flood, *(polite(key if is_fair else FLOOD) for key in POLITE))
    assert all(task.result().is_ok for task in flood)
    return time.perf_counter() - began


def jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


async def measure(server: BenchmarkServer, asked: argparse.Namespace) -> dict[str, Any]:
    tenants = TenantClients(server, 4000 if asked.model else 256)
    try:
        await asyncio.gather(*tenants.burst(FLOOD, 8))  # the first steps: what they cost is learned
        alone_s, num_alone = await polite_p95_s(tenants, asked.seconds, 0)
        print(f"alone      first tokens p95 {alone_s * 1e3:.0f} ms ({num_alone} requests)", flush=True)
        flooded_s, num_flooded = await polite_p95_s(tenants, asked.seconds, asked.flood)
        ratio = flooded_s / alone_s
        print(f"flooded    first tokens p95 {flooded_s * 1e3:.0f} ms ({num_flooded}), {ratio:.2f} x alone", flush=True)
        server.wait_idle()
        shares = await contended(server, tenants, asked.seconds / 2, asked.flood)
        print(f"contended  Jain {jain(list(shares.values())):.4f}", flush=True)
        times: dict[bool, list[float]] = {True: [], False: []}
        for is_fair in ((True, False, False, True) * asked.rounds)[: 2 * asked.rounds]:
            times[is_fair].append(await work_s(tenants, is_fair=is_fair))
        part = sum(times[False]) / sum(times[True])
        print(f"work       {part:.1%} of the throughput of first come, first served", flush=True)
    finally:
        tenants.close()
    return {
        "benchmark": "fairness",
        "ttft_p95_ms_alone": round(alone_s * 1e3, 1),
        "ttft_p95_ms_flooded": round(flooded_s * 1e3, 1),
        "ratio": round(ratio, 2),
        "jain": round(jain(list(shares.values())), 4),
        "device_s": {key: round(value, 2) for key, value in shares.items()},
        "work_s_fair": [round(one, 2) for one in times[True]],
        "work_s_first_come": [round(one, 2) for one in times[False]],
        "throughput": round(part, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--flood", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="of the fixed work, each way")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fairness-") as folder:
        script = Path(folder) / "sleeps.json"
        script.write_text(json.dumps(SCRIPT))
        flags = ["--max-running", str(asked.max_running), "--max-waiting", "4096", "--speculate", "off"]
        with BenchmarkServer(asked.model or f"scripted:{script}", *flags, keys=(*POLITE, FLOOD)) as server:
            print(json.dumps(asyncio.run(measure(server, asked))))


if __name__ == "__main__":
    main()
