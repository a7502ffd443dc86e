"""Who comes in, and who makes way.

Waiting gangs come in by priority, then in the order of their arrival, while there are rows and blocks for all that
their leader wants and a block more for each that runs. One of higher priority displaces running ones of lower, from
the end of the order, if that is enough for it; what was preempted waits again and keeps its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache, PrefixMatch
from tokenmill.scheduler.plan_builder import PlanBuilder
from tokenmill.scheduler.queue import WaitingQueue
from tokenmill.scheduler.request_state import SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.sequence import Sequence
from tokenmill.scheduler.stats import Counters


def anyone(_: SequenceGroup) -> bool:
    return True


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        running: RunningSet,
        waiting: WaitingQueue,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._counters = counters
        self._clock = clock
        self._batch_is_open = True  # of the static policy: the present batch still takes in

    def preempt(self, group: SequenceGroup) -> None:
        self._counters.preemptions += 1
        self._running.preempt(group)
        self._waiting.push(group)

    def preempt_for_priority(self) -> None:
        """For waiting gangs that would not come in otherwise."""
        while (group := self._waiting.peek()) is not None and self._try_preempt(group):
            pass

    def _try_preempt(self, group: SequenceGroup) -> bool:
        """Running gangs of lower priority go, from the end of the order, until `gang` can come in, and it does; none
        goes where all of them together would not be enough, or nobody has to."""
        lower = list(takewhile(lambda other: other.priority > group.priority, reversed(self._running.groups)))
        if not lower or self._config.policy == "static" or self._hit_with_room(group) is not None:
            return False
        rows = self._running.row_allocator.num_free + sum(other.num_rows for other in lower)
        blocks = self._cache.num_free + sum(member.held_table.num_held for other in lower for member in other.members)
        if rows < group.num_rows or blocks < self._blocks_needed(group):
            return False
        for victim in lower:
            self.preempt(victim)
            if (hit := self._hit_with_room(group)) is not None:
                self._enter(group, hit)
                return True
        return False

    def admit(self, draft: PlanBuilder, is_welcome: Callable[[SequenceGroup], bool] = anyone) -> None:
        """Waiting gangs, in order and up to the first unwelcome one, with what is left of the step's budget."""
        if self._config.policy == "static" and not self._running.groups:
            self._batch_is_open = True
        while draft.budget.spare > 0 and self._batch_is_open:
            group = self._waiting.peek()
            if group is None or not is_welcome(group) or not self._let_in(group, draft):
                # A static batch closes when it is full, not when one step's budget is spent.
                self._batch_is_open = self._config.policy != "static" or not self._running.groups
                return

    def _let_in(self, group: SequenceGroup, draft: PlanBuilder) -> bool:
        hit = self._hit_with_room(group)
        if hit is None:
            return False
        self._enter(group, hit)
        granted = draft.budget.spend(group.wants(group.leader))
        copies = self._cache.reserve(group.leader.held_table, group.leader.computed, group.leader.computed + granted)
        assert copies is not None, "room for the whole sequence was checked"
        end = group.leader.computed + granted
        draft.add(group.leader, granted, copies + self._running.look_ahead(group.leader, end))
        return True

    def _enter(self, group: SequenceGroup, hit: PrefixMatch) -> None:
        self._running.enter(group, hit)
        group.refused_room = -1
        self._waiting.pop()
        self._note_admission(group)
        if not group.wants(group.leader):
            self._running.fork_pending(group)

    def _hit_with_room(self, group: SequenceGroup) -> PrefixMatch | None:
        """How much of a gang is computed already, if there are rows for it and all its leader wants fits now and leaves
        each running sequence a block to grow into; else None."""
        if self._running.row_allocator.num_free < group.num_rows:
            return None
        room = self._cache.num_free - self._running.num_sequences * len(self._cache.windows)
        if self._running.groups and room <= group.refused_room:
            return None  # nothing came free since the last look
        leader = group.leader
        leader.update_window()
        # At least one token is left to compute; a leader must not pass the point where its siblings fork.
        hit = self.hit(group, leader, min(group.target(leader), len(leader.window) - 1))
        if self._running.groups and self._blocks_needed(group) - self._cache.num_shared(hit) > room:
            group.refused_room = room
            return None
        return hit

    def _blocks_needed(self, group: SequenceGroup) -> int:
        return self._cache.blocks_for(len(group.leader.window), self._config.num_tokens)

    def hit(self, group: SequenceGroup, sequence: Sequence, limit: int) -> PrefixMatch:
        """What of a sequence's window is in the cache already, up to `limit` tokens."""
        if not group.state.may_reuse_prefix:
            return self._cache.miss()
        return self._cache.match(sequence.window, sequence.chain, limit)

    def _note_admission(self, group: SequenceGroup) -> None:
        state, counters = group.state, self._counters
        if state.may_reuse_prefix and self._cache.prefix_caching:
            counters.prefix_query_tokens += len(group.leader.window)
            counters.prefix_hit_tokens += group.leader.computed
        if state.queue_s is None:
            state.queue_s = max(0.0, self._clock() - state.request.arrival_s)
            state.num_cached_tokens = group.leader.computed
            counters.prompt_tokens += group.leader.prompt_len
