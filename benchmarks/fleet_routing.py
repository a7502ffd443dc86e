"""Route a trace of conversations to virtual replicas: hit rate, balance and waiting by policy.

    python benchmarks/fleet_routing.py TRACE.jsonl [--requests N] [--replicas N]

TRACE is in Mooncake's format (timestamp in ms, input_length, output_length, hash_ids of 512 tokens each). Lengths are
an eighth, and time runs twenty times as fast, on a virtual clock; all but the model is true.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.engine.messages import Outputs
from tokenmill.engine.replica import Replica, RequestRun, Route
from tokenmill.engine.replicas import Router
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import END_TOKEN, FIRST_TOKEN, VirtualDevice, run_virtually, virtual_engine
from tokenmill.types import PromptRequest, Request

SHORTER, FASTER, HASH_TOKENS = 8, 20, 512
DEVICE = VirtualDevice(step_s=0.001, token_s=10e-6, num_blocks=80_000, token_budget=2048, max_running=128)


class RoundRobin:
    """One after the other, whatever they hold."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Route:
        self._num_chosen += 1
        return Route(replicas[self._num_chosen % len(replicas)], "turn", len(request.prompt_token_ids))

    def note_outputs(self, replica: Replica, message: Outputs) -> None:
        pass

    def note_ready(self, replica: Replica) -> None:
        pass

    def note_end(self, run: RequestRun) -> None:
        pass


def read_trace(path: Path, num_requests: int | None) -> list[tuple[float, PromptRequest]]:
    """Arrival times and requests; a hash id is always the same tokens."""
    chunks: dict[int, list[int]] = {}
    size = HASH_TOKENS // SHORTER

    def chunk(hash_id: int) -> list[int]:
        if hash_id not in chunks:
            rng = random.Random(hash_id)
            chunks[hash_id] = [rng.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(size)]
        return chunks[hash_id]

    asked = []
    for number, line in enumerate(path.read_text().splitlines()[:num_requests]):
        row: dict[str, Any] = json.loads(line)
        tokens = [token for hash_id in row["hash_ids"] for token in chunk(hash_id)]
        tokens = tokens[: max(1, row["input_length"] // SHORTER)]
        params = SamplingParams(max_tokens=max(1, row["output_length"] // SHORTER), seed=number)
        asked.append((row["timestamp"] / 1000 / FASTER, PromptRequest(prompt=tokens, params=params)))
    return asked


async def first_token_s(engine: AsyncEngine, at_s: float, request: PromptRequest) -> float:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s - loop.time())
    stream = engine.submit(request)
    await anext(stream)
    waited_s = loop.time() - at_s
    async for _ in stream:
        pass
    return waited_s


async def serve(asked: list[tuple[float, PromptRequest]], num_replicas: int, router: Router) -> dict[str, float]:
    engine = virtual_engine(DEVICE, num_replicas, router)
    await engine.open()
    waited = sorted(await asyncio.gather(*(first_token_s(engine, at_s, request) for at_s, request in asked)))
    stats = engine.stats()
    busy = [one["busy_s"] for one in engine.replicas()]
    await engine.close()
    return {
        "hit rate": stats.prefix_hit_tokens / stats.prefix_query_tokens,
        "fullest/mean": max(busy) / (sum(busy) / len(busy)),
        "p50 TTFT s": waited[len(waited) // 2],
        "p99 TTFT s": waited[len(waited) * 99 // 100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--replicas", type=int, default=3)
    given = parser.parse_args()
    asked = read_trace(given.trace, given.requests)
    routers: dict[str, Router] = {"round robin": RoundRobin(), "seconds": PrefixRouter(given.replicas)}
    for name, router in routers.items():
        began_s = time.monotonic()
        found = run_virtually(serve(asked, given.replicas, router))
        shown = "  ".join(f"{what} {value:.3f}" for what, value in found.items())
        print(f"{name:12} {shown}  ({time.monotonic() - began_s:.0f} s to run)", flush=True)


if __name__ == "__main__":
    main()
