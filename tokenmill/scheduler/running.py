"""The floor: gangs that run, in the order in which they are served, with their rows and blocks.

The order is total (priority, arrival, index), and whoever is short of blocks takes them from the end of it. So the
first gang always advances: nothing deadlocks, nothing starves, and what was planned in a step is never taken back,
because victims come after everyone already served.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from tokenmill.kv.cache import KVCache, PrefixMatch
from tokenmill.scheduler.beam import Branch
from tokenmill.scheduler.prefetched_rows import PrefetchedRows
from tokenmill.scheduler.request_state import SequenceGroup
from tokenmill.scheduler.row_allocator import RowAllocator
from tokenmill.scheduler.sequence import Sequence


class RunningSet:
    def __init__(self, cache: KVCache, num_rows: int, lookahead_tokens: int = 0) -> None:
        """`lookahead_tokens`: room beyond what is planned, where there is some, for a runner that works ahead."""
        self._cache = cache
        self._lookahead_tokens = lookahead_tokens
        self.row_allocator = RowAllocator(num_rows)
        self.groups: list[SequenceGroup] = []
        self.prefetched = PrefetchedRows()

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_sequences(self) -> int:
        return sum(len(group.members) for group in self.groups)

    # ── coming and going ───────────────────────────────────────────────────────────────────────────────

    def enter(self, group: SequenceGroup, hit: PrefixMatch) -> None:
        """The leader opens its table on what is cached already; rows are taken for all who will run."""
        leader = group.leader
        leader.table = self._cache.open(hit)
        leader.computed = hit.num_tokens
        leader.row = self.row_allocator.take()
        group.spare_rows = [self.row_allocator.take() for _ in range(group.num_rows - 1)]
        insort(self.groups, group, key=_key)
        group.is_running = True

    def reopen(self, sequence: Sequence, hit: PrefixMatch) -> None:
        """Its window is another one now: other blocks, on the same row."""
        self._cache.release(sequence.held_table)
        sequence.table = self._cache.open(hit)
        sequence.computed = hit.num_tokens

    def look_ahead(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """Blocks for the tokens behind `end`, as far as there are some; copies to make."""
        size, last = self._cache.block_size, end + self._lookahead_tokens - 1
        if last // size == (end - 1) // size:  # within the block that was just made sure of
            return []
        return self._cache.reserve(sequence.held_table, end, end + self._lookahead_tokens) or []

    def preempt(self, group: SequenceGroup) -> None:
        """Rows and blocks go back; tokens stay, and will be computed again."""
        self.remove(group)
        for sequence in group.members:
            sequence.computed = 0
        group.fold()

    def remove(self, group: SequenceGroup) -> None:
        self.prefetched.drop(group)
        for sequence in group.members:
            self._release(sequence)
            self.row_allocator.give_back(sequence.row)
        for row in group.spare_rows:
            self.row_allocator.give_back(row)
        group.spare_rows = []
        del self.groups[bisect_left(self.groups, group.key, key=_key)]
        group.is_running = False

    def drop_sibling(self, group: SequenceGroup, sequence: Sequence) -> None:
        """One of several samples that still share a leader goes; if it is the leader, the next takes its place."""
        if sequence is group.leader:
            self._seat_on(group.pending_forks[0], sequence, group)
            self._release(sequence)
            group.members.append(group.pending_forks.pop(0))
            self.row_allocator.give_back(sequence.row)
        else:
            self.row_allocator.give_back(group.spare_rows.pop())
        group.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._cache.release(sequence.held_table)
        sequence.table = None
        self._unseat(sequence)

    def _unseat(self, sequence: Sequence) -> None:
        if sequence.is_on_runner:
            self.row_allocator.mark_released(sequence.row)
            sequence.is_on_runner = False

    # ── forking ────────────────────────────────────────────────────────────────────────────────────────

    def fork_pending(self, group: SequenceGroup) -> None:
        """The prompt is there: the unborn fork from the leader. Beams stay together, samples part."""
        leader, pending_forks, group.pending_forks = group.leader, group.pending_forks, []
        for sequence in pending_forks:
            self._seat_on(sequence, leader, group)
        if group.state.request.params.beam:
            group.members += pending_forks
            return
        group.num_rows = 1
        for sequence in pending_forks:
            sibling = SequenceGroup(group.state, [sequence], [], 1)
            sibling.is_running = True
            insort(self.groups, sibling, key=_key)

    def branch(self, group: SequenceGroup, chosen: list[tuple[Branch, bool]]) -> None:
        """Beams move on: chosen parents continue or fork, the others make room for the forks."""
        parents = {branch.parent for branch, _ in chosen}
        for sequence in group.members:
            if sequence not in parents:
                self._release(sequence)
                sequence.is_finished = True
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
            self._seat_on(fork, branch.parent, group)
            branch.grow(fork, keep_logprobs=keep_logprobs)
            beams.append(fork)
        for parent, (branch, was_drawn) in continuing.items():
            branch.grow(parent, keep_logprobs=keep_logprobs)
            if not was_drawn:
                self._reseat(parent)
        return [*continuing, *beams]

    def _seat_on(self, sequence: Sequence, parent: Sequence, group: SequenceGroup) -> None:
        sequence.table = self._cache.fork(parent.held_table)
        sequence.join(parent)
        sequence.row = group.spare_rows.pop()
        sequence.group = group

    def _reseat(self, sequence: Sequence) -> None:
        """The runner remembers the token it drew; here another was chosen, so the row starts afresh."""
        self._unseat(sequence)
        sequence.held_table.resend_all()


def _key(group: SequenceGroup) -> tuple[int, int, int]:
    return group.key
