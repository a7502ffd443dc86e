"""Streams that move between engine processes: how long do they stall, and does anything change?

    python benchmarks/moving.py moves MODEL [--streams 8] [--times 10]      to and fro between two cores
    python benchmarks/moving.py drain MODEL [--streams 8] [--tokens 2000]   all of a core's streams to another one
    python benchmarks/moving.py roll MODEL [--seconds 10]                   three cores restarted one by one under load
    python benchmarks/moving.py split MODEL [--streams 8] [--prompt-len 4096]   prompts on one core, streams on another

Answers are compared with those of an undisturbed engine. moves: the longest gap of each stream with each move, beside
that in as long a time without one, the usual gap (a step) and the seconds that the blocks of one move were on their
way; steps_s are the usual gaps of the first and the last turn (they grow with the context), and stalls less the
transfer are told in steps of their own turn. drain: until the core is empty, and until every stream has its next token
from elsewhere. roll: conversations of several turns; TTFT and cached share of prompts before, while and after. split:
gaps of streams while long prompts arrive, on cores with roles and, beside it, on two that do both. One JSON object as
the last line.

MODEL may be a folder with a config.json alone: its weights are drawn. With --pin N, every engine process has N
processors of its own, and the front shares the rest with the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.bench.measures import percentile
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.fleet.start import start_fleet
from tokenmill.types import PromptRequest

Span = tuple[float, float]

WARM_S = 2.0
PAUSE_S = 0.7  # between two moves
PROCESSORS = sorted(os.sched_getaffinity(0))


@dataclass
class StreamRecord:
    """Tokens of a stream and when they came."""

    number: int
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest gap between tokens that ended within some time."""
        return max((after - before for before, after in pairwise(self.times) if begin < after <= end), default=0.0)


def config_of(model: str, **cache: Any) -> EngineConfig:
    is_drawn = (Path(model) / "config.json").exists() and not list(Path(model).glob("*.safetensors"))
    weights: dict[str, Any] = {"load_format": "dummy", "quantization": "int8"} if is_drawn else {}
    return EngineConfig(
        ModelConfig(model=model, max_context=8192, **weights),
        CacheConfig(**cache),
        SchedulerConfig(max_running=32, speculate="off"),
        OpsConfig(device="cpu", threads=1),
    )


def prompt_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 30_000) for _ in range(length)]


async def read(engine: AsyncEngine, stream: StreamRecord, num_tokens: int, prompt_len: int = 64) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.8, seed=stream.number)
    asked = PromptRequest(prompt=prompt_ids(stream.number, prompt_len), params=params)
    async for event in engine.submit(asked):
        stream.ids += event.token_ids
        stream.times += [time.perf_counter()] * bool(event.token_ids)


async def undisturbed(config: EngineConfig, number: int, num_tokens: int) -> list[list[int]]:
    engine = await start_fleet(config, 1)
    streams = [StreamRecord(place) for place in range(number)]
    await asyncio.gather(*(read(engine, stream, num_tokens) for stream in streams))
    await engine.close()
    return [stream.ids for stream in streams]


async def all_under_way(streams: list[StreamRecord]) -> None:
    while not all(stream.ids for stream in streams):
        await asyncio.sleep(0.01)
    await asyncio.sleep(WARM_S)


async def warm_up(engine: AsyncEngine) -> None:
    """Let both cores compute a prompt and take it from each other: memory that is touched first takes time."""
    for asking in (1, 0):
        engine.drain_replica(asking, False)
        engine.drain_replica(1 - asking)
        for number in (asking, 1 - asking):
            params = SamplingParams(max_tokens=1, temperature=0.0)
            async for _ in engine.submit(PromptRequest(prompt=prompt_ids(-1 - number, 2048), params=params)):
                pass
    engine.drain_replica(1, False)


def usual_gap(streams: list[StreamRecord], begin: float, end: float) -> float:
    """The median gap between tokens that came within some time."""
    return statistics.median(
        after - before for stream in streams for before, after in pairwise(stream.times) if begin < after <= end
    )


