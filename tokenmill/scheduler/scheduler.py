"""The scheduler: which tokens are computed in the next step, and what came of them.

    plan:   running sequences first, one token each at least; waiting ones with what is left of the budget; those of
            lower priority make way for waiting ones that would not come in otherwise
    apply:  computed tokens are committed, drawn ones appended; who is done leaves

It knows token ids, blocks and rows; tensors are the runner's, text is the outlet's. Time is an argument (`clock`), so
that everything here runs on a virtual one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from tokenmill.config.engine import SchedulerConfig
from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.kv.cache import Hit, KVCache
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.budget import TokenBudget
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
        self._lookahead_tokens = lookahead_tokens
        self._cache = cache
        self._clock = clock
        # Every running sequence is promised a token a step, so no more may run than the budget has tokens.
        self._num_rows = min(max_rows, config.num_rows, config.num_tokens)
        self._floor = Floor(cache, self._num_rows)
        self._waiting = WaitingQueue()
        self._jobs: dict[str, Job] = {}
        self._num_added = 0
        self._planned: list[Planned] = []
        self._drafter = drafter
        self._drafts: dict[Sequence, list[int]] = {}  # for the plan being written
        self._batch_is_open = True  # of the static policy: the present batch still takes in
        self._counters = Counters()

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
        self._make_way()
        draft = Draft(TokenBudget(self._config.num_tokens, self._floor.num_sequences))
        self._drafts = self._drafter.propose(self._floor.gangs)
        self._serve_running(draft)
        if not draft.num_preempted:
            self._admit_waiting(draft)
        self._planned = draft.planned
        if not draft.planned:
            return None
        self._counters.steps += 1
        return draft.step_plan(self._floor.seats.rows_left())

    def _serve_running(self, draft: Draft) -> None:
        """In order; the tail may be preempted on the way, so the list is walked by position."""
        position = 0
        while position < len(self._floor.gangs) and self._serve(self._floor.gangs[position], draft):
            position += 1

    def _serve(self, gang: Gang, draft: Draft) -> bool:
        """Plans all members of a gang; False when it had to be preempted itself (it was the last one)."""
        served = []
        for sequence in gang.members:
            if sequence.refit():
                self._floor.reopen(sequence, self._hit(gang, sequence, gang.target(sequence) - 1))
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
            draft.budget.give_up(len(victim.members))
            self._preempt(victim)
            if victim is gang:
                return None
        return copies + self._look_ahead(sequence, end)

    def _look_ahead(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        size, last = self._cache.block_size, end + self._lookahead_tokens - 1
        if last // size == (end - 1) // size:  # within the block that was just made sure of
            return []
        return self._cache.reserve(sequence.held_table, end, end + self._lookahead_tokens) or []

    def _preempt(self, gang: Gang) -> None:
        self._counters.preemptions += 1
        self._floor.preempt(gang)
        self._waiting.push(gang)

    # ── admission ──────────────────────────────────────────────────────────────────────────────────────

    def _make_way(self) -> None:
        while (gang := self._waiting.peek()) is not None and self._displaces(gang):
            pass

    def _displaces(self, gang: Gang) -> bool:
        """Running gangs of lower priority go, from the end of the order, until `gang` can come in, and it does; none
        goes where all of them together would not be enough, or nobody has to."""
        lower = list(takewhile(lambda other: other.priority > gang.priority, reversed(self._floor.gangs)))
        if not lower or self._config.policy == "static" or self._hit_with_room(gang) is not None:
            return False
        rows = self._floor.seats.num_free + sum(other.num_rows for other in lower)
        blocks = self._cache.num_free + sum(member.held_table.num_held for other in lower for member in other.members)
        if rows < gang.num_rows or blocks < self._blocks_needed(gang):
            return False
        for victim in lower:
            self._preempt(victim)
            if (hit := self._hit_with_room(gang)) is not None:
                self._enter(gang, hit)
                return True
        return False

    def _admit_waiting(self, draft: Draft) -> None:
        if self._config.policy == "static" and not self._floor.gangs:
            self._batch_is_open = True
        while draft.budget.left > 0 and self._batch_is_open:
            gang = self._waiting.peek()
            if gang is None or not self._admit(gang, draft):
                # A static batch closes when it is full, not when one step's budget is spent.
                self._batch_is_open = self._config.policy != "static" or not self._floor.gangs
                return

    def _admit(self, gang: Gang, draft: Draft) -> bool:
        hit = self._hit_with_room(gang)
        if hit is None:
            return False
        self._enter(gang, hit)
        granted = draft.budget.spend(gang.wants(gang.leader))
        copies = self._cache.reserve(gang.leader.held_table, gang.leader.computed, gang.leader.computed + granted)
        assert copies is not None, "room for the whole sequence was checked"
        end = gang.leader.computed + granted
        draft.add(gang.leader, granted, copies + self._look_ahead(gang.leader, end))
        return True

    def _enter(self, gang: Gang, hit: Hit) -> None:
        self._floor.enter(gang, hit)
        gang.refused_room = -1
        self._waiting.pop()
        self._note_admission(gang)
        if not gang.wants(gang.leader):
            self._floor.bear(gang)

    def _hit_with_room(self, gang: Gang) -> Hit | None:
        """How much of a gang is computed already, if there are rows for it and all its leader wants fits now and leaves
        each running sequence a block to grow into; else None."""
        if self._floor.seats.num_free < gang.num_rows:
            return None
        room = self._cache.num_free - self._floor.num_sequences * len(self._cache.windows)
        if self._floor.gangs and room <= gang.refused_room:
            return None  # nothing came free since the last look
        leader = gang.leader
        leader.refit()
        # At least one token is left to compute; a leader must not pass the point where its siblings fork.
        hit = self._hit(gang, leader, min(gang.target(leader), len(leader.window) - 1))
        if self._floor.gangs and self._blocks_needed(gang) - self._cache.num_shared(hit) > room:
            gang.refused_room = room
            return None
        return hit

    def _blocks_needed(self, gang: Gang) -> int:
        return self._cache.blocks_for(len(gang.leader.window), self._config.num_tokens)

    def _hit(self, gang: Gang, sequence: Sequence, limit: int) -> Hit:
        if not gang.job.may_reuse_prefix:
            return self._cache.miss()
        return self._cache.match(sequence.window, sequence.chain, limit)

    def _note_admission(self, gang: Gang) -> None:
        job, counters = gang.job, self._counters
        if job.may_reuse_prefix and self._cache.prefix_caching:
            counters.prefix_query_tokens += len(gang.leader.window)
            counters.prefix_hit_tokens += gang.leader.computed
        if job.queue_s is None:
            job.queue_s = max(0.0, self._clock() - job.request.arrival_s)
            job.num_cached_tokens = gang.leader.computed
            counters.prompt_tokens += gang.leader.prompt_len

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
