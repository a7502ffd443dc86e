"""The running groups, in the order in which they are planned, with their rows, blocks and adapter slots.

Here are also the steps in flight: plans that were returned to the engine and not applied yet.

The order is total (priority, arrival, index), and a sequence that is short of blocks preempts groups from its end. So
the first group always advances: there is no deadlock and no starvation, and nothing planned in a step is revoked,
because victims come after all groups already planned.

When a step is applied, a row counts only if its sequence is still in the same epoch (`Sequence.epoch`): it may have
ended, been aborted or been preempted while the device was computing. The row and the blocks of such a sequence may
still be written, so they are freed when the last step that uses them is applied, never earlier:

    launched:   step 7 [ A B C ]   step 8 [ A B C D ]        A ends with the token of step 7
    releases:                      step 8: A's row, A's blocks

Adapters occupy slots of the runner and stay there when their last group ends, for the next request that uses them. An
adapter used by a running group is never evicted: a group whose adapter finds no slot waits, as for rows and blocks.
The next plan tells the runner about new adapters.

    slots:  [ unused | idle, least recently used | ... | idle, most recently used | used by running groups ]
              ▲ a new adapter gets an unused slot, otherwise the least recently used idle one
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

from tokenmill.kv.blocks import BlockTable
from tokenmill.kv.cache import KVCache, PrefixMatch
from tokenmill.scheduler.beam import Branch
from tokenmill.scheduler.plan_builder import Planned
from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.scheduler.tenants import TenantAccount
from tokenmill.types import BACKGROUND_PRIORITY, StepPlan

# ── what running groups hold ────────────────────────────────────────────────────────────────────────────


class RowAllocator:
    """Allocates rows of the runner's state: a running sequence keeps its row until it ends or is preempted.

    The next plan reports freed rows to the runner, but only rows that it has initialised.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))  # a heap: low rows first keeps the runner's batch dense
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        return heapq.heappop(self._free)

    def free(self, row: int) -> None:
        heapq.heappush(self._free, row)

    def mark_released(self, row: int) -> None:
        """Note that the runner must drop the row's current sequence."""
        self._released.append(row)

    def pop_released(self) -> list[int]:
        """Return the rows that were released since the last call."""
        released, self._released = self._released, []
        return released


class ResidentAdapters:
    """The adapters in the runner's slots, and the number of running groups that use each."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._unused = list(range(num_slots, 0, -1))  # slots are numbered from 1: 0 is no adapter
        self._slots: OrderedDict[str, int] = OrderedDict()  # by adapter, least recently used first
        self._users: Counter[str] = Counter()  # running groups, by adapter
        self._loads: dict[int, str] = {}  # adapters to load since the last plan, by slot

    def num_free(self) -> int:
        """Return how many slots are unused or could be reused."""
        return len(self._unused) + len(self._slots) - len(self._users)

    def num_needed(self, adapter: str) -> int:
        return int(bool(adapter) and adapter not in self._slots)

    def num_held(self, adapter: str) -> int:
        """Return how many slots become free when one group less uses an adapter."""
        return int(self._users[adapter] == 1) if adapter in self._users else 0

    def acquire(self, adapter: str) -> int:
        """Return the slot of an adapter for one more running group; a free slot must exist."""
        if adapter not in self._slots:
            self._slots[adapter] = slot = self._unused.pop() if self._unused else self._evict()
            self._loads[slot] = adapter
        self._slots.move_to_end(adapter)
        self._users[adapter] += 1
        return self._slots[adapter]

    def release(self, adapter: str) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def _evict(self) -> int:
        oldest = next(adapter for adapter in self._slots if adapter not in self._users)
        return self._slots.pop(oldest)

    def pop_loads(self) -> list[tuple[int, str]]:
        """Return (slot, adapter) of the adapters that the runner has to load."""
        loads, self._loads = self._loads, {}
        return list(loads.items())

    def reload(self) -> None:
        """Load the used adapters again and drop the others: the runner may not have received the last plans."""
        for adapter, slot in list(self._slots.items()):
            if adapter in self._users:
                self._loads[slot] = adapter
            else:
                del self._slots[adapter]
                self._loads.pop(slot, None)
                self._unused.append(slot)


# ── steps in flight ────────────────────────────────────────────────────────────────────────────────────


class Holding(NamedTuple):
    """The blocks and the row of a sequence that has ended or was preempted."""

    table: BlockTable
    row: int
    is_on_runner: bool  # the next plan must report the row as freed


class StepInFlight(NamedTuple):
    plan: StepPlan
    planned: list[Planned]
    releases: list[Holding]


class StepsInFlight:
    """The plans in flight, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.next_step = 0  # the id of the next plan

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    def add(self, plan: StepPlan, planned: list[Planned]) -> None:
        assert plan.step == self.next_step
        self._steps.append(StepInFlight(plan, planned, []))
        self.next_step += 1

    def pop(self, step: int) -> StepInFlight:
        """Remove and return the oldest step, which must be this one: results arrive in the order of the plans."""
        oldest = self._steps.popleft()
        assert oldest.plan.step == step, f"a result of step {step} where step {oldest.plan.step} is the oldest"
        return oldest

    def holds(self, sequence: Sequence) -> bool:
        """Tell whether a step in flight has a row of the sequence, even a void one."""
        return sequence.last_step >= self.next_step - len(self._steps)

    def release_later(self, sequence: Sequence, holding: Holding) -> None:
        """Free a holding when the last step with a row of the sequence is applied."""
        oldest = self.next_step - len(self._steps)
        self._steps[sequence.last_step - oldest].releases.append(holding)

    @property
    def releases(self) -> list[Holding]:
        """The holdings that will be freed when the steps in flight are applied."""
        return [holding for step in self._steps for holding in step.releases]


