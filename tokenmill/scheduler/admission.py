"""Admission: which waiting groups start to run, and which running groups are preempted for them.

Waiting groups start in the order of their queue (`waiting.py`) while there is room: rows for all their sequences, a
slot for their adapter, and blocks for all tokens of their leader plus one for each running sequence. Samples that find
no row wait separately, so that a request for many samples does not keep rows idle. A group of higher priority preempts
running groups of lower priority, from the end of the order, if that frees enough; a preempted group returns to its
position in the queue.

Backfill: a group without room does not block the others. They pass it, until it would fit if all groups that passed it
were gone; from then on none passes, and it starts when enough of them have ended. So it waits for at most one
generation of them, and no row is kept idle for it before.

    8 rows     [ a a a a b b b . ]   a request for 6 beams waits
               [ a a a a c b b c ]   c, c pass it
               [ a c a c c c . . ]   three have passed, and 6 would be free without them: no other group passes

Fair shares: if a tenant has less than its share of the rows and blocks, and its next group finds no room, the youngest
groups of tenants beyond their share are preempted for it. Most of their blocks are still cached when they return.

Steps in flight matter in two ways. Rows and blocks of a preempted group are free only when the steps that use them are
applied, so the group that needs them is admitted in a later plan. And a group whose next block is being computed by a
step in flight waits until that block is in the prefix cache, instead of computing it again.

A feature with its own limited resource (state slots, adapter slots, encoder tokens) adds a `Resource`; admission and
preemption treat all of them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from tokenmill.kv.cache import KVCache, PrefixMatch
from tokenmill.scheduler.fetches import Fetches
from tokenmill.scheduler.plan_builder import PlanBuilder
from tokenmill.scheduler.promises import Promises
from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.stats import Counters
from tokenmill.scheduler.tenants import TenantAccount, Tenants
from tokenmill.scheduler.waiting import WaitingQueue
from tokenmill.types import BACKGROUND_PRIORITY

MAX_PASSED = 16  # groups without room that are considered in one plan
WAIT_WEIGHT = 0.1  # of the newest queue time in their moving average


class Backfill:
    """Tracks the waiting group that finds no room, and the later groups that have passed it."""

    def __init__(self, resources: Resources, cache: KVCache) -> None:
        self._resources = resources
        self._cache = cache
        self._blocked: SequenceGroup | None = None
        self._passers: list[SequenceGroup] = []

    @property
    def blocked(self) -> SequenceGroup | None:
        """The group that is being passed, if it is still waiting."""
        if self._blocked is not None and (self._blocked.is_running or self._blocked.is_gone):
            self._blocked = None
        return self._blocked

    def note_refused(self, group: SequenceGroup) -> None:
        if self.blocked is None:
            self._blocked, self._passers = group, []

    def note_start(self, group: SequenceGroup) -> None:
        if self.blocked not in (None, group):
            self._passers.append(group)

    def may_pass(self, group: SequenceGroup) -> bool:
        """Tell whether a group may start before the blocked one: always if it is more urgent or its tenant has received
        less; otherwise until the blocked one would fit without the groups that have passed it."""
        blocked = self.blocked
        if blocked is None or blocked is group or self.precedes(group, blocked):
            return True
        self._passers = [one for one in self._passers if one.is_running]
        return not self._resources.would_suffice(blocked, self._cache.miss(), self._passers)

    def precedes(self, group: SequenceGroup, blocked: SequenceGroup) -> bool:
        """Tell whether a group comes before the blocked one by priority or by its tenant's counter."""
        own, other = group.state.account, blocked.state.account
        return group.priority < blocked.priority or (own is not other and own.counter_s < other.counter_s)


