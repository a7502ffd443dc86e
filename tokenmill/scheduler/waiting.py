"""The queue of waiting groups, in the order in which they start.

    level      smallest first: the request's priority, which improves while it waits behind others
    tenant     the one with the smallest counter (`tenants.py`), or the one that started last while it is ahead of the
               others by less than a quantum
    arrival    within a tenant; within a quantum, first those with the same prefix as the group that started last, since
               its blocks are in the cache now (DLPM, arXiv 2501.14312)

With one tenant and one priority this is the order of arrival. A preempted group keeps its position in its tenant's
order.

Ageing: a group that has waited for ten seconds while groups of smaller level waited moves to a smaller level: halfway
to 0, below 0 in doubling steps, until it has the smallest level. So no number of more urgent requests makes it wait
forever, and it runs at the level it has reached. Background requests do not age.

While a plan is made, groups without room may be passed over: the next ones are considered instead, until `recall`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from itertools import count, islice

from tokenmill.scheduler.request import SequenceGroup
from tokenmill.scheduler.tenants import QUANTUM_S, TenantAccount, Tenants
from tokenmill.types import BACKGROUND_PRIORITY

AGEING_S = 10.0
AGEING_CHECK_S = 1.0
MAX_PREFIX_SEARCH = 16  # groups of a tenant among which one with a cached prefix is searched


class TenantQueue:
    """The waiting groups of one tenant, ordered by level and arrival."""

    __slots__ = ("account", "groups", "listed", "num_passed", "prefix")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self.groups: list[SequenceGroup] = []
        self.num_passed = 0  # how many of the first groups are passed over in the current plan
        self.listed: tuple[int, float] | None = None  # its valid entry in the heap of tenants
        self.prefix: bytes | None = None  # hash of the first block of the group that started last

    @property
    def first(self) -> SequenceGroup | None:
        return self.groups[self.num_passed] if self.num_passed < len(self.groups) else None

    def first_with_same_prefix(self, level: int) -> SequenceGroup | None:
        """Return the first of the next groups that has the same first block as the one that started last."""
        near = islice(self.groups, self.num_passed, self.num_passed + MAX_PREFIX_SEARCH)
        same = (group for group in near if group.key[0] == level and first_hash(group) == self.prefix)
        return None if self.prefix is None else next(same, None)

    def insert(self, group: SequenceGroup) -> None:
        insort(self.groups, group, key=_key)

    def remove(self, group: SequenceGroup) -> None:
        index = bisect_left(self.groups, group.key, key=_key)
        assert self.groups[index] is group, "a waiting group is in its tenant's queue"
        del self.groups[index]
        if index < self.num_passed:
            self.num_passed -= 1


class WaitingQueue:
    def __init__(self, tenants: Tenants, clock: Callable[[], float]) -> None:
        self._tenants = tenants
        self._clock = clock
        self._num_waiting = 0
        self._levels: Counter[int] = Counter()
        self._queues: dict[TenantAccount, TenantQueue] = {}
        self._order: list[tuple[int, float, int, TenantQueue]] = []  # a heap: level, counter, serial number
        self._serials = count()
        self._passed: list[TenantQueue] = []
        self._last_started: TenantQueue | None = None
        self._aged_s = float("-inf")  # when groups were last aged

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def groups(self) -> list[SequenceGroup]:
        """Return all waiting groups, in no particular order."""
        return [group for queue in self._queues.values() for group in queue.groups]

    # ── adding and removing ────────────────────────────────────────────────────────────────────────────

    def push(self, group: SequenceGroup) -> None:
        account = group.state.account
        queue = self._queues.get(account)
        if queue is None:
            queue = self._queues[account] = TenantQueue(account)
            self._tenants.lift(account)
        group.waiting_since_s = self._clock()
        queue.insert(group)
        self._count(group, 1)
        self._list(queue)

    def remove(self, group: SequenceGroup) -> TenantQueue:
        """Remove a group that starts or has ended."""
        queue = self._queues[group.state.account]
        queue.remove(group)
        self._count(group, -1)
        if not queue.groups:
            del self._queues[queue.account]
            queue.listed = None
        return queue

    def _count(self, group: SequenceGroup, change: int) -> None:
        self._num_waiting += change
        level = group.key[0]
        self._levels[level] += change
        if not self._levels[level]:
            del self._levels[level]

    def start(self, group: SequenceGroup) -> None:
        """Remove a group that starts to run."""
        queue = self.remove(group)
        if self._tenants.is_contended:
            self._tenants.note_start(queue.account)
            self._last_started, queue.prefix = queue, first_hash(group)

    # ── the order ──────────────────────────────────────────────────────────────────────────────────────

    def first(self, *, keeps_quantum: bool = True) -> SequenceGroup | None:
        """Return the next group to start of those that were not passed over. `keeps_quantum`: whether the tenant that
        started last is preferred within its quantum."""
        if len(self._levels) > 1 and not self._passed:
            self._age()
        while self._order:
            level, counter_s, _, queue = self._order[0]
            group = queue.first
            if group is not None and queue.listed == (level, counter_s) == (group.key[0], queue.account.counter_s):
                return (self._within_quantum(level, counter_s) if keeps_quantum else None) or group
            heapq.heappop(self._order)
            if queue.listed == (level, counter_s):
                queue.listed = None
                self._list(queue)
        return None

    def _list(self, queue: TenantQueue) -> None:
        """Put a tenant into the heap, unless it has an entry with the same or a smaller counter: counters only grow, so
        an outdated entry reaches the top early and is corrected then."""
        group = queue.first
        if group is None:
            return
        entry = group.key[0], queue.account.counter_s
        if queue.listed is None or entry < queue.listed:
            queue.listed = entry
            heapq.heappush(self._order, (*entry, next(self._serials), queue))

    def _within_quantum(self, level: int, counter_s: float) -> SequenceGroup | None:
        """Return the next group of the tenant that started last, if it is ahead of the others by less than a
        quantum."""
        queue = self._last_started
        if queue is None or not self._tenants.is_contended or queue.account.counter_s > counter_s + QUANTUM_S:
            return None
        own = queue.first
        if own is None or own.key[0] != level:
            return None
        return queue.first_with_same_prefix(level) or own

    # ── passing over ───────────────────────────────────────────────────────────────────────────────────

    def pass_over(self, group: SequenceGroup) -> None:
        """Skip this group until `recall`."""
        queue = self._queues[group.state.account]
        if self._last_started is queue:
            self._last_started = None
        if queue.first is group:
            queue.num_passed += 1
            self._passed.append(queue)

    def pass_tenant(self, group: SequenceGroup) -> None:
        """Skip all groups of this group's tenant until `recall`."""
        queue = self._queues[group.state.account]
        queue.num_passed = len(queue.groups)
        self._passed.append(queue)

    def recall(self) -> None:
        """Consider all groups again."""
        for queue in self._passed:
            queue.num_passed = 0
            self._list(queue)
        self._passed.clear()

    # ── ageing ─────────────────────────────────────────────────────────────────────────────────────────

    def _age(self) -> None:
        """Lower the levels of groups that have waited behind others for `AGEING_S`."""
        now_s = self._clock()
        if now_s - self._aged_s < AGEING_CHECK_S:
            return
        self._aged_s = now_s
        lowest = min(self._levels)
        for queue in self._queues.values():
            for group in [one for one in queue.groups if _may_age(one, lowest, now_s)]:
                queue.remove(group)
                self._count(group, -1)
                group.set_level(max(lowest, smaller_level(group.key[0])))
                group.waiting_since_s = now_s
                queue.insert(group)
                self._count(group, 1)
            self._list(queue)


def smaller_level(level: int) -> int:
    return level // 2 if level > 0 else 2 * level - 1


def _may_age(group: SequenceGroup, lowest: int, now_s: float) -> bool:
    return lowest < group.key[0] < BACKGROUND_PRIORITY and now_s - group.waiting_since_s >= AGEING_S


def first_hash(group: SequenceGroup) -> bytes | None:
    """Return the hash of a group's first block; None if it has no block to share."""
    leader = group.leader
    return leader.chain.first(leader.window) if group.state.may_reuse_prefix else None


def _key(group: SequenceGroup) -> tuple[int, int, int]:
    return group.key
