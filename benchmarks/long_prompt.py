"""What a long prompt does to streams that run beside it, with and without a limit on the time of steps.

    python benchmarks/long_prompt.py MODEL [--prompt-len 4096] [--streams 8] [--step-ms 0,100] [--slo tpot=60ms]

For each setting: the gaps between tokens of the streams before the prompt comes, while it is computed and afterwards,
and the time to its own first token, alone and beside them. Meanwhile the streams' contexts grow, which makes steps
longer too: so the same streams run once more, without the prompt, and the gaps between the same tokens are compared
("undisturbed"). One JSON object per setting.

`throughput_cost` compares the time of the same work with the first setting: until the prompt's first token has come and
the streams have as many more tokens as they had when it came in this setting. In the first setting most of these tokens
come after the prompt, so its streams run on until they have them, with the same contexts; it is measured last, when
their number is known. (Until 2026-11-18 these tokens were counted at the rate before the prompt came, when contexts
were short. Beside small chunks, contexts grow from 30 to 1,000 tokens in 14 s, which doubles the time of a step: that
was counted as a cost of small chunks.) `separate_s` is the time of the same work one after the other: the prompt alone,
then the same tokens of undisturbed streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.bench.measures import percentile
from tokenmill.types import PromptRequest

NUM_WARM = 20  # tokens of each stream before anything is measured
STORY = "Once upon a time a miller lived beside a quiet river, and every day he ground the corn of his neighbours. "
BEFORE_S = 3.0  # the undisturbed time that is measured
AFTER_S = 2.0
NUM_LONGEST = 5  # gaps that are told
NUM_PARTS = 16  # of the prompt's time, for each of which gaps are told
WARM_PROMPT = 8192  # tokens of the longest prompt that is computed before anything is measured


def prompt(length: int, seed: int) -> PromptRequest:
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    return PromptRequest(prompt=[(seed + place * 7919) % 4000 + 100 for place in range(length)], params=params)


async def stream(engine: AsyncEngine, seed: int, times: list[float]) -> None:
    """Read tokens as they come. Text is what brings them at once: one that ends within a character waits for the next,
    which random ones do so often that a tenth of the gaps would be two steps long."""
    params = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.0)
    prompt: str | list[int] = f"Chapter {seed}. {STORY}"
    if engine.frontend.tokenizer is None:  # a shape without a vocabulary: nothing waits for text
        prompt = [seed % 4000 + 100 + place for place in range(32)]
    asked = PromptRequest(prompt=prompt, params=params)
    async for event in engine.submit(asked):
        times += [time.perf_counter()] if event.token_ids else []


async def wait_for_tokens(tasks: list[asyncio.Task[None]], times: list[list[float]], num_more: int) -> None:
    """Wait until every stream has so many more tokens: the first ones may take long, where kernels are compiled for
    them. A stream that failed ends the measurement."""
    wanted = [len(seen) + num_more for seen in times]
    while not all(len(seen) >= number for seen, number in zip(times, wanted, strict=True)):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.1)


@asynccontextmanager
async def streams(
    engine: AsyncEngine, number: int
) -> AsyncIterator[tuple[list[asyncio.Task[None]], list[list[float]]]]:
    """Streams that run meanwhile, and when each of their tokens came."""
    times: list[list[float]] = [[] for _ in range(number)]
    tasks = [asyncio.create_task(stream(engine, seed, seen)) for seed, seen in enumerate(times)]
    yield tasks, times
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_token_s(engine: AsyncEngine, asked: PromptRequest) -> float:
    began = time.perf_counter()
    async for _ in engine.submit(asked):
        return time.perf_counter() - began
    raise RuntimeError("no token came")


async def measure(
    model: str, length: int, num_streams: int, settle_s: float, settings: dict[str, Any], num_tokens: int = 0
) -> tuple[dict[str, Any], list[float]]:
    """Return the figures of a setting, and when the streams' tokens came: seconds since the prompt was sent, for all
    tokens until it was answered and at least `num_tokens`."""
    engine = await AsyncEngine.start(model, speculate="off", **settings)
    try:
        await asyncio.sleep(settle_s)
        for warm in (512, min(length, WARM_PROMPT)):
            await first_token_s(engine, prompt(warm, 1))
        alone_s = await first_token_s(engine, prompt(length, 2))
        async with streams(engine, num_streams) as (tasks, times):
            await wait_for_tokens(tasks, times, NUM_WARM)
            await asyncio.sleep(BEFORE_S)
            began = time.perf_counter()
            first = [len(seen) for seen in times]
            beside_s = await first_token_s(engine, prompt(length, 3))
            ended = time.perf_counter()
            await wait_for_tokens(tasks, times, 1)
            last = [len(seen) for seen in times]
            await asyncio.sleep(AFTER_S)
            while sum(map(len, times)) - sum(first) < num_tokens:
                await wait_for_tokens(tasks, times, 1)
        print(f"first token after {beside_s:.2f} s, alone {alone_s:.2f} s", file=sys.stderr, flush=True)
        async with streams(engine, num_streams) as (tasks, again):
            await wait_for_tokens(tasks, again, max(last))
    finally:
        await engine.close()
    gaps = [(after, after - before) for seen in times for before, after in pairwise(seen)]
    undisturbed = [
        after - before
        for seen, start, end in zip(again, first, last, strict=True)
        for before, after in pairwise(seen[start - 1 : end])
    ]
    came_s = sorted(at - began for seen in times for at in seen if at > began)
    num_during = sum(at <= beside_s for at in came_s)
    undisturbed_s = max(seen[end - 1] for seen, end in zip(again, last, strict=True)) - max(
        seen[start - 1] for seen, start in zip(again, first, strict=True)
    )
    quiet = [gap for at, gap in gaps if began - BEFORE_S < at < began]
    after = [gap for at, gap in gaps if at - gap >= ended]
    parts = [int((at - began) / (ended - began) * NUM_PARTS) for at, _ in gaps]
    by_part = [[gap for (_, gap), one in zip(gaps, parts, strict=True) if one == part] for part in range(NUM_PARTS)]
    during = [gap for at, gap in gaps if began < at and at - gap < ended]  # the one that it ended in too
    figures = {
        **settings,
        "gap_p50_ms_before": round(percentile(quiet, 50) * 1e3, 1),
        "gap_p99_ms_before": round(percentile(quiet, 99) * 1e3, 1),
        "gap_p50_ms_after": round(percentile(after, 50) * 1e3, 1),
        "gap_p99_ms_after": round(percentile(after, 99) * 1e3, 1),
        "gap_p50_ms_during": round(percentile(during, 50) * 1e3, 1),
        "gap_p99_ms_during": round(percentile(during, 99) * 1e3, 1),
        "longest_gaps_ms_during": sorted({round(gap * 1e3) for gap in during})[-NUM_LONGEST:],
        "gap_p50_and_p99_ms_by_part": [
            [round(percentile(one, of) * 1e3, 1) for of in (50, 99)] for one in by_part if one
        ],
        "gap_p50_ms_undisturbed": round(percentile(undisturbed, 50) * 1e3, 1),
        "gap_p99_ms_undisturbed": round(percentile(undisturbed, 99) * 1e3, 1),
        "gap_ratio_p99_to_undisturbed": round(percentile(during, 99) / percentile(undisturbed, 99), 2),
        "gap_ratio_p99": round(percentile(during, 99) / percentile(quiet, 99), 2),
        "ttft_s_alone": round(alone_s, 3),
        "ttft_s_beside": round(beside_s, 3),
        "ttft_ratio": round(beside_s / alone_s, 2),
        "tokens_during": num_during,
        "tokens_a_second_before": round(len(quiet) / BEFORE_S, 1),
        "separate_s": round(alone_s + undisturbed_s, 3),
    }
    return figures, came_s


def throughput_cost(figures: dict[str, Any], first: dict[str, Any], first_came_s: list[float]) -> float:
    """How much longer than in the first setting the same work takes: the prompt, and the streams' tokens that come
    until it is answered."""
    num_tokens = figures["tokens_during"]
    same_work_s = max(first["ttft_s_beside"], first_came_s[num_tokens - 1] if num_tokens else 0.0)
    return float(figures["ttft_s_beside"] / same_work_s - 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--settle-s", type=float, default=0.0, help="idle before anything: a GPU's graphs are captured")
    parser.add_argument("--step-ms", default="0,100")
    parser.add_argument("--settings", default="{}", help='of the engine, as JSON: {"load_format": "dummy"}')
    parser.add_argument("--slo", default="", help="promises, several with + between them")
    args = parser.parse_args()
    more: dict[str, Any] = json.loads(args.settings)
    tried: list[dict[str, Any]] = [{"step_ms": float(one)} for one in args.step_ms.split(",") if one]
    tried += [{"slo": one} for one in args.slo.split("+") if one]

    def run(settings: dict[str, Any], num_tokens: int = 0) -> tuple[dict[str, Any], list[float]]:
        shape = args.prompt_len, args.streams, args.settle_s
        return asyncio.run(measure(args.model, *shape, {**more, **settings}, num_tokens))

    others = [run(settings)[0] for settings in tried[1:]]
    first, first_came_s = run(tried[0], max((one["tokens_during"] for one in others), default=0))
    for figures in (first, *others):
        figures["throughput_cost"] = round(throughput_cost(figures, first, first_came_s), 3)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