class Admission:
    def __init__(
        self,
        num_tokens: int,
        cache: KVCache,
        running: RunningSet,
        waiting: WaitingQueue,
        tenants: Tenants,
        promises: Promises | None,
        counters: Counters,
        fetches: Fetches | None,
        clock: Callable[[], float],
    ) -> None:
        """`num_tokens`: the token budget of a step. `promises`: None if steps have no time limit and requests no
        latency objective. `fetches`: None if blocks are kept in the pool only."""
        self._cache = cache
        self._fetches = fetches
        self._running = running
        self._waiting = waiting
        self._tenants = tenants
        self._counters = counters
        self._clock = clock
        self._pools = [pool_resource(cache, running, num_tokens, region) for region in cache.regions]
        self._tenant_limit = tenant_resource(running)
        resources = [self._tenant_limit, rows_resource(running)]
        if promises is not None and promises.level.tpot_s is not None:
            resources.append(step_time_resource(promises, running))
        if running.adapters.num_slots:
            resources.append(adapters_resource(running))
        self._resources = Resources([*resources, *self._pools])
        self._backfill = Backfill(self._resources, cache)
        self._hashes_in_flight: set[bytes] = set()  # of blocks that steps in flight compute
        self._num_passed = 0
        self._tries_blocked = True

    def preempt(self, group: SequenceGroup) -> None:
        self._counters.preemptions += 1
        self._running.preempt(group)
        self._waiting.push(group)

    def preempt_for_priority(self) -> None:
        """Preempt running groups for waiting groups of higher priority."""
        while (group := self._waiting.first()) is not None and self._try_preempt(group, self._less_urgent(group)):
            pass

    def preempt_for_share(self) -> None:
        """Preempt groups of tenants beyond their share for a waiting group of a tenant below its share. Only one group
        per plan: a step with the prompts of many would take long."""
        group = self._waiting.first(keeps_quantum=False)
        if group is not None and group.priority < BACKGROUND_PRIORITY:
            self._try_preempt(group, self._beyond_share(group))

    def _less_urgent(self, group: SequenceGroup) -> list[SequenceGroup]:
        return list(takewhile(lambda other: other.priority > group.priority, reversed(self._running.groups)))

    def _beyond_share(self, group: SequenceGroup) -> list[SequenceGroup]:
        """Return groups of tenants that have more than their share of rows or blocks, youngest first, only as long as
        those tenants keep their share; none if the group's own tenant would exceed its share."""
        if self._match_with_room(group) is not None:
            return []
        unit = 1.0 / self._tenants.open_weight
        held = self._shares_held()
        own = group.state.account
        if held[own] and held[own] + self._share_of(group) > own.tenant.weight * unit:
            return []
        found = []
        for other in reversed(self._running.groups):
            account = other.state.account
            left = held[account] - self._share_of(other)
            is_ahead = account.counter_s > own.counter_s
            if is_ahead and other.priority >= group.priority and left >= account.tenant.weight * unit:
                held[account] = left
                found.append(other)
        return found

    def _shares_held(self) -> dict[TenantAccount, float]:
        """Return the sum of each tenant's group shares."""
        held: dict[TenantAccount, float] = defaultdict(float)
        for group in self._running.groups:
            held[group.state.account] += self._share_of(group)
        return held

    def _share_of(self, group: SequenceGroup) -> float:
        """Return a group's share of the rows or of the blocks, whichever is larger."""
        rows = group.num_rows / self._running.row_allocator.num_rows
        blocks = self._cache.blocks_for(len(group.leader.window), len(group.leader.window)) / self._cache.num_usable
        return max(rows, blocks)

    def _try_preempt(self, group: SequenceGroup, victims: list[SequenceGroup]) -> bool:
        """Preempt running groups, one after another, until `group` can be admitted, and admit it. Preempt none if even
        all of them would not free enough, or if `group` already fits."""
        if not victims or self._match_with_room(group) is not None or not self._would_suffice(group, victims):
            return False
        for victim in victims:
            if self._would_suffice(group, []):
                return False  # what steps in flight will free is enough
            self.preempt(victim)
            if (match := self._match_with_room(group)) is not None:
                self._start(group, match)
                return True
        return False

    def _would_suffice(self, group: SequenceGroup, victims: list[SequenceGroup]) -> bool:
        return self._resources.would_suffice(group, self._cache.miss(), victims)

    def begin(self) -> None:
        """Reset the state of the previous plan: consider all waiting groups again."""
        self._waiting.recall()
        self._hashes_in_flight = self._find_hashes_in_flight() if len(self._waiting) else set()
        self._num_passed = 0
        self._tries_blocked = True

    def next_group(self, *, background: bool = False) -> SequenceGroup | None:
        """Return the group that would start next. `background`: whether background groups may start too."""
        first, blocked = self._waiting.first(), self._backfill.blocked
        if blocked is not None and self._tries_blocked:
            is_next = first is None or not self._backfill.precedes(first, blocked)
            if is_next and self._match_with_room(blocked) is not None:
                first = blocked
        return None if first is None or (first.priority >= BACKGROUND_PRIORITY and not background) else first

    def admit(self, group: SequenceGroup, builder: PlanBuilder) -> bool:
        """Start a group with the tokens that are left in the step, or pass it over; return False if no other group may
        start."""
        self._split_to_free_rows(group)
        if (match := self._match_with_room(group)) is None:
            return self._pass_over(group)
        if not self._backfill.may_pass(group):
            return False
        if self._hashes_in_flight and self._next_hash(group, match) in self._hashes_in_flight:
            self._tries_blocked = False
            self._waiting.pass_tenant(group)
            return True
        self._start(group, match)
        if group.pending_fetch is not None:
            return True
        leader = group.leader
        granted = builder.budget.spend_on_prompt(group.wants(leader))
        copies = self._cache.reserve(leader.held_table, leader.computed, leader.computed + granted)
        assert copies is not None, "blocks for the whole sequence were available"
        builder.add(leader, granted, copies)
        return True

    def _pass_over(self, group: SequenceGroup) -> bool:
        """Let other groups pass a group without room: none if no row is free, no other group of its tenant if the
        tenant's limit is reached."""
        if not self._running.row_allocator.num_free:
            return False
        self._num_passed += 1
        if self._tenant_limit.needed(group, None):
            self._waiting.pass_tenant(group)
        else:
            self._backfill.note_refused(group)
            self._waiting.pass_over(group)
        return self._num_passed < MAX_PASSED

    def _split_to_free_rows(self, group: SequenceGroup) -> None:
        """Split off the samples of a group for which no rows are free now, each into a waiting group of its own: they
        will find the prompt in the prefix cache."""
        num_free = self._running.row_allocator.num_free
        limit = group.state.account.tenant.max_sequences
        if limit is not None:
            num_free = min(num_free, limit - self._running.num_rows_of(group.state.account))
        is_split = 0 < num_free < group.num_rows and bool(group.pending_forks)
        if not is_split or not self._cache.prefix_caching or not group.state.may_reuse_prefix:
            return
        if group.state.request.params.beam is not None:
            return
        early, late = group.pending_forks[: num_free - 1], group.pending_forks[num_free - 1 :]
        group.pending_forks, group.num_rows = early, num_free
        for sequence in late:
            self._waiting.push(SequenceGroup(group.state, [sequence], [], num_rows=1))

    def _start(self, group: SequenceGroup, match: PrefixMatch) -> None:
        self._running.add(group, match)
        group.refused_room = -1
        self._waiting.start(group)
        self._backfill.note_start(group)
        self._count_admission(group)
        if self._fetches is not None:
            self._fetches.start(group, match)
        if group.pending_fetch is None and not group.wants(group.leader):
            self._running.fork_pending(group)

    def _match_with_room(self, group: SequenceGroup) -> PrefixMatch | None:
        """Return the cached prefix of a group if there is room for the group; else None."""
        if self._room() <= group.refused_room or self._resources.first_lacking(group, None):
            return None
        leader = group.leader
        leader.update_window()
        # At least one token must be left to compute, and a leader must not pass the point where its siblings fork.
        match = self.match(group, leader, min(group.target(leader), len(leader.window) - 1))
        if self._resources.first_lacking(group, match):
            group.refused_room = self._room()
            return None
        return match

    def _room(self) -> int:
        """Return how many blocks of all kinds a new group could get."""
        return sum(pool.free() for pool in self._pools)

    def match(self, group: SequenceGroup, sequence: Sequence, limit: int) -> PrefixMatch:
        """Find the cached prefix of a sequence's window, up to `limit` tokens."""
        if not group.state.may_reuse_prefix:
            return self._cache.miss()
        return self._cache.match(sequence.window, sequence.chain, limit)

    def _next_hash(self, group: SequenceGroup, match: PrefixMatch) -> bytes | None:
        """Return the hash of the first block that a group would compute; None if it can't come from the cache."""
        if not group.state.may_reuse_prefix:
            return None
        index = match.num_tokens // self._cache.block_size
        return next(iter(group.leader.chain.hashes[index : index + 1]), None)

    def _find_hashes_in_flight(self) -> set[bytes]:
        """Return the known hashes of the full blocks that steps in flight compute."""
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
            counters.wait_s += WAIT_WEIGHT * (state.queue_s - counters.wait_s)
            state.num_cached_tokens = group.leader.computed
            counters.prompt_tokens += group.leader.prompt_len


