"""The queue of waiting groups, in the order in which they start.

    level           smaller first: a request's priority, which improves while it waits behind others
    tenant          the one with the smallest counter (`tenants.py`), or the one that started last while it is ahead of
                    the others by less than a quantum
    its own order   as they came; within a quantum those that begin like the one that started last, since its blocks
                    are in the cache now (DLPM, arXiv 2501.14312)

With one tenant and one priority that is the order of arrival. A preempted group keeps its place in its tenant's order.

Ageing: a group that has waited for ten seconds while others of smaller level waited goes to a smaller level, half way
to 0, and below that in doubling steps, until it is among the first. So no number of more urgent requests keeps it
waiting for ever, and it runs at the level it has reached. Background requests do not age.

While a plan is made, groups without room may be passed over: the next ones are looked at instead, until `recall`.
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
NUM_LOOKED_AT = 16  # groups of a tenant among which one with a cached beginning is looked for


class TenantQueue:
    """The waiting groups of one tenant, in the order in which they start."""

    __slots__ = ("account", "groups", "listed", "num_passed", "prefix")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self.groups: list[SequenceGroup] = []
        self.num_passed = 0  # of the first of them: others start before them in the plan that is made now
        self.listed: tuple[int, float] | None = None  # its valid entry in the order of tenants
        self.prefix: bytes | None = None  # the first block of the group that started last

    @property
    def first(self) -> SequenceGroup | None:
        return self.groups[self.num_passed] if self.num_passed < len(self.groups) else None

    def alike(self, level: int) -> SequenceGroup | None:
        """Return one of the next groups that has the same first block as the one that started last."""
        near = islice(self.groups, self.num_passed, self.num_passed + NUM_LOOKED_AT)
        same = (group for group in near if group.key[0] == level and first_hash(group) == self.prefix)
        return None if self.prefix is None else next(same, None)

    def insert(self, group: SequenceGroup) -> None:
        insort(self.groups, group, key=_key)

    def remove(self, group: SequenceGroup) -> None:
        place = bisect_left(self.groups, group.key, key=_key)
        assert self.groups[place] is group, "a group that waits is in its tenant's queue"
        del self.groups[place]
        if place < self.num_passed:
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
        self._aged_s = float("-inf")  # when levels were last looked at

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def groups(self) -> list[SequenceGroup]:
        """Return all waiting groups, in no particular order."""
        return [group for queue in self._queues.values() for group in queue.groups]

    # ── coming and going ───────────────────────────────────────────────────────────────────────────────

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
        """Forget a group that starts, or is gone."""
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
        """Take out a group that starts to run."""
        queue = self.remove(group)
        if self._tenants.is_contended:
            self._tenants.note_start(queue.account)
            self._last_started, queue.prefix = queue, first_hash(group)

    # ── the order ──────────────────────────────────────────────────────────────────────────────────────

    def first(self, *, keeps_quantum: bool = True) -> SequenceGroup | None:
        """The next group to start, of those that were not passed over. `keeps_quantum`: False for the one of the tenant
        that was given least, in any case."""
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
        """Put a tenant into the heap, unless it has an entry there with the same or a smaller counter: counters only
        grow, so an outdated entry surfaces early and is corrected then."""
        group = queue.first
        if group is None:
            return
        entry = group.key[0], queue.account.counter_s
        if queue.listed is None or entry < queue.listed:
            queue.listed = entry
            heapq.heappush(self._order, (*entry, next(self._serials), queue))

    def _within_quantum(self, level: int, counter_s: float) -> SequenceGroup | None:
        """Return the next group of the tenant that started last, while it is ahead of the others by less than a
        quantum."""
        queue = self._last_started
        if queue is None or not self._tenants.is_contended or queue.account.counter_s > counter_s + QUANTUM_S:
            return None
        own = queue.first
        if own is None or own.key[0] != level:
            return None
        return queue.alike(level) or own

    # ── passing over ───────────────────────────────────────────────────────────────────────────────────

    def pass_over(self, group: SequenceGroup) -> None:
        """Let others be first, until `recall`."""
        queue = self._queues[group.state.account]
        if self._last_started is queue:
            self._last_started = None
        if queue.first is group:
            queue.num_passed += 1
            self._passed.append(queue)

    def pass_tenant(self, group: SequenceGroup) -> None:
        """Let other tenants be first, until `recall`."""
        queue = self._queues[group.state.account]
        queue.num_passed = len(queue.groups)
        self._passed.append(queue)

    def recall(self) -> None:
        """Look at all groups again."""
        for queue in self._passed:
            queue.num_passed = 0
            self._list(queue)
        self._passed.clear()

    # ── ageing ─────────────────────────────────────────────────────────────────────────────────────────

    def _age(self) -> None:
        """Give smaller levels to groups that have waited behind others for long."""
        now_s = self._clock()
        if now_s - self._aged_s < AGEING_CHECK_S:
            return
        self._aged_s = now_s
        least = min(self._levels)
        for queue in self._queues.values():
            for group in [one for one in queue.groups if _may_age(one, least, now_s)]:
                queue.remove(group)
                self._count(group, -1)
                group.set_level(max(least, smaller_level(group.key[0])))
                group.waiting_since_s = now_s
                queue.insert(group)
                self._count(group, 1)
            self._list(queue)


def smaller_level(level: int) -> int:
    return level // 2 if level > 0 else 2 * level - 1


def _may_age(group: SequenceGroup, least: int, now_s: float) -> bool:
    return least < group.key[0] < BACKGROUND_PRIORITY and now_s - group.waiting_since_s >= AGEING_S


def first_hash(group: SequenceGroup) -> bytes | None:
    """The hash of a group's first block; None where it has none to share."""
    leader = group.leader
    return leader.chain.first(leader.window) if group.state.may_reuse_prefix else None


def _key(group: SequenceGroup) -> tuple[int, int, int]:
    return group.key
