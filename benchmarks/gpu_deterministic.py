"""What `--deterministic` gives and costs on one GPU, with random weights.

    python benchmarks/gpu_deterministic.py SMALL_DIR [LARGE_DIR] [--requests 500]

On the small model: mixed requests (prompts of 1 to 700 tokens; greedy and drawn; penalties) one at a time and all
together, in chunks and with preemption; how many get the same tokens, with and without the mode. On the large model:
the same workloads with and without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_offline import greedy, prefill, prompt, single, steps

from tokenmill import LLM, SamplingParams


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(11)
    prompts = [prompt(rng, rng.choice((1, 7, 33, 150, 400, 700))) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.8)), top_p=rng.choice((1.0, 0.9)), ignore_eos=True, seed=number,
            max_tokens=rng.randint(8, 40), repetition_penalty=rng.choice((1.0, 1.2)),
        )
        for number in range(count)
    ]  # fmt: skip
    return prompts, params


def opened(model: str, *, deterministic: bool, **settings: int) -> LLM:
    return LLM(
        model, load_format="dummy", dtype="bfloat16", device="cuda", deterministic=deterministic, max_waiting=4096,
        prefix_caching=False, fast_start=True, **settings,
    )  # fmt: skip


def close(llm: LLM) -> None:
    llm.close()
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def agreement(model: str, count: int, *, deterministic: bool) -> dict[str, float]:
    """Together: a budget of 1,000 tokens cuts prompts anywhere; a pool of 500 blocks makes rows wait and return."""
    prompts, params = mixed_requests(count)
    limits = {"max_context": 2048, "max_running": 128, "token_budget": 1000, "num_blocks": 500}
    llm = opened(model, deterministic=deterministic, **limits)
    began = time.perf_counter()
    together = [one.outputs[0].token_ids for one in llm.generate(prompts, params, progress=False)]
    preemptions = llm.core.stats().preemptions
    middle = time.perf_counter()
    alone = [
        llm.generate([ids], one, progress=False)[0].outputs[0].token_ids
        for ids, one in zip(prompts, params, strict=True)
    ]
    close(llm)
    same = sum(ours == theirs for ours, theirs in zip(alone, together, strict=True))
    return {
        "same": same,
        "requests": count,
        "preemptions": preemptions,
        "together_s": middle - began,
        "alone_s": time.perf_counter() - middle,
    }


def some_requests(llm: LLM) -> dict[str, float]:
    """300 requests, input U[256, 768], output U[128, 384]."""
    rng = random.Random(1)
    lengths = [(rng.randint(256, 768), rng.randint(128, 384)) for _ in range(300)]
    began = time.perf_counter()
    llm.generate([prompt(rng, n) for n, _ in lengths], [greedy(n) for _, n in lengths], progress=False)
    return {"requests_out_tok_s": sum(n for _, n in lengths) / (time.perf_counter() - began)}


def speed(model: str, *, deterministic: bool) -> dict[str, float]:
    llm = opened(model, deterministic=deterministic, max_context=8192)
    llm.core.runner.prepare()  # type: ignore[attr-defined]
    found = {**single(llm), **steps(llm), **prefill(llm), **some_requests(llm)}
    close(llm)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small")
    parser.add_argument("large", nargs="?")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--requests-fastest", type=int, default=100, help="of these, without the mode")
    given = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for mode, deterministic in (("deterministic", True), ("fastest", False)):
        count = given.requests if deterministic else given.requests_fastest
        figures[mode] = agreement(given.small, count, deterministic=deterministic)
        print(mode, {name: round(value, 2) for name, value in figures[mode].items()}, flush=True)
        if given.large:
            figures[mode] |= speed(given.large, deterministic=deterministic)
    if given.large:
        for name in [key for key in figures["fastest"] if key.endswith(("_ms", "_tok_s")) or "_ms_" in key]:
            steady, fastest = figures["deterministic"][name], figures["fastest"][name]
            print(f"{name:24} fastest {fastest:12,.2f}   deterministic {steady:12,.2f}   {steady / fastest - 1:+.1%}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
