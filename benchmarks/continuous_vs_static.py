"""Continuous against static batching, on the literature's example.

32 requests, batch 8; every eighth generates 100 tokens, the others 10. Static batching waits for the longest of a
batch; continuous batching gives a finished sequence's place to the next. The model is scripted and its step cost
constant, so the ratio of steps is the ratio of times. Prints a table and, as the last line, one JSON object.

    python benchmarks/continuous_vs_static.py [--step-cost-s 0.01]
"""

from __future__ import annotations

import argparse
import json

from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.params import SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, RowResult, StepPlan, StepResult

NUM_REQUESTS, BATCH, PROMPT_LEN = 32, 8, 16
LONG, SHORT = 100, 10


def num_outputs(number: int) -> int:
    return LONG if number % 8 == 0 else SHORT


def scripted_step(plan: StepPlan) -> StepResult:
    rows = [RowResult(row=row.row, token_ids=[1] if row.sample else []) for row in plan.rows]
    return StepResult(step=plan.step, rows=rows)


def request(number: int) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=[number] * PROMPT_LEN,
        params=SamplingParams(),
        max_tokens=num_outputs(number),
        seed=number,
    )


def measure(batches: list[list[Request]], step_cost_s: float) -> dict[str, float]:
    """Add a batch when the one before is done. One batch of all requests is continuous batching."""
    cache = KVCache(windows=[None], num_blocks=1000, block_size=16)
    config = SchedulerConfig(max_running=BATCH, token_budget=BATCH * PROMPT_LEN)
    scheduler = Scheduler(config=config, cache=cache, max_rows=BATCH, clock=lambda: 0.0)
    num_tokens = 0
    for batch in batches:
        for one in batch:
            scheduler.add(one)
        while (plan := scheduler.plan()) is not None:
            num_tokens += sum(len(output.token_ids) for output in scheduler.apply(scripted_step(plan)))
    steps = scheduler.stats().steps
    return {
        "steps": steps,
        "seconds": steps * step_cost_s,
        "tokens_per_s": num_tokens / (steps * step_cost_s),
        "tokens_per_step": num_tokens / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-cost-s", type=float, default=0.01, help="seconds that every step takes")
    step_cost_s = parser.parse_args().step_cost_s
    requests = [request(number) for number in range(NUM_REQUESTS)]
    static = measure([requests[first : first + BATCH] for first in range(0, NUM_REQUESTS, BATCH)], step_cost_s)
    continuous = measure([requests], step_cost_s)
    ratio = static["seconds"] / continuous["seconds"]
    print(f"{'policy':<12}{'steps':>8}{'seconds':>10}{'tokens/s':>12}{'tokens/step':>13}")
    for name, seen in (("static", static), ("continuous", continuous)):
        numbers = f"{seen['steps']:>8.0f}{seen['seconds']:>10.2f}{seen['tokens_per_s']:>12.1f}"
        print(f"{name:<12}{numbers}{seen['tokens_per_step']:>13.2f}")
    print(f"continuous is {ratio:.2f}x as fast")
    print(json.dumps({"static": static, "continuous": continuous, "ratio": ratio}))


if __name__ == "__main__":
    main()
