"""Memory: hardly a slot is wasted on real chat lengths, and samples share their prompt."""

from __future__ import annotations

import csv
from pathlib import Path

from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.params import SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, RowResult, StepPlan, StepResult

NUM_CHATS = 200


def token_for_every_row(plan: StepPlan) -> StepResult:
    rows = [RowResult(row=row.row, token_ids=[9] if row.sample else []) for row in plan.rows]
    return StepResult(step=plan.step, rows=rows)


def scheduler_of(num_blocks: int, **config: int) -> tuple[Scheduler, KVCache]:
    cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=16)
    return Scheduler(config=SchedulerConfig(**config), cache=cache, max_rows=64, clock=lambda: 0.0), cache


def request(name: int, prompt_len: int, max_tokens: int, n: int = 1) -> Request:
    prompt = [1000 + name, *range(prompt_len - 1)]
    return Request(
        request_id=str(name), prompt_token_ids=prompt, params=SamplingParams(n=n), max_tokens=max_tokens, seed=name
    )


def test_wasted_slots_on_chat_lengths(shared_dir: Path) -> None:
    with (shared_dir / "traces" / "chat_lengths.csv").open() as file:
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    scheduler, cache = scheduler_of(4000, max_running=64, token_budget=512, max_waiting=NUM_CHATS)
    for name, (prompt_len, output_len) in enumerate(lengths[:NUM_CHATS]):
        scheduler.add(request(name, max(1, prompt_len), max(1, output_len)))
    wasted = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        outcome = token_for_every_row(plan)
        scheduler.apply(outcome)
        if cache.num_used:
            used = sum(sequence.computed for sequence in scheduler.running)
            wasted.append(1 - used / (cache.num_used * cache.block_size))
    average = sum(wasted) / len(wasted)
    print(f"wasted KV slots: {average:.2%} over {len(wasted)} steps")
    assert average < 0.04


def test_four_samples_share_their_prompt() -> None:
    def most_blocks(n: int) -> int:
        scheduler, cache = scheduler_of(1000, token_budget=512)
        scheduler.add(request(0, 1000, 64, n=n))
        most = 0
        while scheduler.has_work:
            plan = scheduler.plan()
            assert plan is not None
            most = max(most, cache.num_used)
            scheduler.apply(token_for_every_row(plan))
        return most

    one, four = most_blocks(1), most_blocks(4)
    print(f"blocks of one sample: {one}, of four: {four} ({four / one:.2f}x)")
    assert one == 67  # ceil(1063 / 16)
    assert four < 1.3 * one
