"""The scheduler: decides which tokens the next step computes, and applies the step's results.

    add     refuse a request that could never run, or turn it into sequences that wait (`request_setup.py`)
    plan    running sequences first, at least one token each; waiting ones with the rest of the token budget
            (`step_planner.py`; `admission.py`: which groups start, and which are preempted)
    apply   commit computed tokens, append sampled tokens, remove finished sequences

Several plans may be in flight before the first is applied (`running.py`): a plan treats the steps in flight as
done. A sequence that needs the result of a step in flight, or finds no blocks while it is in one, is left out until
that step is applied. The scheduler handles token ids, blocks and rows; the runner handles tensors, the output processor
text. Time is an argument (`clock`), so that tests and simulations can use a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from tokenmill.config.engine import SchedulerConfig
from tokenmill.config.promises import ServiceLevel
from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.kv.blocks import BlockEvents
from tokenmill.kv.cache import KVCache
from tokenmill.kv.names import Fetcher
from tokenmill.scheduler.admission import Admission
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.fetches import Fetches
from tokenmill.scheduler.integrity import check_integrity
from tokenmill.scheduler.lanes import Lanes
from tokenmill.scheduler.outputs import failure
from tokenmill.scheduler.plan_builder import BackgroundShare, Planned
from tokenmill.scheduler.promises import Promises
from tokenmill.scheduler.request import RequestState, Sequence, SequenceGroup
from tokenmill.scheduler.request_setup import build_request_state, check_feasible
from tokenmill.scheduler.running import RunningSet, StepInFlight
from tokenmill.scheduler.speculation import NO_DRAFTS, Drafter, num_accepted_drafts
from tokenmill.scheduler.stats import Counters, SchedulerStats
from tokenmill.scheduler.step_planner import StepPlanner
from tokenmill.scheduler.step_time import StepSize, StepTime
from tokenmill.scheduler.suspects import Suspects
from tokenmill.scheduler.tenants import Tenants
from tokenmill.scheduler.waiting import WaitingQueue
from tokenmill.types import Request, RowInit, RowResult, SequenceOutput, StepPlan, StepResult

MEASURED_STEP_STRIDE = 8  # every 8th step without a prompt is measured; steps with a prompt always are


def never(_: RowInit) -> bool:
    return False


def size_of(plan: StepPlan) -> StepSize:
    rows = plan.rows
    context = sum(row.start + len(row.token_ids) for row in rows)
    pairs = sum(_pairs(len(row.token_ids), row.start) for row in rows if len(row.token_ids) > 1)
    return StepSize(plan.num_tokens, sum(row.sample for row in rows), context, pairs)


def _pairs(num_tokens: int, start: int) -> int:
    return num_tokens * (start + num_tokens // 2)


class Scheduler:
    def __init__(
        self,
        *,
        config: SchedulerConfig,
        cache: KVCache,
        max_rows: int,
        clock: Callable[[], float],
        continues: Callable[[RowInit], bool] = never,
        drafter: Drafter = NO_DRAFTS,
        num_adapter_slots: int = 0,
        step_limit_s: float | None = None,
        promised: ServiceLevel = ServiceLevel(),
        num_lanes: int = 1,
        fetcher: Fetcher | None = None,
    ) -> None:
        """`continues`: whether the runner can take a row's newly sampled token as input before the host has seen it.
        `drafter`: proposes draft tokens. `step_limit_s`: the time limit of a step that computes a prompt while other
        sequences decode. `promised`: the latency objectives. `num_lanes`: steps that the runner computes at the same
        time (`lanes.py`). `fetcher`: fetches blocks from tiers and other cores, if any."""
        self._cache = cache
        self._num_tokens = config.num_tokens  # of one step
        # One token of each step is reserved for every running sequence, so at most the token budget of them may run.
        self._num_rows = min(max_rows, config.num_rows, self._num_tokens)
        self._running = RunningSet(cache, self._num_rows, num_adapter_slots)
        self._clock = clock
        self._tenants = Tenants()
        self._waiting = WaitingQueue(self._tenants, clock)
        self._counters = Counters()
        self.step_time = StepTime()
        self._promises: Promises | None = None
        if step_limit_s is not None or promised != ServiceLevel():
            self._promises = Promises(promised, step_limit_s, self.step_time, self._running, self._waiting)
        self._fetches: Fetches | None = None
        if fetcher is not None:
            self._fetches = Fetches(cache, self._running, fetcher, self.step_time, self._counters, clock)
        self._background = BackgroundShare(self._num_tokens, clock)
        self._admission = Admission(
            self._num_tokens,
            cache,
            self._running,
            self._waiting,
            self._tenants,
            self._promises,
            self._counters,
            self._fetches,
            clock,
        )
        self._planner = StepPlanner(
            Lanes(num_lanes, self._num_rows, self._num_tokens),
            cache,
            self._running,
            self._waiting,
            self._tenants,
            self._admission,
            self._promises,
            self._background,
            self.step_time,
            self._counters,
        )
        self._states: dict[str, RequestState] = {}
        self._num_added = 0
        # Drafts follow the last known token, so a sequence that may have drafts waits for each result.
        self._continues = continues if drafter is NO_DRAFTS else never
        self._drafter = drafter
        self._applied_s = float("-inf")  # when the last step was applied
        self._suspects = Suspects()

    # ── requests come and go ───────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        if request.request_id in self._states:
            raise InvalidRequest(f"a request {request.request_id!r} is already running", param="request_id")
        check_feasible(request, self._cache, self._num_rows, self._num_tokens)
        account = self._tenants.open(request.tenant)
        expected_s: float | None = None
        try:
            if self._promises is not None and self._promises.level.ttft_s is not None:
                expected_s = self._promises.require(request, account, self._num_cached(request), self._clock())
        except Overloaded:
            self._tenants.close(account)
            raise
        state = build_request_state(request, self._num_added, account, self._cache, self._num_rows, self._continues)
        state.expected_s = expected_s
        self._num_added += 1
        self._states[request.request_id] = state
        self._background.note_added(request.priority)
        for group in state.groups:
            self._waiting.push(group)

    def _num_cached(self, request: Request) -> int:
        """Return how many tokens of a request's prompt are in the cache."""
        prompt, chain = request.prompt_token_ids, self._cache.chain(request.cache_salt, request.adapter)
        return self._cache.match(prompt, chain, len(prompt) - 1).num_tokens

    def has(self, request_id: str) -> bool:
        return request_id in self._states

    def watch_blocks(self) -> BlockEvents:
        """Start recording which blocks are in the prefix cache."""
        return self._cache.watch_blocks()

    def uses_adapter(self, adapter: str) -> bool:
        """Tell whether a request with an adapter waits or runs, or a plan in flight loads it."""
        is_planned = any(adapter == one for step in self._running.in_flight for _, one in step.plan.adapter_loads)
        return is_planned or any(state.request.adapter == adapter for state in self._states.values())

    def abort(self, request_id: str) -> None:
        """End a request; an unknown or finished one is ignored."""
        if state := self._states.get(request_id):
            self._close(state)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one of the samples that a request streams. Beams are ignored: they have no index until they are
        finished."""
        state = self._states.get(request_id)
        if state is None or state.output_mode.holds_back or (sequence := state.open_sequence(index)) is None:
            return
        sequence.is_finished = True
        group = state.group_of(sequence)
        if group.members == [sequence] and not group.pending_forks:
            self._remove(group)
        elif group.is_running:
            self._running.drop_sibling(group, sequence)
        else:
            group.forget(sequence)
        if not state.groups:
            self._close(state)

    def _close(self, state: RequestState) -> None:
        """End a request for any reason; its rows and blocks are freed once no step in flight uses them."""
        for group in list(state.groups):
            self._remove(group)
        del self._states[state.request.request_id]
        self._tenants.close(state.account)
        self._background.note_closed(state.request.priority)
        self._counters.finished += 1

    def _remove(self, group: SequenceGroup) -> None:
        for sequence in [*group.members, *group.pending_forks]:
            sequence.is_finished = True
            self._drafter.note_end(sequence)
        group.state.groups.remove(group)
        if group.is_running:
            self._running.remove(group)
        else:
            group.is_gone = True
            self._waiting.remove(group)

    @property
    def has_work(self) -> bool:
        """Tell whether a request is waiting or running, a step is in flight, or blocks are being fetched."""
        return bool(self._states) or bool(self._running.in_flight) or self.is_fetching

    @property
    def retried_requests(self) -> Set[str]:
        """The ids of the requests that are retried apart from all others after a failed step; empty: none are."""
        return self._suspects.current(self._states).keys()

    @property
    def is_fetching(self) -> bool:
        """Tell whether blocks are being fetched."""
        return bool(self._fetches)

    def wait_for_blocks(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for blocks that are being fetched."""
        assert self._fetches is not None
        self._fetches.wait(timeout_s)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, in the order in which they are planned."""
        return [sequence for group in self._running.groups for sequence in group.members]

    @property
    def num_in_flight(self) -> int:
        """The number of plans that were returned and not applied yet."""
        return len(self._running.in_flight)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between any two calls: no block or row is lost, leaked or shared wrongly."""
        check_integrity(self._cache, self._running, self._waiting)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self._running.num_sequences,
            waiting=len(self._waiting),
            kv_blocks_used=self._cache.num_used,
            kv_blocks_total=self._cache.num_usable,
            **self._counters.as_dict(),
        )

    # ── plan ───────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """Return the plan of the next step, treating those in flight as done; None if nothing can run before one of
        them is applied."""
        if self._fetches:
            self._fetches.advance()
        suspects = self._suspects.current(self._states) if self._suspects.sets else None
        builder = self._planner.plan_only(suspects) if suspects else self._planner.plan_all(self._drafter)
        if suspects and not builder.planned and not self._running.in_flight and not self._fetches:
            self._suspects.clear()  # the running groups leave no room for them
            builder = self._planner.plan_all(self._drafter)
        self._planner.was_short = builder.is_short
        if not builder.planned:
            return None
        self._counters.steps += 1
        plan = builder.step_plan(self._running.row_allocator.pop_released(), self._running.adapters.pop_loads())
        self._running.in_flight.add(plan, builder.planned)
        return plan

    # ── apply ──────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """Apply the result of the oldest step in flight. Rows whose sequence has ended or was preempted since the step
        was planned are ignored."""
        step = self._running.in_flight.pop(result.step)
        num_tokens = step.plan.num_tokens
        self._share_time(step, num_tokens, self._learn(step.plan, num_tokens, result))
        results = {row.row: row for row in result.rows}
        outputs: list[SequenceOutput] = []
        for planned, row_plan in zip(step.planned, step.plan.rows, strict=True):
            if not planned.is_void:
                outputs += self._advance(planned, results.get(row_plan.row) or RowResult(row=row_plan.row))
        self._running.free_releases(step)
        self._drafter.note_step(step.plan, result)
        return outputs

    def _learn(self, plan: StepPlan, num_tokens: int, result: StepResult) -> float:
        """Update the step-time model (for every step with a prompt, for some of the others) and return the step's
        duration."""
        now_s = self._clock()
        # With several steps in flight, a step starts on the device when the previous one ends.
        seconds = min(result.step_s, now_s - self._applied_s)
        self._applied_s = now_s
        if result.step_s > 0.0 and (plan.step % MEASURED_STEP_STRIDE == 0 or num_tokens > len(plan.rows)):
            self.step_time.note(size_of(plan), seconds)
            if self._promises is not None:
                self._promises.note_step(plan)
        return seconds

    def _share_time(self, step: StepInFlight, num_tokens: int, seconds: float) -> None:
        """Distribute a step's duration over its requests: equally over all rows, or, if some compute more than one
        token, in proportion to their estimated costs."""
        rows = step.plan.rows
        if num_tokens == len(rows):
            part_s = seconds / len(rows)
            for planned in step.planned:
                planned.sequence.state.device_s += part_s
            return
        model = self.step_time
        costs_s = [model.cost_s(len(row.token_ids), row.start, len(rows)) for row in rows]
        scale = seconds / sum(costs_s)
        for planned, cost_s in zip(step.planned, costs_s, strict=True):
            planned.sequence.state.device_s += cost_s * scale

    def apply_failure(self, error: str) -> list[SequenceOutput]:
        """Handle the failure of the oldest step in flight. Requests found to cause it end with an error
        (`suspects.py`); the others are preempted and recomputed, as are those of later steps, which the runner may not
        have received."""
        oldest = next(iter(self._running.in_flight))
        states = {planned.sequence.state: None for planned in oldest.planned if not planned.is_void}
        outputs: list[SequenceOutput] = []
        for state in self._suspects.note_failure(list(states)):
            outputs += self._fail(state, error)
        for step in list(self._running.in_flight):
            for planned in step.planned:
                group = planned.sequence.group
                if not planned.is_void and group is not None and group.is_running:
                    self._admission.preempt(group)
        for step in list(self._running.in_flight):
            self._running.free_releases(self._running.in_flight.pop(step.plan.step))
        self._running.adapters.reload()
        return outputs

    def _advance(self, planned: Planned, result: RowResult) -> list[SequenceOutput]:
        sequence, start = planned.sequence, planned.sequence.computed
        state = sequence.state
        group = state.group_of(sequence)
        self._counters.computed_tokens += planned.num_tokens + len(planned.drafts)
        if result.error is not None:
            return self._fail(state, result.error, result.error_code)
        sequence.num_in_flight -= planned.num_tokens
        if planned.is_pending:
            sequence.note_draw()
        self._commit(sequence, planned.num_tokens)
        if result.prompt_logprobs:
            state.keep_prompt_logprobs(start + sequence.num_dropped, result.prompt_logprobs)
        if sequence.computed < group.target(sequence) or not sequence.is_whole:
            return []
        if group.pending_forks:
            self._running.fork_pending(group)
            return []
        return self._deliver(sequence, result, planned.drafts)

    def _commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` more of a sequence's tokens as computed."""
        sequence.computed += num_tokens
        chain = sequence.chain if sequence.state.is_shareable else None
        self._cache.commit(sequence.held_table, sequence.computed, sequence.window, chain)

    def _deliver(self, sequence: Sequence, result: RowResult, drafts: list[int]) -> list[SequenceOutput]:
        """Append the sampled tokens and return their outputs; remove the sequence or the request if it has ended."""
        state = sequence.state
        num_accepted = self._count_drafts(sequence, drafts, result) if drafts else 0
        if state.draws_tokens and not result.token_ids:
            return self._fail(state, "the runner returned no token")
        self._counters.generated_tokens += len(result.token_ids)
        num_before = len(sequence.tokens)
        outputs = state.output_mode.process(sequence, result)
        if self._promises is not None:
            self._promises.note_output(sequence, num_before - sequence.prompt_len, self._clock())
        if len(sequence.tokens) - num_before > 1:  # forced tokens, or drafts, which have no later step in flight
            sequence.void_draws()
        if num_accepted:
            # A sequence that ended appended fewer; the last sampled token was not computed, or not at its position.
            self._commit(sequence, min(num_accepted, len(sequence.tokens) - num_before - 1))
        if isinstance(state.output_mode, BeamSearch) and (chosen := state.output_mode.next_beams()):
            self._running.branch(state.groups[0], chosen)
        elif sequence.is_finished:
            # Its group ends too: a sample is the only member of its group, beams end together.
            self._remove(state.group_of(sequence))
        if not state.groups:
            self._close(state)
        return outputs

    def _count_drafts(self, sequence: Sequence, drafts: list[int], result: RowResult) -> int:
        """Count and return the accepted drafts, whose KV entries stay valid."""
        num_accepted = num_accepted_drafts(drafts, result.token_ids)
        sequence.num_drafted += len(drafts)
        sequence.num_accepted += num_accepted
        self._counters.drafted_tokens += len(drafts)
        self._counters.accepted_tokens += num_accepted
        return num_accepted

    def _fail(self, state: RequestState, error: str, error_code: str | None = None) -> list[SequenceOutput]:
        """End a request with an error output for every index that has not ended yet; other requests continue."""
        outputs = [failure(state, index, error, error_code) for index in state.open_indices()]
        self._close(state)
        return outputs
