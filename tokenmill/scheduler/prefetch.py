"""What the next step computes whatever comes of this one: it can be started before this one is done.

A prompt depends on no token that is drawn. So while a device computes a step, the next chunks of unfinished prompts,
and behind them waiting prompts, are planned already, within what the budget leaves when everyone else has a token:

    this step:   [ a token each | chunk ... ]                        on the device
    next step:   [ a token each | rest of the chunk, newcomers ]
                   planned when    └ planned early, started at once
                   this is done
"""

from __future__ import annotations

from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.admission import Admission
from tokenmill.scheduler.budget import TokenBudget
from tokenmill.scheduler.plan_builder import PlanBuilder, Planned
from tokenmill.scheduler.request_state import SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import StepPlan


class Prefetcher:
    def __init__(self, config: SchedulerConfig, cache: KVCache, running: RunningSet, admission: Admission) -> None:
        self._config = config
        self._cache = cache
        self._running = running
        self._admission = admission

    def plan(self, planned: list[Planned]) -> StepPlan | None:
        """Behind a step of these rows; what comes back is among the floor's early rows."""
        if self._config.policy == "static":
            return None
        # Whoever has a row, or will fork onto one, is promised a token of the next step, if there is one for him.
        num_staying = self._running.row_allocator.num_taken - sum(map(is_last_draw, planned))
        draft = PlanBuilder(TokenBudget(self._config.num_tokens, num_staying))
        if self._continue_all(draft, planned):
            underway = names_underway(planned, self._cache.block_size)
            self._admission.admit(draft, lambda group: is_plain(group) and not self._begins_with(group, underway))
        self._running.prefetched.keep(draft)
        return draft.step_plan(self._running.row_allocator.pop_released()) if draft.planned else None

    def _continue_all(self, draft: PlanBuilder, planned: list[Planned]) -> bool:
        """What this step leaves of running prompts; False where not all of it can be had yet."""
        underway = {one.sequence: one.num_tokens for one in planned}
        for group in self._running.groups:
            for sequence in group.members:
                behind = underway.get(sequence, 0)
                if group.wants(sequence) > behind and not self._continue(group, sequence, behind, draft):
                    return False
        return True

    def _continue(self, group: SequenceGroup, sequence: Sequence, behind: int, draft: PlanBuilder) -> bool:
        # Blocks behind a window come free only when the chunk before is done.
        if not is_plain(group) or any(window is not None for window in self._cache.windows):
            return False
        wanted = group.wants(sequence) - behind
        granted = draft.budget.grant(wanted)
        start = sequence.computed + behind
        copies = self._cache.reserve(sequence.held_table, start, start + granted) if granted else None
        if copies is None:
            return False
        draft.add(sequence, granted, copies + self._running.look_ahead(sequence, start + granted), behind=behind)
        return granted == wanted

    def _begins_with(self, group: SequenceGroup, names: set[bytes]) -> bool:
        """The first block that a gang would compute has one of these names."""
        hit = self._admission.hit(group, group.leader, len(group.leader.window) - 1)
        index = hit.num_tokens // self._cache.block_size
        return not names.isdisjoint(group.leader.chain.hashes[index : index + 1])


def is_plain(group: SequenceGroup) -> bool:
    """One sequence that draws on its own, from its prompt's last token on, and of whose prompt nothing is asked."""
    state, params = group.state, group.state.request.params
    is_alone = len(group.members) == 1 and not group.pending_forks and not state.output_mode.holds_back
    is_asked = params.prompt_logprobs is not None or params.guided is not None
    return is_alone and state.draws_tokens and not is_asked and state.request.shift is None


def is_last_draw(planned: Planned) -> bool:
    """Its sequence draws the last token that was asked for, and is gone when the step is done."""
    sequence, num_tokens, _ = planned
    state = sequence.state
    draws = sequence.is_whole and sequence.computed + num_tokens == len(sequence.window)
    return draws and is_plain(state.group_of(sequence)) and sequence.num_outputs + 1 >= state.request.max_tokens


def names_underway(planned: list[Planned], block_size: int) -> set[bytes]:
    """Of full blocks that are being computed: who begins with one had better wait until it is in the cache."""
    found: set[bytes] = set()
    for sequence, num_tokens, _ in planned:
        first, last = sequence.computed // block_size, (sequence.computed + num_tokens) // block_size
        found.update(sequence.chain.hashes[first:last])
    return found
