"""Steps of a pipeline's lanes: each takes its share, and none takes what is in flight."""

from __future__ import annotations

import pytest

from tests.support.scheduler_bench import ask, tokens_of
from tests.support.simulated_runner import SimulatedRunner
from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, SequenceOutput, StepPlan


class LaneBench:
    """A scheduler and a runner with several steps in flight."""

    def __init__(self, number: int, **config: object) -> None:
        self.cache = KVCache(windows=[None], num_blocks=200, block_size=4)
        settings = SchedulerConfig(**{"max_running": 8, "token_budget": 32, **config})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config=settings, cache=self.cache, max_rows=8, clock=lambda: 0.0, num_lanes=number)
        self.runner = SimulatedRunner(self.cache)
        self.number = number
        self.flying: list[StepPlan] = []
        self.outputs: list[SequenceOutput] = []

    def launch(self) -> list[StepPlan]:
        """Fill the lanes; the plans in flight."""
        while len(self.flying) < self.number and (plan := self.scheduler.plan()) is not None:
            self.flying.append(plan)
        return self.flying

    def collect(self) -> None:
        self.outputs += self.scheduler.apply(self.runner.run(self.flying.pop(0)))
        self.scheduler.check_integrity()

    def drain(self) -> None:
        while self.scheduler.has_work:
            assert self.launch()
            self.collect()


def rows(plan: StepPlan) -> set[int]:
    return {row.row for row in plan.rows}


def test_each_lane_has_its_share_and_no_sequence_is_in_two() -> None:
    lanes = LaneBench(2)
    for name in "abcdef":
        lanes.scheduler.add(ask(name, prompt_len=4, max_tokens=20))
    for _ in range(4):
        first, second = lanes.launch()
        assert len(first.rows) == len(second.rows) == 3
        assert not rows(first) & rows(second)
        lanes.collect()
    lanes.scheduler.abort("a")  # lanes become even again
    lanes.scheduler.abort("b")
    lanes.collect()
    for _ in range(3):
        lanes.launch()
        lanes.collect()
    assert [len(plan.rows) for plan in lanes.launch()] == [2, 2]
    lanes.drain()


def test_chunks_of_one_prompt_follow_each_other_at_once() -> None:
    lanes = LaneBench(4, token_budget=16, max_running=4)
    lanes.scheduler.add(ask("long", prompt_len=40))
    plans = lanes.launch()
    assert [(plan.rows[0].start, len(plan.rows[0].token_ids)) for plan in plans] == [(0, 4), (4, 4), (8, 4), (12, 4)]
    lanes.drain()


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [8, 9, 32])
def test_lanes_change_no_token_and_nobody_starves(number: int, budget: int) -> None:
    asked: list[Request] = [
        ask(name, prompt_len=3 + 5 * place, n=1 + place % 2) for place, name in enumerate("abcdefgh")
    ]
    expected = LaneBench(1)
    found = LaneBench(number, token_budget=budget)
    for lanes in (expected, found):
        for request in asked:
            lanes.scheduler.add(request)
        lanes.drain()
    for request in asked:
        for index in range(request.params.n):
            tokens = tokens_of(found.outputs, request.request_id, index)
            assert len(tokens) == 5
            assert tokens == tokens_of(expected.outputs, request.request_id, index)