async def moves(given: argparse.Namespace) -> dict[str, Any]:
    config, num_tokens = config_of(given.model), given.tokens or 1500
    engine = await start_fleet(config, 2)
    if given.pin:
        await pin(engine, given.pin)
    await warm_up(engine)
    streams = [StreamRecord(place) for place in range(given.streams)]
    engine.drain_replica(1)
    reading = [asyncio.create_task(read(engine, stream, num_tokens)) for stream in streams]
    await all_under_way(streams)
    usual = [after - before for stream in streams for before, after in pairwise(stream.times[3:])]
    still = [time.perf_counter()]
    for _ in range(given.times):
        await asyncio.sleep(PAUSE_S)
        still.append(time.perf_counter())
    moments = []
    for turn in range(given.times):
        moments.append(time.perf_counter())
        engine.drain_replica(1 - turn % 2, False)
        engine.drain_replica(turn % 2)
        await asyncio.sleep(PAUSE_S)
    moments.append(time.perf_counter())
    was_cut = any(task.done() for task in reading)
    await asyncio.gather(*reading)
    stats = engine.stats()
    await engine.close()
    expected = await undisturbed(config, given.streams, num_tokens)
    turns = list(pairwise(moments))
    stalls = [stream.longest_gap(*turn) for stream in streams for turn in turns]
    steps = [usual_gap(streams, *turn) for _ in streams for turn in turns]
    gaps = [stream.longest_gap(*turn) for stream in streams for turn in pairwise(still)]
    step_s, transfer_s = statistics.median(usual), stats.fetch_s / stats.resumed
    in_steps = [(stall - transfer_s) / step for stall, step in zip(stalls, steps, strict=True)]
    return {
        "moved": stats.resumed,
        "different": sum(stream.ids != ids for stream, ids in zip(streams, expected, strict=True)),
        "ended_before_the_last_move": was_cut,
        "step_p50_s": round(step_s, 4),
        "transfer_s": round(transfer_s, 4),
        "fetched_tokens": stats.fetched_tokens,
        "longest_gap_without_moves_p50_s": round(percentile(gaps, 50), 4),
        "longest_gap_without_moves_p99_s": round(percentile(gaps, 99), 4),
        "stall_p50_s": round(percentile(stalls, 50), 4),
        "stall_p99_s": round(percentile(stalls, 99), 4),
        "steps_s": [round(steps[0], 4), round(steps[len(turns) - 1], 4)],
        "stall_without_transfer_steps_p50": round(percentile(in_steps, 50), 2),
        "stall_without_transfer_steps_p99": round(percentile(in_steps, 99), 2),
    }


async def drain(given: argparse.Namespace) -> dict[str, Any]:
    config, num_tokens = config_of(given.model), (given.tokens or 2000) + 150
    engine = await start_fleet(config, 2)
    if given.pin:
        await pin(engine, given.pin)
    await warm_up(engine)
    streams = [StreamRecord(place) for place in range(given.streams)]
    engine.drain_replica(1)
    reading = [asyncio.create_task(read(engine, stream, num_tokens)) for stream in streams]
    while not all(len(stream.ids) >= 100 for stream in streams):
        await asyncio.sleep(0.01)
    left = [num_tokens - len(stream.ids) for stream in streams]
    num_before, began = [len(stream.ids) for stream in streams], time.perf_counter()
    engine.drain_replica(1, False)
    engine.drain_replica(0)
    while engine.replicas()[0]["running"] or engine.replicas()[0]["requests"]:
        await asyncio.sleep(0.002)
    empty_s = time.perf_counter() - began
    while not all(len(stream.ids) > before for stream, before in zip(streams, num_before, strict=True)):
        await asyncio.sleep(0.002)
    all_on_s = time.perf_counter() - began
    await asyncio.gather(*reading)
    stats = engine.stats()
    await engine.close()
    expected = await undisturbed(config, given.streams, num_tokens)
    return {
        "least_tokens_left": min(left),
        "different": sum(stream.ids != ids for stream, ids in zip(streams, expected, strict=True)),
        "empty_s": round(empty_s, 4),
        "all_go_on_s": round(all_on_s, 4),
        "fetched_tokens": stats.fetched_tokens,
    }


# ── a rolling restart ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class TimedTurn:
    began: float
    first_s: float
    num_prompt: int
    num_cached: int


async def converse(engine: AsyncEngine, number: int, turns: list[TimedTurn], answers: dict[Any, list[int]]) -> None:
    """A conversation after the other, each of some turns, until it is cancelled."""
    for round_ in range(1 << 30):
        ids = prompt_ids(number * 1000 + round_, 200)
        for turn in range(6):
            params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=turn)
            began, first_s, cached, answer = time.perf_counter(), 0.0, 0, list[int]()
            async for event in engine.submit(PromptRequest(prompt=ids, params=params)):
                first_s = first_s or time.perf_counter() - began
                answer += event.token_ids
                cached = event.usage.cached_tokens if event.usage is not None else cached
            turns.append(TimedTurn(began, first_s, len(ids), cached))
            answers[tuple(ids), turn] = answer
            ids = [*ids, *answer, *prompt_ids(turn, 40)]


def told(turns: list[TimedTurn], begin: float, end: float) -> dict[str, Any]:
    some = [turn for turn in turns if begin <= turn.began < end]
    return {
        "turns": len(some),
        "ttft_p50_s": round(percentile([turn.first_s for turn in some], 50), 3),
        "ttft_p99_s": round(percentile([turn.first_s for turn in some], 99), 3),
        "cached": round(sum(turn.num_cached for turn in some) / sum(turn.num_prompt for turn in some), 3),
    }


