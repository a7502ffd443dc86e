"""Planning one step: which sequences compute tokens in it.

    1  preempt    running groups, for waiting ones of higher priority or of tenants below their share
    2  running    sequences get at least one token each, and drafts if tokens are left
    3  waiting    groups start with the rest of the tokens (`admission.py`)
    4  background requests get a share of what is left (`plan_builder.py`)

With several tenants, 2 and 3 are one: decoding sequences come first, then running and new prompts in the order of their
tenants' counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.admission import Admission
from tokenmill.scheduler.lanes import Lanes
from tokenmill.scheduler.plan_builder import BackgroundShare, PlanBuilder, TokenBudget
from tokenmill.scheduler.promises import Promises
from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.speculation import Drafter
from tokenmill.scheduler.stats import Counters
from tokenmill.scheduler.step_time import StepTime
from tokenmill.scheduler.tenants import QUANTUM_S, Tenants
from tokenmill.scheduler.waiting import WaitingQueue


def _fair_order(group: SequenceGroup) -> tuple[int, float, tuple[int, int, int]]:
    """Return the sort key of prompts of several tenants. A started prompt continues until its tenant is ahead of the
    others by a quantum: computing many prompts concurrently would delay all of them."""
    ahead_s = group.state.account.counter_s - (QUANTUM_S if group.is_running else 0.0)
    return group.priority, ahead_s, group.key


class StepPlanner:
    def __init__(
        self,
        lanes: Lanes,
        cache: KVCache,
        running: RunningSet,
        waiting: WaitingQueue,
        tenants: Tenants,
        admission: Admission,
        promises: Promises | None,
        background: BackgroundShare,
        step_time: StepTime,
        counters: Counters,
    ) -> None:
        """`lanes`: the limits of the steps that the runner computes at the same time. `promises`: None if steps have no
        time limit."""
        self._lanes = lanes
        self._num_tokens = lanes.max_tokens
        self._num_rows = lanes.max_rows
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._tenants = tenants
        self._admission = admission
        self._promises = promises
        self._background = background
        self._step_time = step_time
        self._counters = counters
        self._drafts: dict[Sequence, list[int]] = {}  # for the plan being built
        self.was_short = False  # the last plan lacked blocks

    def plan_all(self, drafter: Drafter) -> PlanBuilder:
        """Plan a step of all requests."""
        if self._waiting:
            self._admission.preempt_for_priority()
        if is_contended := self._tenants.is_contended:
            self._admission.preempt_for_share()
        has_background = self._background.num_requests > 0
        end = self._running.first_background if has_background else len(self._running)
        num_sequences = self._running.count(0, end) if has_background else self._running.num_sequences
        for_prompts = None
        if self._promises is not None and self._promises.step_limit_s is not None:
            groups = self._running.groups[:end]
            for_prompts = partial(self._promises.tokens_for_prompts, self._num_tokens, groups)
        max_rows, num_tokens = self._num_rows, self._num_tokens
        if self._lanes.number > 1:
            max_rows = self._lanes.share(self._running.num_sequences, len(self._waiting))
            num_tokens = self._lanes.num_tokens
            num_sequences = self._lanes.num_reserved(self._running.groups[:end], max_rows)
        builder = PlanBuilder(
            self._running.in_flight.next_step, TokenBudget(num_tokens, num_sequences, for_prompts), max_rows
        )
        self._drafts = drafter.propose(self._running.groups)
        if is_contended and not self.was_short:
            self._share(builder, end)
        else:
            self._serve_running(builder, 0, end)
            if not builder.is_short:
                self._admit(builder)
        if has_background and not builder.is_short:
            self._plan_background(builder)
        return builder

    def plan_only(self, names: Mapping[str, int]) -> PlanBuilder:
        """Plan a step of only the requests with these ids."""
        running = [group for group in self._running.groups if group.state.request.request_id in names]
        waiting = [group for group in self._waiting.groups if group.state.request.request_id in names]
        budget = TokenBudget(self._num_tokens, sum(len(group.members) for group in running))
        builder = PlanBuilder(self._running.in_flight.next_step, budget, self._num_rows)
        self._drafts = {}
        for group in running:
            self._serve(group, builder, may_preempt=False)
        self._admission.begin()
        for group in sorted(waiting, key=lambda group: group.key):
            if builder.is_short or not budget.has_prompt_tokens or not self._admission.admit(group, builder):
                break
        return builder

    def _admit(self, builder: PlanBuilder, *, background: bool = False) -> None:
        """Start waiting groups with the tokens that are left in the step."""
        if not self._waiting:
            return
        self._admission.begin()
        while builder.budget.has_prompt_tokens and not builder.is_full:
            group = self._admission.next_group(background=background)
            if group is None or not self._admission.admit(group, builder):
                return

    # ── fair sharing between tenants ───────────────────────────────────────────────────────────────────

    def _share(self, builder: PlanBuilder, end: int) -> None:
        """Plan a step of several tenants: decoding sequences first, then running and new prompts, ordered by their
        tenants' counters, smallest first."""
        prompts = self._serve_answers(builder, end)
        self._charge(builder, 0)
        self._admission.begin()
        may_start = not builder.is_short
        while True:
            prompts.sort(key=_fair_order)  # by the current counters
            has_capacity = builder.budget.has_prompt_tokens and not builder.is_full
            first = self._admission.next_group() if may_start and has_capacity else None
            if first is None and not prompts:
                return
            num_planned = len(builder.planned)
            if first is None or (prompts and _fair_order(prompts[0]) <= _fair_order(first)):
                self._serve(prompts.pop(0), builder, may_preempt=False)
                may_start = may_start and not builder.is_short
            else:
                may_start = self._admission.admit(first, builder)
            self._charge(builder, num_planned)

    def _serve_answers(self, builder: PlanBuilder, end: int) -> list[SequenceGroup]:
        """Plan the running groups whose sequences each want at most one token; return the others."""
        prompts: list[SequenceGroup] = []
        position = 0
        while position < end and position < len(self._running.groups):
            group = self._running.groups[position]
            position += 1
            if any(group.wants(sequence) > 1 for sequence in group.members):
                prompts.append(group)
            elif not self._serve(group, builder):
                break
        return [group for group in prompts if group.is_running]

    def _charge(self, builder: PlanBuilder, first: int) -> None:
        """Charge the tenants of planned rows, from index `first` on, for the estimated device time."""
        model, num_rows = self._step_time, max(1, self._running.num_sequences)
        for planned in builder.planned[first:]:
            sequence = planned.sequence
            num_tokens = planned.num_tokens + len(planned.drafts)
            self._tenants.charge(sequence.state.account, model.cost_s(num_tokens, sequence.planned, num_rows))

    def _plan_background(self, builder: PlanBuilder) -> None:
        """Plan background requests with their share of the remaining tokens, or none while another request's prompt is
        computed."""
        if any(not planned.sequence.has_emitted for planned in builder.planned):
            return
        share = min(builder.budget.left, self._background.num_tokens())
        if not share:
            return
        first = self._running.first_background
        builder.budget = TokenBudget(share, min(share, self._running.count(first, len(self._running))))
        self._serve_running(builder, first, len(self._running))
        if not builder.is_short:
            self._admit(builder, background=True)

    def _serve_running(self, builder: PlanBuilder, position: int, end: int) -> None:
        """Plan running groups in order. The list is walked by position, because groups at its end may be preempted."""
        while position < end and position < len(self._running.groups):
            if not self._serve(self._running.groups[position], builder):
                return
            position += 1

    def _serve(self, group: SequenceGroup, builder: PlanBuilder, *, may_preempt: bool = True) -> bool:
        """Plan all members of a group; return False if no later group may be planned in this step. `may_preempt`: False
        if later groups may already be planned."""
        if builder.is_full:
            return True
        served, is_short = [], False
        for sequence in group.members:
            if self._lanes.number > 1 and group.wants(sequence) <= 0:
                continue  # in flight on another lane, so no token is reserved for it
            if group.state.request.shift is not None and not self._has_moved_window(group, sequence):
                continue
            granted = builder.budget.grant(group.wants(sequence))
            if not granted:
                continue
            copies = self._make_room(group, sequence, granted, builder, may_preempt=may_preempt)
            if copies is not None:
                drafts = self._fitting_drafts(sequence, granted, builder) if self._drafts else []
                served.append((sequence, granted, copies, drafts))
            elif sequence.num_in_flight or not may_preempt:
                builder.budget.refund(granted)
            else:
                is_short = True
                break
        if group.is_running:  # even if it is short of blocks: the copies reserved for some members must be made
            for sequence, granted, copies, drafts in served:
                builder.add(sequence, granted, copies, drafts)
        return not is_short

    def _has_moved_window(self, group: SequenceGroup, sequence: Sequence) -> bool:
        """Move the window of a sequence that has outgrown the context. Return False if it has to wait: the window was
        outgrown by forced tokens, and moves once no step in flight uses it."""
        if sequence.num_in_flight:
            return not sequence.has_outgrown_window
        if sequence.update_window():
            self._running.reopen(sequence, self._admission.match(group, sequence, group.target(sequence) - 1))
        return True

    def _fitting_drafts(self, sequence: Sequence, granted: int, builder: PlanBuilder) -> list[int]:
        """Return the drafts for which tokens and blocks are left over: drafts never reduce the tokens of other
        sequences or preempt them."""
        end = sequence.planned + granted
        drafts = self._drafts.get(sequence, [])[: builder.budget.spare]
        if not drafts or end < len(sequence.window):
            return []
        if not self._cache.has_spare(len(drafts), self._running.num_sequences):
            return []
        # Blocks after a sequence's last one are new, so there is nothing to copy.
        copies = self._cache.reserve(sequence.held_table, end, end + len(drafts), is_certain=False)
        if copies is None:
            return []
        assert not copies, "the block after the last token is shared"
        builder.budget.spend(len(drafts))
        return drafts

    def _make_room(
        self, group: SequenceGroup, sequence: Sequence, num_tokens: int, builder: PlanBuilder, *, may_preempt: bool
    ) -> list[tuple[int, int]] | None:
        """Reserve blocks for a sequence's next tokens, if necessary by preempting the last group in order.

        Return None if the sequence has to wait: if it is in flight itself (it does not preempt others then), if blocks
        of preempted groups are still in use by steps in flight, or if it was the last group and is preempted itself.
        """
        start = sequence.planned
        end = start + num_tokens
        while (copies := self._cache.reserve(sequence.held_table, start, end)) is None:
            builder.is_short = True
            if sequence.num_in_flight or self._running.in_flight.releases or not may_preempt:
                self._counters.block_waits += 1
                return None
            victim = self._running.victim(group)
            builder.budget.unreserve(len(victim.members))
            self._admission.preempt(victim)
            if victim is group:
                return None
        return copies
