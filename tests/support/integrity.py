"""Invariants of plans and of steps in flight, besides the scheduler's own `check_integrity`."""

from __future__ import annotations

from tests.support.simulated_runner import SimulatedRunner
from tokenmill.config.engine import SchedulerConfig
from tokenmill.scheduler import Scheduler
from tokenmill.types import BACKGROUND_PRIORITY, StepPlan


def check_plan(scheduler: Scheduler, plan: StepPlan, config: SchedulerConfig, *, is_short: bool) -> None:
    """Require that the budget is kept and that the plan has every running sequence, except those that wait for
    blocks (`is_short`), yield to others as background work, or are retried separately after a failed step."""
    assert 0 < plan.num_tokens <= config.num_tokens
    rows = [row.row for row in plan.rows]
    retried = scheduler.retried_requests
    assert len(set(rows)) == len(rows) <= config.num_rows
    for sequence in scheduler.running:
        assert sequence.group is not None
        is_left_out = sequence.is_on_runner and sequence.row not in rows and sequence.group.wants(sequence) > 0
        waits_for_retried = bool(retried) and sequence.state.request.request_id not in retried
        may_be = is_short or sequence.group.priority >= BACKGROUND_PRIORITY or waits_for_retried
        assert may_be or not is_left_out, "a running sequence starves"


def check_in_flight(scheduler: Scheduler, runner: SimulatedRunner) -> None:
    """Require that no block is free while a plan in flight may write it."""
    assert scheduler.num_in_flight == runner.num_in_flight
    free = [block for block in runner.blocks_in_flight() if runner.cache.pool.is_free(block)]
    assert not free, f"blocks {free} are free while a step in flight writes them"
