"""The engine core, which handles token ids only: requests go in, steps run, tokens come out.

One call of `step` launches what can be planned, collects the oldest step in flight, advances the grammars and applies
the result. An asynchronous device has up to `depth` steps in flight: the next step is launched before the current one
is collected, so the device computes while the host applies results and plans. Steps overlap only in this queue.

    host     launch 1  launch 2  collect 1  apply 1  launch 3  collect 2  apply 2  launch 4 ...
    device   [ step 1 ......... ][ step 2 .................. ][ step 3 ................. ][ step 4 ...

Rows with grammars overlap too: the tokens they may sample in step 2 depend on those sampled in step 1, but their
forward pass does not. Such a step gets its masks as soon as the previous step is applied, and samples then; the step
launched after it takes the sampled tokens as inputs:

    host     launch 2  collect 1  apply 1  masks 2 ─► draw 2  launch 3  collect 2  apply 2  masks 3 ─► draw 3 ...
    device   [ step 2: forward .................. ][ draw 2 ][ step 3: forward ...................... ][ draw 3 ]

A failure caused by one request becomes an error output of that request alone: if a whole step fails, its requests are
retried in smaller groups until the culprit is found (`scheduler/suspects.py`).
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from tokenmill.engine.adapters import AdapterStore, no_adapters
from tokenmill.engine.status import CoreInfo, EngineStats, FailedAdapter, LoadedAdapter
from tokenmill.errors import InvalidRequest, Overloaded, PeerDied, TokenmillError
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.masks import StepMasks
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.kv.blocks import BlockEvents
from tokenmill.observe.buckets import STEP_TOKENS
from tokenmill.scheduler import Scheduler
from tokenmill.types import KVCacheEvents, Request, RowInit, SequenceOutput, StepPlan, StepResult

if TYPE_CHECKING:
    from tokenmill.kv.traffic import BlockTraffic
    from tokenmill.lora.adapter import Adapter

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_CONSECUTIVE_FAILURES = 3  # requests ended by failed steps, without a successful step in between
# How long an otherwise idle engine waits for an adapter, for blocks or for a grammar before it reads its mailbox:
ADAPTER_WAIT_S = 0.005
FETCH_WAIT_S = 0.005
GRAMMAR_WAIT_S = 0.005


class Runner(Protocol):
    """Computes steps. Plans are launched in order, and their results are collected in the same order."""

    depth: int  # steps to keep in flight
    adapters: Mapping[str, Adapter]  # adapters that plans may load, by digest

    def continues(self, new: RowInit) -> bool:
        """Tell whether a row can take its newly sampled token as input before the host has seen that token."""
        ...

    def launch(self, plan: StepPlan) -> int:
        """Start a step and return the ticket to collect its result with."""
        ...

    def draw(self, ticket: int, masks: StepMasks) -> None:
        """Sample the tokens of a step that has rows with grammars; `masks`: the tokens that these rows may sample.
        Called once for such a step, before the next one is launched and before this one is collected."""
        ...

    def collect(self, ticket: int) -> StepResult:
        """Wait for a step and return its result."""
        ...

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Run a step of the largest size, so that all memory a step can need is allocated before the first request.
        `while_compiling` is called while kernels are compiled, if any are."""
        ...

    def next_idle_task(self) -> bool:
        """Run one short piece of work that later steps would otherwise have to do; return False if none is left."""
        ...