# ── running groups ─────────────────────────────────────────────────────────────────────────────────────


class RunningSet:
    def __init__(self, cache: KVCache, num_rows: int, num_adapter_slots: int = 0) -> None:
        self._cache = cache
        self.adapters = ResidentAdapters(num_adapter_slots)
        self.row_allocator = RowAllocator(num_rows)
        self.in_flight = StepsInFlight()
        self.groups: list[SequenceGroup] = []
        self.loading: list[BlockTable] = []  # tables of blocks that are being fetched (`fetches.py`)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_sequences(self) -> int:
        return sum(len(group.members) for group in self.groups)

    def num_growing(self, region: int) -> int:
        """Return how many sequences allocate blocks from a region as they grow."""
        return sum(len(group.members) for group in self.groups if self._cache.grows_in(group.leader.held_table, region))

    def count(self, first: int, end: int) -> int:
        """Return the number of sequences in groups [first, end)."""
        return sum(len(group.members) for group in self.groups[first:end])

    def num_rows_of(self, account: TenantAccount) -> int:
        """Return the number of rows that the groups of a tenant hold."""
        return sum(group.num_rows for group in self.groups if group.state.account is account)

    @property
    def first_background(self) -> int:
        """The index of the first background group; all later groups are background too."""
        return bisect_left(self.groups, (BACKGROUND_PRIORITY, -1, -1), key=_key)

    def victim(self, group: SequenceGroup) -> SequenceGroup:
        """Return the group to preempt for a running one: of the later groups, the last one of the tenant with the
        largest counter; the group itself if there is no later one."""
        behind = self.groups[bisect_left(self.groups, group.key, key=_key) + 1 :]
        own = group.leader.held_table
        behind = [one for one in behind if self._cache.may_help(one.leader.held_table, own)]
        if not behind:
            return group
        largest = max(one.state.account.counter_s for one in behind)
        return next(one for one in reversed(behind) if one.state.account.counter_s == largest)

    # ── adding and removing ────────────────────────────────────────────────────────────────────────────

    def add(self, group: SequenceGroup, match: PrefixMatch) -> None:
        """Start a group: its leader's block table begins with the cached blocks; allocate rows for all its
        sequences."""
        leader = group.leader
        self._acquire_adapter(group)
        leader.table = self._cache.open(match, group.state.account.tenant.id)
        leader.computed = match.num_tokens
        leader.row = self.row_allocator.allocate()
        group.spare_rows = [self.row_allocator.allocate() for _ in range(group.num_rows - 1)]
        insort(self.groups, group, key=_key)
        group.is_running = True

    def _acquire_adapter(self, group: SequenceGroup) -> None:
        if adapter := group.state.request.adapter:
            group.state.adapter_slot = self.adapters.acquire(adapter)

    def reopen(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Replace the blocks of a sequence whose window has moved, or whose blocks were fetched; it keeps its row. It
        must not be in flight."""
        old = sequence.held_table
        self._cache.release(old)
        table = sequence.table = self._cache.open(match, sequence.state.account.tenant.id)
        sequence.computed = match.num_tokens
        if table.part != old.part:  # the row's initialisation tells the runner which rank has the blocks
            self._restart_row(sequence)

    def preempt(self, group: SequenceGroup) -> None:
        """Release a group's rows and blocks; it keeps its tokens, which will be recomputed."""
        self.remove(group)
        for sequence in group.members:
            sequence.computed = 0
        group.collapse()

    def remove(self, group: SequenceGroup) -> None:
        for sequence in group.members:
            self._release(sequence)
        for row in group.spare_rows:
            self.row_allocator.free(row)
        group.spare_rows = []
        del self.groups[bisect_left(self.groups, group.key, key=_key)]
        group.is_running, group.pending_fetch = False, None
        if adapter := group.state.request.adapter:
            self.adapters.release(adapter)

    def drop_sibling(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Remove one of several samples that have not forked yet; if it is the leader, the next one replaces it."""
        if sequence is group.leader:
            self._start_on(group.pending_forks[0], sequence, group)
            group.members.append(group.pending_forks.pop(0))
            self._release(sequence)
        else:
            self.row_allocator.free(group.spare_rows.pop())
        group.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks and row once no step in flight can write them."""
        holding = Holding(sequence.held_table, sequence.row, sequence.is_on_runner)
        sequence.table, sequence.is_on_runner = None, False
        sequence.void_steps()
        if self.in_flight.holds(sequence):
            self.in_flight.release_later(sequence, holding)
        else:
            self._free(holding)

    def free_releases(self, step: StepInFlight) -> None:
        """Free the rows and blocks that were held until this step was applied."""
        for holding in step.releases:
            self._free(holding)

    def _free(self, holding: Holding) -> None:
        self._cache.release(holding.table)
        if holding.is_on_runner:
            self.row_allocator.mark_released(holding.row)
        self.row_allocator.free(holding.row)

    # ── forking ────────────────────────────────────────────────────────────────────────────────────────

    def fork_pending(self, group: SequenceGroup) -> None:
        """Fork the siblings from the leader, whose prompt is computed. Beams stay in one group, samples get separate
        groups."""
        leader, pending_forks, group.pending_forks = group.leader, group.pending_forks, []
        for sequence in pending_forks:
            self._start_on(sequence, leader, group)
        if group.state.request.params.beam:
            group.members += pending_forks
            return
        group.num_rows = 1
        for sequence in pending_forks:
            sibling = SequenceGroup(group.state, [sequence], [], 1)
            sibling.is_running = True
            self._acquire_adapter(sibling)
            insort(self.groups, sibling, key=_key)

    def branch(self, group: SequenceGroup, chosen: list[tuple[Branch, bool]]) -> None:
        """Advance beams by one token: chosen parents continue or fork, the rows of the others are freed for the forks.
        No beam is in flight."""
        parents = {branch.parent for branch, _ in chosen}
        for sequence in group.members:
            if sequence not in parents:
                self._cache.release(sequence.held_table)
                self._restart_row(sequence)
                sequence.table, sequence.is_finished = None, True
                group.spare_rows.append(sequence.row)
        group.members = self._grown(group, chosen)

    def _grown(self, group: SequenceGroup, chosen: list[tuple[Branch, bool]]) -> list[Sequence]:
        keep_logprobs = group.state.request.params.logprobs is not None
        continuing: dict[Sequence, tuple[Branch, bool]] = {}
        beams = []
        for branch, was_drawn in chosen:
            if branch.parent not in continuing:
                continuing[branch.parent] = branch, was_drawn
                continue
            fork = branch.parent.fork()
            self._start_on(fork, branch.parent, group)
            branch.grow(fork, keep_logprobs=keep_logprobs)
            beams.append(fork)
        for parent, (branch, was_drawn) in continuing.items():
            branch.grow(parent, keep_logprobs=keep_logprobs)
            if not was_drawn:  # the runner's row has another token than the chosen one
                self._restart_row(parent)
                parent.held_table.resend_all()
        return [*continuing, *beams]

    def _start_on(self, sequence: Sequence, parent: Sequence, group: SequenceGroup) -> None:
        """Start a sequence with its parent's blocks and a spare row of its group."""
        sequence.table = self._cache.fork(parent.held_table)
        sequence.adopt_prefix(parent)
        sequence.row = group.spare_rows.pop()
        sequence.group = group

    def _restart_row(self, sequence: Sequence) -> None:
        """Let the runner drop the row's sequence; the next plan initialises the row again."""
        if sequence.is_on_runner:
            self.row_allocator.mark_released(sequence.row)
            sequence.is_on_runner = False


def _key(group: SequenceGroup) -> tuple[int, int, int]:
    return group.key
