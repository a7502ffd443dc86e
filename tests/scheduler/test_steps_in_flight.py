"""Plans that are made while others are in flight: what they hold, what waits, and what goes back when."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.support.integrity import check_in_flight
from tests.support.simulated_runner import EOS, SimulatedRunner, expected_tokens
from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.params import BeamParams, SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.types import PENDING, Request, RowPlan, StepPlan


def opened(*, token_budget: int = 16, num_blocks: int = 200, max_running: int = 8) -> tuple[Scheduler, SimulatedRunner]:
    cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=4)
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget)
    scheduler = Scheduler(config=config, cache=cache, max_rows=16, clock=lambda: 0.0, continues=lambda _: True)
    return scheduler, SimulatedRunner(cache)


def asked(number: int, prompt: list[int], max_tokens: int = 4, *, priority: int = 0, **params: object) -> Request:
    return Request(
        request_id=f"r{number}", prompt_token_ids=prompt, max_tokens=max_tokens, seed=number, priority=priority,
        params=SamplingParams(**{"ignore_eos": True, **params}), eos_token_ids=[EOS],
    )  # type: ignore[arg-type]  # fmt: skip


def lengths(rows: list[RowPlan]) -> list[tuple[int, int]]:
    return [(row.start, len(row.token_ids)) for row in rows]


def launched(scheduler: Scheduler, runner: SimulatedRunner) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    runner.launch(plan)
    return plan


def test_the_rest_of_a_prompt_newcomers_and_pending_tokens_follow_at_once() -> None:
    scheduler, runner = opened()
    for number, length in enumerate((10, 12, 30)):
        scheduler.add(asked(number, [number + 1] * length))
    first, second = launched(scheduler, runner), launched(scheduler, runner)
    assert lengths(first.rows) == [(0, 10), (0, 6)]
    # The first feeds the token it draws, the second has six left and draws, the third takes what remains.
    assert lengths(second.rows) == [(10, 1), (6, 6), (0, 9)]
    assert second.rows[0].token_ids == [PENDING] and second.rows[0].output_index == 1
    assert [new.row for new in second.new_rows] == [2]


def test_a_prompt_that_begins_like_one_in_flight_waits_for_its_blocks() -> None:
    scheduler, runner = opened()
    for number in range(3):
        scheduler.add(asked(number, [7] * 16 + [number + 1]))
    first, second = launched(scheduler, runner), launched(scheduler, runner)
    assert lengths(first.rows) == [(0, 16)]
    assert lengths(second.rows) == [(16, 1)], "the others would compute the same again"
    scheduler.apply(runner.collect(first.step))
    assert lengths(launched(scheduler, runner).rows) == [(17, 1), (16, 1), (16, 1)]


def test_a_sequence_that_draws_its_last_token_is_not_planned_again() -> None:
    scheduler, runner = opened()
    for number in range(4):
        scheduler.add(asked(number, [number + 1] * 8, max_tokens=1))
    assert lengths(launched(scheduler, runner).rows) == [(0, 8), (0, 8)]
    assert lengths(launched(scheduler, runner).rows) == [(0, 8), (0, 8)]
    assert scheduler.plan() is None, "nothing is left before a step is applied"


@pytest.mark.parametrize("params", [{"beam": BeamParams(2)}, {"prompt_logprobs": 0}])
def test_a_row_that_the_host_decides_for_waits_for_its_result(params: dict[str, object]) -> None:
    scheduler, runner = opened()
    scheduler.add(asked(1, [5, 6, 7], **params))
    first = launched(scheduler, runner)
    assert first.rows[0].sample and scheduler.plan() is None
    scheduler.apply(runner.collect(first.step))
    assert scheduler.plan() is not None


def test_what_a_step_in_flight_may_write_goes_back_with_it() -> None:
    scheduler, runner = opened()
    for number in range(2):
        scheduler.add(asked(number, [number + 1] * 8, max_tokens=20))
    steps = [launched(scheduler, runner), launched(scheduler, runner)]
    used = runner.cache.num_used
    scheduler.abort("r1")
    assert runner.cache.num_used == used and scheduler.stats().running == 1
    scheduler.apply(runner.collect(steps[0].step))
    check_in_flight(scheduler, runner)
    third = launched(scheduler, runner)
    assert len(third.rows) == 1 and not third.freed_rows, "the row is still written"
    scheduler.apply(runner.collect(steps[1].step))
    scheduler.check_integrity()
    assert runner.cache.num_used < used
    assert launched(scheduler, runner).freed_rows == [1]


def test_a_sequence_that_ended_is_void_in_the_step_behind() -> None:
    scheduler, runner = opened()
    request = asked(1, [9, 9], max_tokens=20)
    stop = expected_tokens(request, 0)[1]
    request = asked(1, [9, 9], max_tokens=20, stop_token_ids=[stop])
    scheduler.add(request)
    plans = deque([launched(scheduler, runner)])
    outputs = []
    while plans:
        if (plan := scheduler.plan()) is not None:
            runner.launch(plan)
            plans.append(plan)
        outputs += scheduler.apply(runner.collect(plans.popleft().step))
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(request, 0)
    assert not scheduler.has_work and runner.cache.num_used == 0


def test_a_failed_step_ends_its_requests_and_voids_the_steps_behind() -> None:
    scheduler, runner = opened()
    for number in range(4):
        scheduler.add(asked(number, [number + 1] * 16))
    first, second = launched(scheduler, runner), launched(scheduler, runner)
    assert lengths(second.rows) == [(16, 1), (0, 15)]
    for plan in (first, second):
        runner.collect(plan.step)
    outputs = scheduler.apply_failure("the device is gone")
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("r0", "error")]
    scheduler.check_integrity()
    assert scheduler.num_in_flight == 0 and scheduler.stats().waiting == 3, "the second waits again"


def said(depth: int, seed: int) -> tuple[dict[str, list[int]], int]:
    """What a dozen requests say in little memory, some of them given up on the way, and how many tokens were fed before
    the host had seen them."""
    rng = random.Random(seed)
    scheduler, runner = opened(
        token_budget=rng.randint(6, 40), num_blocks=rng.choice([20, 40, 200]), max_running=rng.randint(2, 6)
    )
    requests = [
        asked(number, [rng.randint(1, 4) for _ in range(rng.randint(1, 40))], rng.randint(1, 12),
              priority=rng.choice([0, 0, 1]), n=rng.choice([1, 1, 1, 2]))
        for number in range(12)
    ]  # fmt: skip
    given_up = {rng.choice(requests).request_id for _ in range(2)}
    for request in requests:
        scheduler.add(request)
    tokens: dict[str, list[int]] = {f"{one.request_id}/{i}": [] for one in requests for i in range(one.params.n)}
    in_flight: deque[StepPlan] = deque()
    num_pending = num_steps = 0
    while scheduler.has_work:
        while len(in_flight) < depth and (plan := scheduler.plan()) is not None:
            num_pending += sum(row.token_ids == [PENDING] for row in plan.rows)
            runner.launch(plan)
            in_flight.append(plan)
        num_steps += 1
        if num_steps == 5:
            for name in given_up:
                scheduler.abort(name)
        for output in scheduler.apply(runner.collect(in_flight.popleft().step)):
            tokens[f"{output.request_id}/{output.index}"] += output.token_ids
        scheduler.check_integrity()
        check_in_flight(scheduler, runner)
    for request in requests:
        for index in range(request.params.n):
            if request.request_id not in given_up:
                assert tokens[f"{request.request_id}/{index}"] == expected_tokens(request, index)
    return {name: one for name, one in tokens.items() if name.split("/")[0] not in given_up}, num_pending


def test_every_depth_says_the_same() -> None:
    num_pending = dict.fromkeys(range(1, 5), 0)
    for seed in range(25):
        found = {}
        for depth in num_pending:
            found[depth], fed = said(depth, seed)
            num_pending[depth] += fed
        assert found[1] == found[2] == found[3] == found[4]
    assert num_pending[1] == 0 and all(num_pending[depth] > 500 for depth in (2, 3, 4)), num_pending
