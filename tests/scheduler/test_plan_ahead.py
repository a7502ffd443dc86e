"""Prompts of the next step that are planned while this one is computed: the same tokens, the same order, no rest."""

from __future__ import annotations

import random

from tests.support.integrity import check_all, check_plan
from tests.support.simulated_runner import EOS, SimulatedRunner, expected_tokens
from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.params import SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, RowPlan, StepPlan, StepResult


def opened(*, token_budget: int = 16, num_blocks: int = 200, max_running: int = 8) -> tuple[Scheduler, SimulatedRunner]:
    cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=4)
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget, max_waiting=100)
    scheduler = Scheduler(config=config, cache=cache, max_rows=16, clock=lambda: 0.0, lookahead_tokens=1)
    return scheduler, SimulatedRunner(cache)


def asked(number: int, prompt: list[int], max_tokens: int = 4, **more: object) -> Request:
    params = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
    return Request(
        request_id=f"r{number}", prompt_token_ids=prompt, params=params, eos_token_ids=[EOS], max_tokens=max_tokens,
        seed=number, **more,
    )  # fmt: skip


def lengths(rows: list[RowPlan]) -> list[tuple[int, int]]:
    return [(row.start, len(row.token_ids)) for row in rows]


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_the_rest_of_a_prompt_and_newcomers_follow_and_the_next_plan_repeats_them() -> None:
    scheduler, runner = opened()
    for number, length in enumerate((10, 12, 30)):
        scheduler.add(asked(number, [number + 1] * length))
    first, ahead = planned(scheduler), scheduler.plan_ahead()
    assert lengths(first.rows) == [(0, 10), (0, 6)]
    # The first will want a token of the sixteen, the second has six left and draws, the third takes what remains.
    assert ahead is not None and lengths(ahead.rows) == [(6, 6), (0, 9)]
    assert [new.row for new in ahead.new_rows] == [2]
    scheduler.apply(first, runner.run(first, lambda: ahead))
    second = planned(scheduler)
    assert lengths(second.rows) == [(10, 1), (6, 6), (0, 9)] and not second.new_rows
    assert second.rows[1] is ahead.rows[0] and second.rows[2] is ahead.rows[1]


def test_who_begins_like_a_prompt_underway_waits_for_its_blocks() -> None:
    scheduler, runner = opened()
    for number in range(3):
        scheduler.add(asked(number, [7] * 16 + [number + 1]))
    first, ahead = planned(scheduler), scheduler.plan_ahead()
    assert lengths(first.rows) == [(0, 16)]
    assert ahead is not None and lengths(ahead.rows) == [(16, 1)], "the others would compute the same again"
    scheduler.apply(first, runner.run(first, lambda: ahead))
    assert lengths(planned(scheduler).rows) == [(16, 1), (16, 1), (16, 1)]


def test_a_last_token_leaves_its_place_in_the_budget() -> None:
    scheduler, _ = opened()
    for number in range(4):
        scheduler.add(asked(number, [number + 1] * 8, max_tokens=1))
    planned(scheduler)
    ahead = scheduler.plan_ahead()
    assert ahead is not None and lengths(ahead.rows) == [(0, 8), (0, 8)]


def test_an_aborted_one_is_not_repeated_and_a_failed_step_takes_all_back() -> None:
    scheduler, runner = opened()
    for number in range(4):
        scheduler.add(asked(number, [number + 1] * 16))
    first, ahead = planned(scheduler), scheduler.plan_ahead()
    assert ahead is not None and lengths(ahead.rows) == [(0, 15)]
    result = runner.run(first, lambda: ahead)
    scheduler.abort("r1")
    scheduler.apply(first, result)
    second = planned(scheduler)
    assert not any(row is ahead.rows[0] for row in second.rows)
    assert scheduler.plan_ahead() is not None
    scheduler.cancel_prefetch()
    check_all(scheduler)
    assert scheduler.stats().waiting == 2, "they wait again"


def test_nothing_changes_in_what_is_said() -> None:
    """Many requests at once in little memory, some of them given up in the middle."""
    num_early = 0
    for seed in range(40):
        rng = random.Random(seed)
        budget = rng.randint(6, 40)
        scheduler, runner = opened(
            token_budget=budget, num_blocks=rng.choice([20, 40, 200]), max_running=rng.randint(2, 6)
        )
        requests = [
            asked(number, [rng.randint(1, 4) for _ in range(rng.randint(1, 40))], rng.randint(1, 12),
                  priority=rng.choice([0, 0, 1]))
            for number in range(12)
        ]  # fmt: skip
        for request in requests:
            scheduler.add(request)
        said: dict[str, list[int]] = {request.request_id: [] for request in requests}
        given_up: set[str] = set()

        def ahead(scheduler: Scheduler = scheduler) -> StepPlan | None:
            nonlocal num_early
            plan = scheduler.plan_ahead()
            num_early += len(plan.rows) if plan else 0
            return plan

        while scheduler.has_work:
            plan = planned(scheduler)
            check_plan(scheduler, plan, scheduler._config)
            result: StepResult = runner.run(plan, ahead)
            check_all(scheduler)
            if rng.random() < 0.05:
                given_up.add(name := rng.choice(requests).request_id)
                scheduler.abort(name)
            for output in scheduler.apply(plan, result):
                said[output.request_id] += output.token_ids
        for request in requests:
            if request.request_id not in given_up:
                assert said[request.request_id] == expected_tokens(request, 0)
    assert num_early > 300, num_early
