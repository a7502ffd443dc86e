"""The engine without text: requests of token ids go in, steps run, token ids come out.

A step reads as a sentence: plan, masks, run, advance grammars, apply. Everything a request can do wrong ends in an
output for that request alone; a step that fails as a whole ends the requests that were in it and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from tokenmill.engine.status import CoreInfo, EngineStats
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.masks import StepMasks
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, RowResult, SequenceOutput, StepPlan, StepResult

log = logging.getLogger(__name__)

MAX_FAILED_STEPS_IN_A_ROW = 3
GRAMMAR_PATIENCE_S = 0.005  # how long an otherwise idle engine waits for a grammar before it looks at its mail


class Runner(Protocol):
    def run(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult: ...

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Take all the memory that steps will ever take, before the first request. `while_compiling` is called while
        kernels are compiled, if any are."""
        ...

    def next_idle_task(self) -> bool:
        """Do a moment's work that later steps would have to do themselves; False when nothing is left of it."""
        ...


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: CoreInfo,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: None where there is no tokenizer, and so nothing that could be constrained."""
        self.info = info
        self._grammars = grammars or Grammars(Compiler(no_vocabulary), 1, 1)
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
        return bool(self._refusals) or self._grammars.num_waiting > 0 or self._scheduler.has_work

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar now rather than while others run; raises InvalidRequest where it has none."""
        self._grammars.prepare(request)

    def run_idle_task(self) -> bool:
        """For when there is no work; False when there is nothing to prepare either."""
        return self._runner.next_idle_task()

    def add(self, request: Request) -> None:
        """Take a request; one that can't be served answers with an error output at the next step."""
        if request.params.guided is None or self._grammars.is_ready(request):
            self._admit(request)
        else:
            self._grammars.hold(request)

    def _admit(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except TokenmillError as error:
            self._refuse(request, error)

    def _refuse(self, request: Request, error: TokenmillError) -> None:
        self._refusals.append(refusal(request.request_id, error))

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self._grammars.forget(request_id)
            self._scheduler.abort(request_id)
        else:
            self._scheduler.abort_sequence(request_id, index)

    def step(self) -> list[SequenceOutput]:
        started = self._clock()
        self._admit_compiled()
        outputs, self._refusals = self._refusals, []
        plan = self._scheduler.plan()
        if plan is not None:
            masks = self._grammars.masks(plan)
            result = self._run(plan, masks)
            result = self._grammars.advance(plan, result)
            outputs += self._scheduler.apply(plan, result)
        elif self._grammars.num_waiting:
            self._grammars.wait(GRAMMAR_PATIENCE_S)
        self._num_steps += 1
        self._busy_s += self._clock() - started
        return outputs

    def _admit_compiled(self) -> None:
        """Requests whose grammars are compiled come in; grammars of requests that are over may go."""
        for request, error in self._grammars.settled():
            if error is None:
                self._admit(request)
            else:
                self._refuse(request, error)
        self._grammars.release(self._scheduler.has)

    def stats(self) -> EngineStats:
        seen = self._scheduler.stats()
        return EngineStats(
            running=seen.running,
            waiting=seen.waiting + self._grammars.num_waiting,
            kv_blocks_used=seen.kv_blocks_used,
            kv_blocks_total=seen.kv_blocks_total,
            prefix_hit_tokens=seen.prefix_hit_tokens,
            prefix_query_tokens=seen.prefix_query_tokens,
            preemptions=seen.preemptions,
            steps=self._num_steps,
            busy_s=self._busy_s,
            drafted_tokens=seen.drafted_tokens,
            accepted_tokens=seen.accepted_tokens,
            engine_pid=os.getpid(),
        )

    def _run(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        """A step that raises fails its own rows; one that keeps raising is not survivable."""
        try:
            result = self._runner.run(plan, masks) if masks is not None else self._runner.run(plan)
        except Exception as error:
            self._failed_steps += 1
            self._scheduler.cancel_prefetch()
            if self._failed_steps >= MAX_FAILED_STEPS_IN_A_ROW:
                raise
            log.exception("a step failed; its %d requests end with an error", len(plan.rows))
            return failed_step(plan, f"the step could not be computed: {error}")
        self._failed_steps = 0
        return result


def no_vocabulary() -> Vocabulary:
    raise InvalidRequest("this model has no tokenizer, so no schema or grammar can be followed", param="guided")


def refusal(request_id: str, error: TokenmillError) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, finish_reason="error", error=str(error), error_code=error.code)


def failed_step(plan: StepPlan, message: str) -> StepResult:
    return StepResult(rows=[RowResult(row=row.row, error=message) for row in plan.rows])
