"""The scheduler: which tokens are computed in the next step, and what came of them.

    plan:   running sequences first, one token each at least; waiting ones with what is left of the budget
            (`admission.py`: who comes in, and who makes way)
    apply:  computed tokens are committed, drawn ones appended; who is done leaves

It knows token ids, blocks and rows; tensors are the runner's, text is the output processor's. Time is an argument
(`clock`), so
that everything here runs on a virtual one.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.config.engine import SchedulerConfig
from tokenmill.errors import InvalidRequest
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.admission import Admission
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.outputs import failure
from tokenmill.scheduler.plan_builder import PlanBuilder, Planned
from tokenmill.scheduler.prefetch import Prefetcher
from tokenmill.scheduler.queue import WaitingQueue
from tokenmill.scheduler.request_setup import build_request_state, check_feasible
from tokenmill.scheduler.request_state import RequestState, SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.sequence import Sequence
from tokenmill.scheduler.speculation import NO_DRAFTS, Drafter, num_right
from tokenmill.scheduler.stats import Counters, SchedulerStats
from tokenmill.types import Request, RowResult, SequenceOutput, StepPlan, StepResult


class Scheduler:
    def __init__(
        self,
        *,
        config: SchedulerConfig,
        cache: KVCache,
        max_rows: int,
        clock: Callable[[], float],
        lookahead_tokens: int = 0,
        drafter: Drafter = NO_DRAFTS,
    ) -> None:
        """`lookahead_tokens`: room beyond the planned tokens, where there is some, for a runner that works ahead.
        `drafter`: guesses what running sequences will say."""
        self._config = config
        self._cache = cache
        # Every running sequence is promised a token a step, so no more may run than the budget has tokens.
        self._num_rows = min(max_rows, config.num_rows, config.num_tokens)
        self._running = RunningSet(cache, self._num_rows, lookahead_tokens)
        self._waiting = WaitingQueue()
        self._counters = Counters()
        self._admission = Admission(config, cache, self._running, self._waiting, self._counters, clock)
        self._prefetcher = Prefetcher(config, cache, self._running, self._admission)
        self._states: dict[str, RequestState] = {}
        self._num_added = 0
        self._planned: list[Planned] = []
        self._drafter = drafter
        self._drafts: dict[Sequence, list[int]] = {}  # for the plan being written

    # ── requests come and go ───────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        if request.request_id in self._states:
            raise InvalidRequest(f"a request {request.request_id!r} is running already", param="request_id")
        check_feasible(request, self._cache, self._num_rows, self._config.num_tokens)
        state = build_request_state(request, self._num_added, self._cache, self._num_rows)
        self._num_added += 1
        self._states[request.request_id] = state
        for group in state.groups:
            self._waiting.push(group)

    def has(self, request_id: str) -> bool:
        return request_id in self._states

    def abort(self, request_id: str) -> None:
        """Drops a request; one that is unknown or already over is no error."""
        if state := self._states.get(request_id):
            self._close(state)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """Drops one of the samples that a request streams. Held-back ones have no index before they are over."""
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
        """The request is over, whatever the reason: nothing of it stays behind."""
        for group in list(state.groups):
            self._remove(group)
        del self._states[state.request.request_id]
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
            self._waiting.discard(group)

    @property
    def has_work(self) -> bool:
        return bool(self._states)

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
        """The next step; None when there is nothing to run. Each plan is applied before the next is asked for."""
        self._admission.preempt_for_priority()
        draft = PlanBuilder(self._running.prefetched.budget(self._config.num_tokens, self._running.num_sequences))
        self._drafts = self._drafter.propose(self._running.groups)
        self._serve_running(draft)
        if not draft.num_preempted and draft.budget.spare >= self._running.prefetched.least_to_add(
            self._config.num_tokens
        ):
            self._admission.admit(draft)
        self._running.prefetched.join(draft)
        self._planned = draft.planned
        if not draft.planned:
            return None
        self._counters.steps += 1
        return draft.step_plan(self._running.row_allocator.pop_released())

    def _serve_running(self, draft: PlanBuilder) -> None:
        """In order; the tail may be preempted on the way, so the list is walked by position."""
        position = 0
        while position < len(self._running.groups):
            group = self._running.groups[position]
            if group not in self._running.prefetched and not self._serve(group, draft):
                return
            position += 1

    def _serve(self, group: SequenceGroup, draft: PlanBuilder) -> bool:
        """Plans all members of a gang; False when it had to be preempted itself (it was the last one)."""
        served = []
        for sequence in group.members:
            if sequence.update_window():
                self._running.reopen(sequence, self._admission.hit(group, sequence, group.target(sequence) - 1))
            granted = draft.budget.grant(group.wants(sequence))
            if not granted:
                continue
            copies = self._make_room(group, sequence, granted, draft)
            if copies is None:
                return False
            drafts = self._fitting_drafts(sequence, granted, draft)
            served.append((sequence, granted, copies, drafts))
        for sequence, granted, copies, drafts in served:
            draft.add(sequence, granted, copies, drafts)
        return True

    def _fitting_drafts(self, sequence: Sequence, granted: int, draft: PlanBuilder) -> list[int]:
        """Guesses ride along where tokens and blocks are left over: nobody is cut short or pushed out for them."""
        end = sequence.computed + granted
        drafts = self._drafts.get(sequence, [])[: draft.budget.spare]
        if not drafts or end < len(sequence.window):
            return []
        room = self._cache.num_free - self._running.num_sequences * len(self._cache.windows)
        if room < self._cache.blocks_for(len(drafts), 1):
            return []
        # The blocks behind a sequence's last one are new, so there is nothing to copy.
        copies = self._cache.reserve(sequence.held_table, end, end + len(drafts))
        if copies is None:
            return []
        assert not copies, "the block behind the last token is shared"
        draft.budget.spend(len(drafts))
        return drafts

    def _make_room(
        self, group: SequenceGroup, sequence: Sequence, num_tokens: int, draft: PlanBuilder
    ) -> list[tuple[int, int]] | None:
        """Blocks for the next tokens, if need be those of the last in order; None when that is the gang itself."""
        start, end = sequence.computed, sequence.computed + num_tokens
        while (copies := self._cache.reserve(sequence.held_table, start, end)) is None:
            victim = self._running.groups[-1]
            draft.num_preempted += 1
            if victim not in self._running.prefetched:
                draft.budget.unreserve(len(victim.members))
            self._admission.preempt(victim)
            if victim is group:
                return None
        return copies + self._running.look_ahead(sequence, end)

    # ── plan ahead ─────────────────────────────────────────────────────────────────────────────────────

    def plan_ahead(self) -> StepPlan | None:
        """Rows of the next step that can be computed behind this one, whatever comes of it; the next plan repeats them.
        May be called once between `plan` and `apply`."""
        return None if self._drafter is not NO_DRAFTS else self._prefetcher.plan(self._planned)

    def cancel_prefetch(self) -> None:
        """The step failed: what was planned ahead waits again, as the runner may not have heard of it."""
        for group in self._running.prefetched.groups:
            self._admission.preempt(group)

    # ── apply ──────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """What the step brought. Rows of requests that were aborted meanwhile are ignored."""
        results = {row.row: row for row in result.rows}
        planned, self._planned = self._planned, []
        outputs: list[SequenceOutput] = []
        for one, row_plan in zip(planned, plan.rows, strict=True):
            if not one.sequence.is_finished:
                row = results.get(row_plan.row) or RowResult(row=row_plan.row)
                outputs += self._advance(one, row)
        self._drafter.note_step(plan, result)
        return outputs

    def _advance(self, planned: Planned, result: RowResult) -> list[SequenceOutput]:
        sequence, num_tokens, drafts = planned
        state, start = sequence.state, sequence.computed
        group = state.group_of(sequence)
        self._counters.computed_tokens += num_tokens + len(drafts)
        if result.error is not None:
            return self._fail(state, result.error)
        self._commit(sequence, num_tokens)
        if result.prompt_logprobs:
            state.keep_prompt_logprobs(start + sequence.num_dropped, result.prompt_logprobs)
        if sequence.computed < group.target(sequence) or not sequence.is_whole:
            return []
        if group.pending_forks:
            self._running.fork_pending(group)
            return []
        return self._deliver(sequence, result, drafts)

    def _commit(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more of its tokens are in the cache."""
        sequence.computed += num_tokens
        chain = sequence.chain if sequence.state.is_shareable else None
        self._cache.commit(sequence.held_table, sequence.computed, sequence.window, chain)

    def _deliver(self, sequence: Sequence, result: RowResult, drafts: list[int]) -> list[SequenceOutput]:
        state = sequence.state
        right = self._count_drafts(sequence, drafts, result)
        if state.draws_tokens and not result.token_ids:
            return self._fail(state, "the model drew no token")
        self._counters.generated_tokens += len(result.token_ids)
        num_before = len(sequence.tokens)
        outputs = state.output_mode.take(sequence, result)
        if right:
            # A sequence that ended took fewer; the last token drawn was not fed, or not at its place.
            self._commit(sequence, min(right, len(sequence.tokens) - num_before - 1))
        if isinstance(state.output_mode, BeamSearch) and (chosen := state.output_mode.next_beams()):
            self._running.branch(state.groups[0], chosen)
        elif sequence.is_finished:  # its gang too: samples are alone in theirs, beams end together
            self._remove(state.group_of(sequence))
        if not state.groups:
            self._close(state)
        return outputs

    def _count_drafts(self, sequence: Sequence, drafts: list[int], result: RowResult) -> int:
        """How many drafts were right, so that what was computed for them may stay."""
        if not drafts:
            return 0
        right = num_right(drafts, result.token_ids)
        sequence.num_drafted += len(drafts)
        sequence.num_accepted += right
        self._counters.drafted_tokens += len(drafts)
        self._counters.accepted_tokens += right
        return right

    def _fail(self, state: RequestState, error: str) -> list[SequenceOutput]:
        """This request ends here, on every index its reader still waits for; the others go on."""
        outputs = [failure(state, index, error) for index in state.open_indices()]
        self._close(state)
        return outputs
