"""The scheduler: which tokens are computed in the next step, and what came of them.

    plan:   running sequences first, one token each at least; waiting ones with what is left of the budget
            (`admission.py`: who comes in, and who makes way)
    apply:  computed tokens are committed, drawn ones appended; who is done leaves

It knows token ids, blocks and rows; tensors are the runner's, text is the outlet's. Time is an argument (`clock`), so
that everything here runs on a virtual one.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.config.engine import SchedulerConfig
from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.admission import Admission
from tokenmill.scheduler.ahead import Ahead
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.draft import Draft, Planned
from tokenmill.scheduler.drafting import NO_DRAFTS, Drafter, num_right
from tokenmill.scheduler.floor import Floor
from tokenmill.scheduler.intake import build_job, refuse_impossible
from tokenmill.scheduler.job import Gang, Job
from tokenmill.scheduler.queue import WaitingQueue
from tokenmill.scheduler.sequence import Sequence
from tokenmill.scheduler.siblings import failure
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
        self._floor = Floor(cache, self._num_rows, lookahead_tokens)
        self._waiting = WaitingQueue()
        self._counters = Counters()
        self._admission = Admission(config, cache, self._floor, self._waiting, self._counters, clock)
        self._ahead = Ahead(config, cache, self._floor, self._admission)
        self._jobs: dict[str, Job] = {}
        self._num_added = 0
        self._planned: list[Planned] = []
        self._drafter = drafter
        self._drafts: dict[Sequence, list[int]] = {}  # for the plan being written

    # ── requests come and go ───────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        # Those that the next step lets in are not waiting yet.
        num_stuck = len(self._waiting) - self._floor.seats.num_free
        if num_stuck >= self._config.max_waiting:
            raise Overloaded(f"{num_stuck} requests are waiting already", hint="try again a little later")
        if request.request_id in self._jobs:
            raise InvalidRequest(f"a request {request.request_id!r} is running already", param="request_id")
        refuse_impossible(request, self._cache, self._num_rows, self._config.num_tokens)
        job = build_job(request, self._num_added, self._cache, self._num_rows)
        self._num_added += 1
        self._jobs[request.request_id] = job
        for gang in job.gangs:
            self._waiting.push(gang)

    def has(self, request_id: str) -> bool:
        return request_id in self._jobs

    def abort(self, request_id: str) -> None:
        """Drops a request; one that is unknown or already over is no error."""
        if job := self._jobs.get(request_id):
            self._close(job)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """Drops one of the samples that a request streams. Held-back ones have no index before they are over."""
        job = self._jobs.get(request_id)
        if job is None or job.delivery.holds_back or (sequence := job.open_sequence(index)) is None:
            return
        sequence.is_finished = True
        gang = job.gang_of(sequence)
        if gang.members == [sequence] and not gang.unborn:
            self._dismiss(gang)
        elif gang.is_running:
            self._floor.drop_sibling(gang, sequence)
        else:
            gang.forget(sequence)
        if not job.gangs:
            self._close(job)

    def _close(self, job: Job) -> None:
        """The request is over, whatever the reason: nothing of it stays behind."""
        for gang in list(job.gangs):
            self._dismiss(gang)
        del self._jobs[job.request.request_id]
        self._counters.finished += 1

    def _dismiss(self, gang: Gang) -> None:
        for sequence in [*gang.members, *gang.unborn]:
            sequence.is_finished = True
            self._drafter.note_end(sequence)
        gang.job.gangs.remove(gang)
        if gang.is_running:
            self._floor.dismiss(gang)
        else:
            gang.is_gone = True
            self._waiting.discard(gang)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self._floor.num_sequences,
            waiting=len(self._waiting),
            kv_blocks_used=self._cache.num_used,
            kv_blocks_total=self._cache.num_usable,
            **self._counters.as_dict(),
        )

    # ── plan ───────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step; None when there is nothing to run. Each plan is applied before the next is asked for."""
        self._admission.make_way()
        draft = Draft(self._floor.early.budget(self._config.num_tokens, self._floor.num_sequences))
        self._drafts = self._drafter.propose(self._floor.gangs)
        self._serve_running(draft)
        if not draft.num_preempted and draft.budget.spare >= self._floor.early.least_to_add(self._config.num_tokens):
            self._admission.admit(draft)
        self._floor.early.join(draft)
        self._planned = draft.planned
        if not draft.planned:
            return None
        self._counters.steps += 1
        return draft.step_plan(self._floor.seats.rows_left())

    def _serve_running(self, draft: Draft) -> None:
        """In order; the tail may be preempted on the way, so the list is walked by position."""
        position = 0
        while position < len(self._floor.gangs):
            gang = self._floor.gangs[position]
            if gang not in self._floor.early and not self._serve(gang, draft):
                return
            position += 1

    def _serve(self, gang: Gang, draft: Draft) -> bool:
        """Plans all members of a gang; False when it had to be preempted itself (it was the last one)."""
        served = []
        for sequence in gang.members:
            if sequence.refit():
                self._floor.reopen(sequence, self._admission.hit(gang, sequence, gang.target(sequence) - 1))
            granted = draft.budget.grant(gang.wants(sequence))
            if not granted:
                continue
            copies = self._make_room(gang, sequence, granted, draft)
            if copies is None:
                return False
            drafts = self._fitting_drafts(sequence, granted, draft)
            served.append((sequence, granted, copies, drafts))
        for sequence, granted, copies, drafts in served:
            draft.add(sequence, granted, copies, drafts)
        return True

    def _fitting_drafts(self, sequence: Sequence, granted: int, draft: Draft) -> list[int]:
        """Guesses ride along where tokens and blocks are left over: nobody is cut short or pushed out for them."""
        end = sequence.computed + granted
        drafts = self._drafts.get(sequence, [])[: draft.budget.spare]
        if not drafts or end < len(sequence.window):
            return []
        room = self._cache.num_free - self._floor.num_sequences * len(self._cache.windows)
        if room < self._cache.blocks_for(len(drafts), 1):
            return []
        # The blocks behind a sequence's last one are new, so there is nothing to copy.
        copies = self._cache.reserve(sequence.held_table, end, end + len(drafts))
        if copies is None:
            return []
        assert not copies, "the block behind the last token is shared"
        draft.budget.spend(len(drafts))
        return drafts

    def _make_room(self, gang: Gang, sequence: Sequence, num_tokens: int, draft: Draft) -> list[tuple[int, int]] | None:
        """Blocks for the next tokens, if need be those of the last in order; None when that is the gang itself."""
        start, end = sequence.computed, sequence.computed + num_tokens
        while (copies := self._cache.reserve(sequence.held_table, start, end)) is None:
            victim = self._floor.gangs[-1]
            draft.num_preempted += 1
            if victim not in self._floor.early:
                draft.budget.give_up(len(victim.members))
            self._admission.preempt(victim)
            if victim is gang:
                return None
        return copies + self._floor.look_ahead(sequence, end)

    # ── plan ahead ─────────────────────────────────────────────────────────────────────────────────────

    def plan_ahead(self) -> StepPlan | None:
        """Rows of the next step that can be computed behind this one, whatever comes of it; the next plan repeats them.
        May be called once between `plan` and `apply`."""
        return None if self._drafter is not NO_DRAFTS else self._ahead.plan(self._planned)

    def take_back(self) -> None:
        """The step failed: what was planned ahead waits again, as the runner may not have heard of it."""
        for gang in self._floor.early.gangs:
            self._admission.preempt(gang)

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
        job, start = sequence.job, sequence.computed
        gang = job.gang_of(sequence)
        self._counters.computed_tokens += num_tokens + len(drafts)
        if result.error is not None:
            return self._fail(job, result.error)
        self._commit(sequence, num_tokens)
        if result.prompt_logprobs:
            job.keep_prompt_logprobs(start + sequence.num_dropped, result.prompt_logprobs)
        if sequence.computed < gang.target(sequence) or not sequence.is_whole:
            return []
        if gang.unborn:
            self._floor.bear(gang)
            return []
        return self._deliver(sequence, result, drafts)

    def _commit(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more of its tokens are in the cache."""
        sequence.computed += num_tokens
        chain = sequence.chain if sequence.job.is_shareable else None
        self._cache.commit(sequence.held_table, sequence.computed, sequence.window, chain)

    def _deliver(self, sequence: Sequence, result: RowResult, drafts: list[int]) -> list[SequenceOutput]:
        job = sequence.job
        right = self._count_drafts(sequence, drafts, result)
        if job.draws_tokens and not result.token_ids:
            return self._fail(job, "the model drew no token")
        self._counters.generated_tokens += len(result.token_ids)
        num_before = len(sequence.tokens)
        outputs = job.delivery.take(sequence, result)
        if right:
            # A sequence that ended took fewer; the last token drawn was not fed, or not at its place.
            self._commit(sequence, min(right, len(sequence.tokens) - num_before - 1))
        if isinstance(job.delivery, BeamSearch) and (chosen := job.delivery.next_beams()):
            self._floor.branch(job.gangs[0], chosen)
        elif sequence.is_finished:  # its gang too: samples are alone in theirs, beams end together
            self._dismiss(job.gang_of(sequence))
        if not job.gangs:
            self._close(job)
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

    def _fail(self, job: Job, error: str) -> list[SequenceOutput]:
        """This request ends here, on every index its reader still waits for; the others go on."""
        outputs = [failure(job, index, error) for index in job.open_indices()]
        self._close(job)
        return outputs
