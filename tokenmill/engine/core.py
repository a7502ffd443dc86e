"""The engine without text: requests of token ids go in, steps run, token ids come out.

A step reads as a sentence: plan, run, apply. Everything a request can do wrong ends in an output for that
request alone; a step that fails as a whole ends the requests that were in it and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from tokenmill.engine.status import CoreInfo, EngineStats
from tokenmill.errors import TokenmillError
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, RowResult, SequenceOutput, StepPlan, StepResult

log = logging.getLogger(__name__)

MAX_FAILED_STEPS_IN_A_ROW = 3


class Runner(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


class EngineCore:
    def __init__(
        self, scheduler: Scheduler, runner: Runner, info: CoreInfo, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._refusals: list[SequenceOutput] = []
        self._num_steps = 0
        self._busy_s = 0.0
        self._failed_steps = 0

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def has_work(self) -> bool:
        return bool(self._refusals) or self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Take a request; one that can't be served answers with an error output at the next step."""
        try:
            self._scheduler.add(request)
        except TokenmillError as error:
            self._refusals.append(refusal(request.request_id, error))

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self._scheduler.abort(request_id)
        else:
            self._scheduler.abort_sequence(request_id, index)

    def step(self) -> list[SequenceOutput]:
        started = self._clock()
        outputs, self._refusals = self._refusals, []
        plan = self._scheduler.plan()
        if plan is not None:
            result = self._run(plan)
            outputs += self._scheduler.apply(plan, result)
        self._num_steps += 1
        self._busy_s += self._clock() - started
        return outputs

    def stats(self) -> EngineStats:
        seen = self._scheduler.stats()
        return EngineStats(
            running=seen.running,
            waiting=seen.waiting,
            kv_blocks_used=seen.kv_blocks_used,
            kv_blocks_total=seen.kv_blocks_total,
            prefix_hit_tokens=seen.prefix_hit_tokens,
            prefix_query_tokens=seen.prefix_query_tokens,
            preemptions=seen.preemptions,
            steps=self._num_steps,
            busy_s=self._busy_s,
            engine_pid=os.getpid(),
        )

    def _run(self, plan: StepPlan) -> StepResult:
        """A step that raises fails its own rows; one that keeps raising is not survivable."""
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS_IN_A_ROW:
                raise
            log.exception("a step failed; its %d requests end with an error", len(plan.rows))
            return failed_step(plan, f"the step could not be computed: {error}")
        self._failed_steps = 0
        return result


def refusal(request_id: str, error: TokenmillError) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, finish_reason="error", error=str(error), error_code=error.code)


def failed_step(plan: StepPlan, message: str) -> StepResult:
    return StepResult(rows=[RowResult(row=row.row, error=message) for row in plan.rows])