# ── resources that groups hold ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Resource:
    """A limited resource that a group holds from its admission until it ends or is preempted."""

    name: str
    free: Callable[[], int]  # how much a new group could get now
    returning: Callable[[], int]  # how much is free once the steps in flight are applied: held for ended sequences
    needed: Callable[[SequenceGroup, PrefixMatch | None], int]  # to admit a group; None: a lower bound, without a match
    held: Callable[[SequenceGroup], int]  # how much preempting a running group frees


class Resources:
    """All resources that running groups hold."""

    def __init__(self, resources: Seq[Resource]) -> None:
        self._resources = tuple(resources)

    def first_lacking(self, group: SequenceGroup, match: PrefixMatch | None) -> Resource | None:
        """Return the first resource that is too scarce to admit a group; None if there is none."""
        return next((one for one in self._resources if one.needed(group, match) > one.free()), None)

    def would_suffice(self, group: SequenceGroup, match: PrefixMatch, victims: Seq[SequenceGroup]) -> bool:
        """Tell whether a group could be admitted once these groups are preempted and the steps in flight applied."""
        return all(
            one.needed(group, match) <= one.free() + one.returning() + sum(map(one.held, victims))
            for one in self._resources
        )


def rows_resource(running: RunningSet) -> Resource:
    return Resource(
        "rows",
        free=lambda: running.row_allocator.num_free,
        returning=lambda: len(running.in_flight.releases),
        needed=lambda group, _: group.num_rows,
        held=lambda group: group.num_rows,
    )


