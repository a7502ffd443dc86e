"""Who comes in, and who makes way.

Waiting gangs come in by priority, then in the order of their arrival, while there are rows and blocks for all that
their leader wants and a block more for each that runs. One of higher priority displaces running ones of lower, from
the end of the order, if that is enough for it; what was preempted waits again and keeps its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import Hit, KVCache
from tokenmill.scheduler.draft import Draft
from tokenmill.scheduler.floor import Floor
from tokenmill.scheduler.job import Gang
from tokenmill.scheduler.queue import WaitingQueue
from tokenmill.scheduler.sequence import Sequence
from tokenmill.scheduler.stats import Counters


def anyone(_: Gang) -> bool:
    return True


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        floor: Floor,
        waiting: WaitingQueue,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._cache = cache
        self._floor = floor
        self._waiting = waiting
        self._counters = counters
        self._clock = clock
        self._batch_is_open = True  # of the static policy: the present batch still takes in

    def preempt(self, gang: Gang) -> None:
        self._counters.preemptions += 1
        self._floor.preempt(gang)
        self._waiting.push(gang)

    def make_way(self) -> None:
        """For waiting gangs that would not come in otherwise."""
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
            self.preempt(victim)
            if (hit := self._hit_with_room(gang)) is not None:
                self._enter(gang, hit)
                return True
        return False

    def admit(self, draft: Draft, is_welcome: Callable[[Gang], bool] = anyone) -> None:
        """Waiting gangs, in order and up to the first unwelcome one, with what is left of the step's budget."""
        if self._config.policy == "static" and not self._floor.gangs:
            self._batch_is_open = True
        while draft.budget.spare > 0 and self._batch_is_open:
            gang = self._waiting.peek()
            if gang is None or not is_welcome(gang) or not self._let_in(gang, draft):
                # A static batch closes when it is full, not when one step's budget is spent.
                self._batch_is_open = self._config.policy != "static" or not self._floor.gangs
                return

    def _let_in(self, gang: Gang, draft: Draft) -> bool:
        hit = self._hit_with_room(gang)
        if hit is None:
            return False
        self._enter(gang, hit)
        granted = draft.budget.spend(gang.wants(gang.leader))
        copies = self._cache.reserve(gang.leader.held_table, gang.leader.computed, gang.leader.computed + granted)
        assert copies is not None, "room for the whole sequence was checked"
        end = gang.leader.computed + granted
        draft.add(gang.leader, granted, copies + self._floor.look_ahead(gang.leader, end))
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
        hit = self.hit(gang, leader, min(gang.target(leader), len(leader.window) - 1))
        if self._floor.gangs and self._blocks_needed(gang) - self._cache.num_shared(hit) > room:
            gang.refused_room = room
            return None
        return hit

    def _blocks_needed(self, gang: Gang) -> int:
        return self._cache.blocks_for(len(gang.leader.window), self._config.num_tokens)

    def hit(self, gang: Gang, sequence: Sequence, limit: int) -> Hit:
        """What of a sequence's window is in the cache already, up to `limit` tokens."""
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
