"""Admission: which waiting groups start to run, and which running ones are preempted for them.

Waiting groups are admitted by priority, then in the order of their arrival, while there is room (`budget.py`): rows for
all their sequences, a slot for their adapter, and blocks for all that their leader wants plus one for each sequence
that runs. Samples that find no row wait on their own, so that a request for many of them does not keep rows idle. A
group of higher priority displaces running ones of lower, from the end of the order, if that is enough for it; a
preempted group waits again and keeps its place.

While steps are in flight, two things are different. Room that a preempted group leaves is free only when the steps that
use it are collected, so the group it was made for is admitted in a later plan. And a group whose next block is being
computed by a step in flight waits until that block is in the prefix cache, instead of computing it again.

Before that, a request becomes its state: the sequences it needs and how their results are output; one that could never
run, even alone, is refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import takewhile

from tokenmill.config.engine import SchedulerConfig
from tokenmill.errors import InvalidRequest
from tokenmill.kv.cache import KVCache, PrefixMatch
from tokenmill.scheduler.beam import BeamSearch
from tokenmill.scheduler.budget import Resource, Resources
from tokenmill.scheduler.outputs import PooledOutput, StreamedOutputs
from tokenmill.scheduler.plan_builder import PlanBuilder
from tokenmill.scheduler.request import OutputMode, RequestState, Sequence, SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.stats import Counters
from tokenmill.types import BACKGROUND_PRIORITY, Request, RowInit


def build_request_state(
    request: Request, number: int, cache: KVCache, num_rows: int, continues: Callable[[RowInit], bool]
) -> RequestState:
    state = RequestState(request, number)
    state.output_mode = _output_mode(state)
    chain = cache.chain(request.cache_salt, request.adapter)
    sequences = [Sequence(state, index, chain.fresh()) for index in range(state.num_sequences)]
    # Beams choose on the host what comes next.
    chooses_on_host = state.output_mode.holds_back
    state.continues = state.draws_tokens and not chooses_on_host and continues(sequences[0].row_init())
    if request.params.beam:
        SequenceGroup(state, sequences[:1], [], num_rows=len(sequences))  # beams branch off the first one
        return state
    if any(given.token_ids or given.is_finished for given in request.given):
        _resume(state, sequences)
        return state
    SequenceGroup(state, sequences[:1], sequences[1:num_rows], num_rows=min(len(sequences), num_rows))
    for sequence in sequences[num_rows:]:  # more samples than rows: the others run as rows come free
        SequenceGroup(state, [sequence], [], num_rows=1)
    return state


def _resume(state: RequestState, sequences: list[Sequence]) -> None:
    """Go on with samples that another engine has begun: each on its own, as if it had been preempted there."""
    for sequence, given in zip(sequences, state.request.given, strict=True):
        if not given.is_finished:
            sequence.resume(given)
            SequenceGroup(state, [sequence], [], num_rows=1)
    state.queue_s = 0.0  # what it waited, and found in the cache, was told with its first token


def _output_mode(state: RequestState) -> OutputMode:
    if state.request.pooling is not None:
        return PooledOutput(state)
    return BeamSearch(state) if state.request.params.beam else StreamedOutputs(state)


def check_feasible(request: Request, cache: KVCache, num_rows: int, chunk: int) -> None:
    """Refuse a request that could not run even with the machine for itself."""
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt", hint="send at least one token")
    width = request.params.beam.width if request.params.beam else 1
    if width > num_rows:
        raise InvalidRequest(
            f"beam width {width} exceeds the {num_rows} sequences that run at once",
            param="beam.width",
            hint="ask for fewer beams or raise max_running",
        )
    for region in cache.regions:
        needed, usable = blocks_needed(request, cache, chunk, region), cache.pool.usable[region]
        if needed > usable:
            size = f"of {cache.block_size} tokens"
            what = (f"KV blocks {size}", f"blocks of cells {size}", "states of recurrent layers")[region]
            raise InvalidRequest(
                f"the request needs up to {needed} {what}, the pool has {usable}",
                param="max_tokens",
                hint="shorten the prompt, lower max_tokens, or give the cache more memory",
            )


def blocks_needed(request: Request, cache: KVCache, chunk: int, region: int = 0) -> int:
    """The most blocks of a region that must be held at once: beams together, samples one after another if need be.

    The last token drawn is never computed.   prompt + max_tokens - 1 positions, or the context where it shifts
    """
    prompt_len = len(request.prompt_token_ids)
    longest = prompt_len + max(0, request.max_tokens - 1)
    alone = cache.blocks_for(min(longest, request.shift.context) if request.shift else longest, chunk, region)
    if request.params.beam is None:
        return alone
    num_full_groups = sum(rule.keeps_all and rule.region == region for rule in cache.rules)
    shared = num_full_groups * ((prompt_len - 1) // cache.block_size)
    return shared + request.params.beam.width * (alone - shared)


class WaitingQueue:
    """Waiting groups: smaller priority numbers first, then first come, first served.

    A preempted group keeps its place in that order, so it returns before everything that came later. Leaving the queue
    early is lazy: the entry is marked and dropped when it surfaces, so nothing is ever searched.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], SequenceGroup]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def groups(self) -> list[SequenceGroup]:
        """All that wait, in no particular order."""
        return [group for _, group in self._heap if not group.is_gone]

    def push(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (group.key, group))
        self._num_live += 1

    def peek(self) -> SequenceGroup | None:
        while self._heap and self._heap[0][1].is_gone:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> SequenceGroup:
        group = self.peek()
        assert group is not None, "popped from an empty queue"
        heapq.heappop(self._heap)
        self._num_live -= 1
        return group

    def discard(self, group: SequenceGroup) -> None:
        """Forget a group that its owner has marked gone."""
        assert group.is_gone
        self._num_live -= 1


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
        self._pools = [pool_resource(cache, running, config.num_tokens, region) for region in cache.regions]
        self._resources = Resources([rows_resource(running), adapters_resource(running), *self._pools])

    def preempt(self, group: SequenceGroup) -> None:
        self._counters.preemptions += 1
        self._running.preempt(group)
        self._waiting.push(group)

    def preempt_for_priority(self) -> None:
        """Make room for waiting groups that running ones of lower priority keep out."""
        while (group := self._waiting.peek()) is not None and self._try_preempt(group):
            pass

    def _try_preempt(self, group: SequenceGroup) -> bool:
        """Preempt running groups of lower priority, from the end of the order, until `group` can be admitted, and admit
        it. None is preempted where all of them together would not be enough, or none has to be."""
        lower = list(takewhile(lambda other: other.priority > group.priority, reversed(self._running.groups)))
        if not lower or self._match_with_room(group) is not None or not self._would_suffice(group, lower):
            return False
        for victim in lower:
            if self._would_suffice(group, []):
                return False  # what steps in flight will give back is enough
            self.preempt(victim)
            if (match := self._match_with_room(group)) is not None:
                self._enter(group, match)
                return True
        return False

    def _would_suffice(self, group: SequenceGroup, victims: list[SequenceGroup]) -> bool:
        return self._resources.would_suffice(group, self._cache.miss(), victims)

    def admit(self, builder: PlanBuilder, *, background: bool = False) -> None:
        """Start waiting groups, in order and up to the first without room, with what is left of the step's tokens.
        `background`: whether background groups may start too."""
        underway = self._hashes_in_flight() if len(self._waiting) else set()
        while builder.budget.spare > 0:
            group = self._waiting.peek()
            if group is None or (group.priority >= BACKGROUND_PRIORITY and not background):
                return
            self._part(group)
            if (match := self._match_with_room(group)) is None:
                return
            if underway and self._next_hash(group, match) in underway:
                return
            self._enter(group, match)
            leader = group.leader
            granted = builder.budget.spend(group.wants(leader))
            copies = self._cache.reserve(leader.held_table, leader.computed, leader.computed + granted)
            assert copies is not None, "room for the whole sequence was checked"
            builder.add(leader, granted, copies)

    def _part(self, group: SequenceGroup) -> None:
        """Let the samples of a group for which there are no rows now come later, each on its own: they find the prompt
        in the prefix cache."""
        num_free = self._running.row_allocator.num_free
        is_parted = 0 < num_free < group.num_rows and bool(group.pending_forks)
        if not is_parted or not self._cache.prefix_caching or not group.state.may_reuse_prefix:
            return
        if group.state.request.params.beam is not None:
            return
        early, late = group.pending_forks[: num_free - 1], group.pending_forks[num_free - 1 :]
        group.pending_forks, group.num_rows = early, num_free
        for sequence in late:
            self._waiting.push(SequenceGroup(group.state, [sequence], [], num_rows=1))

    def _enter(self, group: SequenceGroup, match: PrefixMatch) -> None:
        self._running.enter(group, match)
        group.refused_room = -1
        self._waiting.pop()
        self._count_admission(group)
        if not group.wants(group.leader):
            self._running.fork_pending(group)

    def _match_with_room(self, group: SequenceGroup) -> PrefixMatch | None:
        """How much of a group is computed already, if there is room for it; else None."""
        if self._room() <= group.refused_room or self._resources.first_lacking(group, None):
            return None
        leader = group.leader
        leader.update_window()
        # At least one token is left to compute; a leader must not pass the point where its siblings fork.
        match = self.match(group, leader, min(group.target(leader), len(leader.window) - 1))
        if self._resources.first_lacking(group, match):
            group.refused_room = self._room()
            return None
        return match

    def _room(self) -> int:
        """Blocks of all kinds that a newcomer could have."""
        return sum(pool.free() for pool in self._pools)

    def match(self, group: SequenceGroup, sequence: Sequence, limit: int) -> PrefixMatch:
        """What of a sequence's window is in the cache already, up to `limit` tokens."""
        if not group.state.may_reuse_prefix:
            return self._cache.miss()
        return self._cache.match(sequence.window, sequence.chain, limit)

    def _next_hash(self, group: SequenceGroup, match: PrefixMatch) -> bytes | None:
        """The hash of the first block that a group would compute; None where it can't come from the cache."""
        if not group.state.may_reuse_prefix:
            return None
        index = match.num_tokens // self._cache.block_size
        return next(iter(group.leader.chain.hashes[index : index + 1]), None)

    def _hashes_in_flight(self) -> set[bytes]:
        """Hashes of the full blocks that steps in flight compute, as far as they are known."""
        found: set[bytes] = set()
        if not self._cache.prefix_caching:
            return found
        size = self._cache.block_size
        for step in self._running.in_flight:
            for planned in step.planned:
                sequence = planned.sequence
                if not planned.is_void and sequence.state.is_shareable:
                    found.update(sequence.chain.hashes[sequence.computed // size : sequence.planned // size])
        return found

    def _count_admission(self, group: SequenceGroup) -> None:
        state, counters = group.state, self._counters
        if state.may_reuse_prefix and self._cache.prefix_caching:
            counters.prefix_query_tokens += len(group.leader.window)
            counters.prefix_hit_tokens += group.leader.computed
        if state.queue_s is None:
            state.queue_s = max(0.0, self._clock() - state.request.arrival_s)
            state.num_cached_tokens = group.leader.computed
            counters.prompt_tokens += group.leader.prompt_len


# ── what groups hold ───────────────────────────────────────────────────────────────────────────────────


def rows_resource(running: RunningSet) -> Resource:
    return Resource(
        "rows",
        free=lambda: running.row_allocator.num_free,
        returning=lambda: len(running.in_flight.releases),
        needed=lambda group, _: group.num_rows,
        held=lambda group: group.num_rows,
    )


def adapters_resource(running: RunningSet) -> Resource:
    """Slots for adapters; groups with the same adapter share one."""
    return Resource(
        "adapter slots",
        free=running.adapters.num_free,
        returning=lambda: 0,
        needed=lambda group, _: running.adapters.num_needed(group.state.request.adapter),
        held=lambda group: running.adapters.num_held(group.state.request.adapter),
    )


def pool_resource(cache: KVCache, running: RunningSet, chunk: int, region: int) -> Resource:
    """Blocks of a region (KV blocks, cells, state slots) for all that a group's leader wants, with one kept back for
    each running sequence and cache group to grow into."""
    num_groups = cache.num_groups(region)

    def needed(group: SequenceGroup, match: PrefixMatch | None) -> int:
        if match is None:
            return 0
        return cache.blocks_for(len(group.leader.window), chunk, region) - cache.num_shared(match, region)

    return Resource(
        ("blocks", "cells", "states")[region],
        free=lambda: cache.pool.free_in(region) - running.num_sequences * num_groups,
        returning=lambda: sum(cache.num_held(holding.table, region) for holding in running.in_flight.releases),
        needed=needed,
        held=lambda group: sum(cache.num_held(member.held_table, region) + num_groups for member in group.members),
    )