@dataclass(slots=True)
class InFlight:
    """A launched step, or the exception that launching it raised."""

    plan: StepPlan
    ticket: int | Exception
    lacks_masks: bool  # its rows with grammars have not sampled yet


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: CoreInfo,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
        traffic: BlockTraffic | None = None,
    ) -> None:
        """`grammars`: None for a model without a tokenizer, whose output can't be constrained. `adapters`: None for a
        model that can't have any. `traffic`: None if KV blocks are kept in the device pool only."""
        self.info = info
        self.adapters = adapters or no_adapters()
        self._grammars = grammars or Grammars(Compiler(no_vocabulary), 1, 1)
        self._scheduler = scheduler
        self._runner = runner
        self._traffic = traffic
        self._clock = clock
        self._in_flight: deque[InFlight] = deque()
        self._refusals: list[SequenceOutput] = []
        self._news: BlockEvents | None = None
        self._num_steps = 0
        self._num_failed_steps = 0
        self._busy_s = 0.0
        self._step_counts = [0] * (len(STEP_TOKENS) + 1)
        self._step_tokens = 0
        self._num_consecutive_failures = 0

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def has_work(self) -> bool:
        """Tell whether a step has something to do. Steps in flight are collected even if their requests have ended."""
        has_waiting = self._grammars.num_waiting > 0 or self.adapters.is_loading
        return bool(self._refusals) or has_waiting or self._scheduler.has_work

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar now instead of in the background; raise InvalidRequest if it is invalid."""
        self._grammars.prepare(request)

    def run_idle_task(self) -> bool:
        """Run one task that prepares for later steps; return False if none is left."""
        return self._runner.next_idle_task()

    def prepare_grammars(self) -> None:
        """Start loading in the background what the first grammar needs: seconds of work for a large vocabulary."""
        self._grammars.load_vocabulary()

    def add(self, request: Request) -> None:
        """Accept a request; one that can't be served gets an error output from the next step."""
        if request.params.guided is None or self._grammars.is_ready(request):
            self._schedule(request)
        else:
            self._grammars.start_compiling(request)

    def _schedule(self, request: Request) -> None:
        try:
            if request.adapter:
                self.adapters.require(request.adapter)
            self._scheduler.add(request)
        except TokenmillError as error:
            self._refuse(request, error)

    def _refuse(self, request: Request, error: TokenmillError) -> None:
        self._refusals.append(refusal(request.request_id, error))

    def finish_loading(self) -> list[LoadedAdapter | FailedAdapter]:
        """Return the adapters that background threads have read or failed to read; an idle engine waits briefly."""
        return self.adapters.finish_loading(0.0 if self._scheduler.has_work else ADAPTER_WAIT_S)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self._grammars.forget(request_id)
            self._scheduler.abort(request_id)
        else:
            self._scheduler.abort_sequence(request_id, index)

    def watch_blocks(self) -> None:
        """Start recording which blocks are in the prefix cache."""
        self._news = self._scheduler.watch_blocks()

    def pop_cache_events(self) -> KVCacheEvents | None:
        """Return the changes of the prefix cache since the last call, or None if they are not recorded."""
        return None if self._news is None else self._news.pop()

    def step(self) -> list[SequenceOutput]:
        """Launch what can be planned, collect the oldest step in flight, and return its outputs."""
        started = self._clock()
        if self._grammars.are_in_use:
            self._schedule_compiled()
        outputs, self._refusals = self._refusals, []
        self._launch()
        if self._in_flight:
            oldest = self._in_flight.popleft()
            outputs += self._collect(oldest)
        elif self._grammars.num_waiting:
            self._grammars.wait(GRAMMAR_WAIT_S)
        elif self._scheduler.is_fetching:
            self._scheduler.wait_for_blocks(FETCH_WAIT_S)
        if self.adapters.retired:
            self.adapters.forget_unused(self._scheduler.uses_adapter)
        self._num_steps += 1
        self._busy_s += self._clock() - started
        return outputs

    def _launch(self) -> None:
        """Plan and launch steps until `depth` of them are in flight."""
        while len(self._in_flight) < self._runner.depth and self._can_launch_next():
            plan = self._scheduler.plan()
            if plan is None:
                return
            lacks_masks = self._grammars.are_in_use and self._grammars.note_plan(plan)
            self._in_flight.append(InFlight(plan, attempt(self._runner.launch, plan), lacks_masks))

    def _can_launch_next(self) -> bool:
        """Tell whether a step can be launched after those in flight: not if launching the newest failed, nor while it
        has not sampled all its tokens, since the next step may take them as inputs."""
        if not self._in_flight:
            return True
        newest = self._in_flight[-1]
        if newest.lacks_masks and len(self._in_flight) == 1:
            self._draw(newest)
        return not newest.lacks_masks and isinstance(newest.ticket, int)

    def _draw(self, step: InFlight) -> None:
        """Sample the rows with grammars of the oldest step in flight; all steps before it are applied."""
        step.lacks_masks = False
        if isinstance(step.ticket, int):
            drawn = attempt(self._runner.draw, step.ticket, self._grammars.masks(step.plan))
            if isinstance(drawn, Exception):
                attempt(self._runner.collect, step.ticket)
                step.ticket = drawn

    def _collect(self, step: InFlight) -> list[SequenceOutput]:
        """Wait for a step and apply its result. If it raised, the steps after it are collected and discarded."""
        if step.lacks_masks:
            self._draw(step)
        plan, ticket = step.plan, step.ticket
        result = ticket if isinstance(ticket, Exception) else attempt(self._runner.collect, ticket)
        if isinstance(result, Exception):
            return self._fail(plan, result)
        self._num_consecutive_failures = 0
        num_tokens = plan.num_tokens
        self._step_counts[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self._step_tokens += num_tokens
        if self._grammars.are_in_use:
            result = self._grammars.advance(plan, result)
        return self._scheduler.apply(result)

    def _fail(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        """Handle a failed step: end the request that caused it, or, while that is unknown, retry the step's requests
        in smaller groups. Raise the error after `MAX_CONSECUTIVE_FAILURES`."""
        if isinstance(error, PeerDied):
            raise error
        self._num_failed_steps += 1
        while self._in_flight:
            behind = self._in_flight.popleft()
            if isinstance(behind.ticket, int):
                attempt(self._runner.collect, behind.ticket)
        outputs = self._scheduler.apply_failure(f"the step could not be computed: {error}")
        self._num_consecutive_failures += bool(outputs)
        if self._num_consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise error
        ended = len({output.request_id for output in outputs})
        outcome = f"{ended} requests end with an error" if ended else "its requests are retried in smaller groups"
        log.error("a step with %d rows failed: %s", len(plan.rows), outcome, exc_info=error)
        return outputs

    def _schedule_compiled(self) -> None:
        """Schedule requests whose grammars are compiled; release the grammars of requests that have ended."""
        for request, error in self._grammars.pop_compiled():
            if error is None:
                self._schedule(request)
            else:
                self._refuse(request, error)
        self._grammars.release(self._scheduler.has)

    def close(self) -> None:
        """Finish background work: blocks that are being saved."""
        if self._traffic is not None:
            self._traffic.close()

    def stats(self) -> EngineStats:
        seen = self._scheduler.stats()
        moved = None if self._traffic is None else self._traffic.counts
        return EngineStats(
            running=seen.running,
            waiting=seen.waiting + self._grammars.num_waiting,
            waiting_for_grammar=self._grammars.num_waiting,
            wait_s=seen.wait_s,
            kv_blocks_used=seen.kv_blocks_used,
            kv_blocks_total=seen.kv_blocks_total,
            prefix_hit_tokens=seen.prefix_hit_tokens,
            prefix_query_tokens=seen.prefix_query_tokens,
            fetched_tokens=seen.fetched_tokens,
            fetched_bytes=0 if moved is None else moved.fetched_bytes,
            fetch_s=0.0 if moved is None else moved.fetch_s,
            saved_bytes=0 if moved is None else moved.saved_bytes,
            preemptions=seen.preemptions,
            steps=self._num_steps,
            failed_steps=self._num_failed_steps,
            busy_s=self._busy_s,
            step_counts=self._step_counts.copy(),
            step_tokens=self._step_tokens,
            drafted_tokens=seen.drafted_tokens,
            accepted_tokens=seen.accepted_tokens,
            engine_pid=os.getpid(),
        )


def attempt(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | Exception:
    """Call a runner's method; return the exception if it raises one."""
    try:
        return work(*args, **named)
    except Exception as error:
        return error


def no_vocabulary() -> Vocabulary:
    raise InvalidRequest("this model has no tokenizer, so no schema or grammar can be followed", param="guided")


def refusal(request_id: str, error: TokenmillError) -> SequenceOutput:
    return SequenceOutput(
        request_id=request_id,
        finish_reason="error",
        error=str(error),
        error_code=error.code,
        error_param=error.param,
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else 0.0,
    )