async def roll(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(given.model, **({"kv_disk": folder} if given.disk else {}))
        engine = await start_fleet(config, 3)
        turns: list[TimedTurn] = []
        answers: dict[Any, list[int]] = {}
        tasks = [asyncio.create_task(converse(engine, number, turns, answers)) for number in range(given.streams)]
        await asyncio.sleep(given.seconds / 2)
        began = time.perf_counter()
        await asyncio.sleep(given.seconds)
        rolling = time.perf_counter()
        await engine.restart_replicas()
        rolled = time.perf_counter()
        await asyncio.sleep(given.seconds)
        ended = time.perf_counter()
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
    alone = await start_fleet(config_of(given.model), 1)
    checked = random.Random(1).sample(sorted(answers), min(len(answers), 200))

    async def again(ids: tuple[int, ...], turn: int) -> list[int]:
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=turn)
        events = [event async for event in alone.submit(PromptRequest(prompt=list(ids), params=params))]
        return [token for event in events for token in event.token_ids]

    found = await asyncio.gather(*(again(*key) for key in checked))
    await alone.close()
    return {
        "failed": len(failed),
        "checked": len(checked),
        "different": sum(answers[key] != ids for key, ids in zip(checked, found, strict=True)),
        "rolling_s": round(rolled - rolling, 2),
        "before": told(turns, began, rolling),
        "while": told(turns, rolling, rolled),
        "after": told(turns, rolled, ended),
    }


# ── prompts and answers on cores of their own ──────────────────────────────────────────────────────────


async def gaps_beside_prompts(given: argparse.Namespace, roles: str | None) -> dict[str, Any]:
    """Prompts one after another, with as long a pause before each: contexts grow, and with them every step."""
    run_on(os.getpid(), PROCESSORS)
    engine = await start_fleet(config_of(given.model), 2, roles=roles)
    if given.pin:
        await pin(engine, given.pin)
    streams = [StreamRecord(place) for place in range(given.streams)]
    reading = [asyncio.create_task(read(engine, stream, 7000)) for stream in streams]
    await all_under_way(streams)
    began, first, idle_spans, spans = time.perf_counter(), list[float](), list[Span](), list[Span]()
    while time.perf_counter() - began < given.seconds * 2:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        asked = PromptRequest(prompt=prompt_ids(100 + len(first), given.prompt_len), params=params)
        paused = time.perf_counter()
        await asyncio.sleep(min(first[-1] if first else given.seconds / 4, given.seconds))
        sent = time.perf_counter()
        first += [time.perf_counter() - sent async for _ in engine.submit(asked)]
        idle_spans.append((paused, sent))
        spans.append((sent, time.perf_counter()))
    cores = engine.replicas()
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await engine.close()
    gaps = [(after, after - before) for stream in streams for before, after in pairwise(stream.times)]
    idle = [gap for at, gap in gaps if any(start < at <= end for start, end in idle_spans)]
    beside = [(end - at, gap) for at, gap in gaps for start, end in spans if start < at <= end]
    limit, p99 = 1.2 * percentile(idle, 99), percentile([gap for _, gap in beside], 99)
    return {
        "prompts": len(first),
        "ttft_p50_s": round(statistics.median(first), 3),
        "idle_p50_ms": round(percentile(idle, 50) * 1e3, 1),
        "idle_p99_ms": round(percentile(idle, 99) * 1e3, 1),
        "beside_p50_ms": round(percentile([gap for _, gap in beside], 50) * 1e3, 1),
        "beside_p99_ms": round(p99 * 1e3, 1),
        "p99_ratio": round(1.2 * p99 / limit, 2),
        # Seconds before the first token, of each prompt's gaps that are longer than 1.2 times those without prompts.
        "longer": sorted({(round(before, 2), round(gap * 1e3)) for before, gap in beside if gap > limit})[:40],
        "computed": [core["step_tokens"] for core in cores],
    }


async def pin(engine: AsyncEngine, number: int) -> None:
    """Let every core have processors of its own, as on a machine of its own; the front and the client share the rest,
    or, where none is left, those of the first core."""
    while not all(core["engine_pid"] for core in engine.replicas()):
        await asyncio.sleep(0.05)
    at_hand = list(PROCESSORS)
    for core in reversed(engine.replicas()):
        own, at_hand = at_hand[-number:], at_hand[:-number] or at_hand[-number:]
        run_on(core["engine_pid"], own)
    run_on(os.getpid(), at_hand)


def run_on(pid: int, processors: list[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), processors)


async def split(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "split": await gaps_beside_prompts(given, "prefill,decode"),
        "unsplit": await gaps_beside_prompts(given, None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["moves", "drain", "roll", "split"])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--pin", type=int, default=0, help="processors that each core has for itself; not with roll")
    parser.add_argument("--disk", action="store_true", help="roll: keep blocks on disk too")
    given = parser.parse_args()
    work = {"moves": moves, "drain": drain, "roll": roll, "split": split}[given.what]
    print(json.dumps({"what": given.what, **asyncio.run(work(given))}))


if __name__ == "__main__":
    main()