def tenant_resource(running: RunningSet) -> Resource:
    """Return the resource that limits how many sequences a tenant runs at a time. None of it is ever free or freed by
    preempting other tenants: a group needs as much as it would exceed the limit by."""

    def needed(group: SequenceGroup, _: PrefixMatch | None) -> int:
        limit = group.state.account.tenant.max_sequences
        if limit is None:
            return 0
        return max(0, running.num_rows_of(group.state.account) + group.num_rows - limit)

    return Resource("sequences of its tenant", free=lambda: 0, returning=lambda: 0, needed=needed, held=lambda group: 0)


def step_time_resource(promises: Promises, running: RunningSet) -> Resource:
    """Return the resource that limits how many sequences run, for an objective for the time per output token."""
    return Resource(
        "time of a step",
        free=promises.rows_left,
        returning=lambda: 0,
        needed=lambda group, _: group.num_rows if len(running) else 0,
        held=lambda group: group.num_rows,
    )


def adapters_resource(running: RunningSet) -> Resource:
    """Return the resource of adapter slots; groups with the same adapter share one."""
    return Resource(
        "adapter slots",
        free=running.adapters.num_free,
        returning=lambda: 0,
        needed=lambda group, _: running.adapters.num_needed(group.state.request.adapter),
        held=lambda group: running.adapters.num_held(group.state.request.adapter),
    )


def pool_resource(cache: KVCache, running: RunningSet, chunk: int, region: int) -> Resource:
    """Return the resource of a region's blocks (KV blocks, cells, state slots): those for all tokens of a group's
    leader, while one block is reserved for each running sequence and cache group to grow into."""
    num_groups = cache.num_groups(region)

    def needed(group: SequenceGroup, match: PrefixMatch | None) -> int:
        if match is None:
            return 0
        return cache.blocks_to_open(len(group.leader.window), chunk, match, region)

    return Resource(
        cache.region_name(region),
        free=lambda: cache.pool.free_in(region) - running.num_growing(region) * num_groups,
        returning=lambda: sum(cache.num_held(holding.table, region) for holding in running.in_flight.releases),
        needed=needed,
        held=lambda group: sum(
            cache.num_held(member.held_table, region) + num_groups
            for member in group.members
            if cache.grows_in(member.held_table, region)
        ),
    )
