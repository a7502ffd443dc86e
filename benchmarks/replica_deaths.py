"""Kill one of several engine processes again and again under load: are answers the same, how long do they stall?

    python benchmarks/replica_deaths.py MODEL [--replicas 3] [--streams 60] [--seconds 60] [--every 3]

Streams of all kinds (n > 1, grammars, mirostat, penalties) run without a pause; each answer is compared with that of an
undisturbed engine. A stall is the longest gap between two events of a stream. Beside it stands the time that the same
cores take to compute again what half of the streams have lost: as many prompts of that length, at once and uncached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.config import EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.fleet.start import start_fleet
from tokenmill.params import Guided
from tokenmill.types import Event, PromptRequest

STORY = "once upon a time there was a little girl who had a red ball and a dog that ran to the big tree"
REGEX = Guided.regex(r"(the|a) (cat|dog|bird)( (sat|ran|saw a tree)){20,30}\.")


def asked(number: int) -> PromptRequest:
    rng = random.Random(number)
    prompt = " ".join(rng.choice(STORY.split()) for _ in range(rng.randrange(20, 120)))
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 3},
        {"guided": REGEX},
        {"mirostat": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"logprobs": 2},
    ]
    params = SamplingParams(
        temperature=0.8, seed=number, max_tokens=rng.randrange(60, 160), **kinds[number % len(kinds)]
    )
    return PromptRequest(prompt=prompt, params=params)


async def answer(events: AsyncIterator[Event]) -> tuple[list[Any], list[float]]:
    """All tokens with their logprobs, choice by choice, and when each came."""
    found: dict[int, list[Any]] = {}
    times = [time.monotonic()]
    async for event in events:
        found.setdefault(event.index, []).append((event.token_ids, event.finish_reason))
        times.append(time.monotonic())
    merged = {
        index: ([token for ids, _ in parts for token in ids], [reason for _, reason in parts if reason])
        for index, parts in found.items()
    }
    return sorted(merged.items()), times


async def streams(engine: AsyncEngine, num_streams: int, ends_s: float) -> dict[int, tuple[list[Any], list[float]]]:
    found: dict[int, tuple[list[Any], list[float]]] = {}
    numbers = iter(range(1 << 30))

    async def one_after_the_other() -> None:
        while time.monotonic() < ends_s:
            number = next(numbers)
            found[number] = await answer(engine.submit(asked(number)))

    await asyncio.gather(*(one_after_the_other() for _ in range(num_streams)))
    return found


async def kill(engine: AsyncEngine, every_s: float, ends_s: float) -> list[float]:
    rng, kills = random.Random(1), []
    while time.monotonic() + every_s < ends_s:
        await asyncio.sleep(every_s)
        ready = [one for one in engine.replicas() if one["state"] == "ready" and one["requests"]]
        if len(ready) > 1:  # with the last one gone, all wait for a start
            os.kill(rng.choice(ready)["engine_pid"], signal.SIGKILL)
            kills.append(time.monotonic())
    return kills


async def recompute_s(engine: AsyncEngine, num_prompts: int, num_tokens: int) -> float:
    """How long it takes until so many new prompts have their first tokens, without one of the cores."""
    while not all(one["state"] == "ready" for one in engine.replicas()):
        await asyncio.sleep(0.1)
    engine.drain_replica(0)
    rng, began_s = random.Random(2), time.monotonic()

    async def first() -> None:
        ids = [rng.randrange(100, 400) for _ in range(num_tokens)]
        async for _ in engine.submit(PromptRequest(prompt=ids, params=SamplingParams(max_tokens=1, seed=1))):
            pass

    await asyncio.gather(*(first() for _ in range(num_prompts)))
    return time.monotonic() - began_s


def share(values: list[float], at: float) -> float:
    return sorted(values)[min(len(values) - 1, int(at * len(values)))] if values else 0.0


async def run(given: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        ModelConfig(model=given.model, max_context=512),
        scheduler=SchedulerConfig(max_running=64),
        ops=OpsConfig(device="cpu", threads=1),
    )
    engine = await start_fleet(config, given.replicas)
    ends_s = time.monotonic() + given.seconds
    killing = asyncio.create_task(kill(engine, given.every, ends_s))
    found = await streams(engine, given.streams, ends_s)
    kills = await killing
    stats = engine.stats()
    mean_tokens = 150
    again_s = await recompute_s(engine, given.streams // 2, mean_tokens)
    await engine.close()
    alone = await start_fleet(config, 1)
    limit = asyncio.Semaphore(given.streams)

    async def undisturbed(number: int) -> list[Any]:
        async with limit:
            return (await answer(alone.submit(asked(number))))[0]

    expected = dict(zip(found, await asyncio.gather(*(undisturbed(number) for number in found)), strict=True))
    await alone.close()
    gaps = [(later - before, before) for _, times in found.values() for before, later in pairwise(times)]
    longest = [max(later - before for before, later in pairwise(times)) for _, times in found.values()]
    hit = [gap for gap, at in gaps if any(at <= killed <= at + gap for killed in kills) and gap > 0.05]
    return {
        "kills": len(kills),
        "requests": len(found),
        "resumed": stats.resumed,
        "different": sum(found[number][0] != expected[number] for number in found),
        "stall_p50_s": round(share(hit, 0.5), 3),
        "stall_p99_s": round(share(hit, 0.99), 3),
        "longest_gap_p99_s": round(share(longest, 0.99), 3),
        "recompute_s": round(again_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=3.0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
