"""The floor: gangs that run, in the order in which they are served, with their rows and blocks.

The order is total (priority, arrival, index), and whoever is short of blocks takes them from the end of it. So the
first gang always advances: nothing deadlocks, nothing starves, and what was planned in a step is never taken back,
because victims come after everyone already served.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from tokenmill.kv.cache import Hit, KVCache
from tokenmill.scheduler.beam import Branch
from tokenmill.scheduler.early import EarlyRows
from tokenmill.scheduler.job import Gang
from tokenmill.scheduler.seats import Seats
from tokenmill.scheduler.sequence import Sequence


class Floor:
    def __init__(self, cache: KVCache, num_rows: int, lookahead_tokens: int = 0) -> None:
        """`lookahead_tokens`: room beyond what is planned, where there is some, for a runner that works ahead."""
        self._cache = cache
        self._lookahead_tokens = lookahead_tokens
        self.seats = Seats(num_rows)
        self.gangs: list[Gang] = []
        self.early = EarlyRows()

    def __len__(self) -> int:
        return len(self.gangs)

    @property
    def num_sequences(self) -> int:
        return sum(len(gang.members) for gang in self.gangs)

    # ── coming and going ───────────────────────────────────────────────────────────────────────────────

    def enter(self, gang: Gang, hit: Hit) -> None:
        """The leader opens its table on what is cached already; rows are taken for all who will run."""
        leader = gang.leader
        leader.table = self._cache.open(hit)
        leader.computed = hit.num_tokens
        leader.row = self.seats.take()
        gang.spare_rows = [self.seats.take() for _ in range(gang.num_rows - 1)]
        insort(self.gangs, gang, key=_key)
        gang.is_running = True

    def reopen(self, sequence: Sequence, hit: Hit) -> None:
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

    def preempt(self, gang: Gang) -> None:
        """Rows and blocks go back; tokens stay, and will be computed again."""
        self.dismiss(gang)
        for sequence in gang.members:
            sequence.computed = 0
        gang.fold()

    def dismiss(self, gang: Gang) -> None:
        self.early.drop(gang)
        for sequence in gang.members:
            self._vacate(sequence)
            self.seats.give_back(sequence.row)
        for row in gang.spare_rows:
            self.seats.give_back(row)
        gang.spare_rows = []
        del self.gangs[bisect_left(self.gangs, gang.key, key=_key)]
        gang.is_running = False

    def drop_sibling(self, gang: Gang, sequence: Sequence) -> None:
        """One of several samples that still share a leader goes; if it is the leader, the next takes its place."""
        if sequence is gang.leader:
            self._seat_on(gang.unborn[0], sequence, gang)
            self._vacate(sequence)
            gang.members.append(gang.unborn.pop(0))
            self.seats.give_back(sequence.row)
        else:
            self.seats.give_back(gang.spare_rows.pop())
        gang.forget(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self._cache.release(sequence.held_table)
        sequence.table = None
        self._unseat(sequence)

    def _unseat(self, sequence: Sequence) -> None:
        if sequence.is_seated:
            self.seats.note_left(sequence.row)
            sequence.is_seated = False

    # ── forking ────────────────────────────────────────────────────────────────────────────────────────

    def bear(self, gang: Gang) -> None:
        """The prompt is there: the unborn fork from the leader. Beams stay together, samples part."""
        leader, unborn, gang.unborn = gang.leader, gang.unborn, []
        for sequence in unborn:
            self._seat_on(sequence, leader, gang)
        if gang.job.request.params.beam:
            gang.members += unborn
            return
        gang.num_rows = 1
        for sequence in unborn:
            sibling = Gang(gang.job, [sequence], [], 1)
            sibling.is_running = True
            insort(self.gangs, sibling, key=_key)

    def branch(self, gang: Gang, chosen: list[tuple[Branch, bool]]) -> None:
        """Beams move on: chosen parents continue or fork, the others make room for the forks."""
        parents = {branch.parent for branch, _ in chosen}
        for sequence in gang.members:
            if sequence not in parents:
                self._vacate(sequence)
                sequence.is_finished = True
                gang.spare_rows.append(sequence.row)
        gang.members = self._grown(gang, chosen)

    def _grown(self, gang: Gang, chosen: list[tuple[Branch, bool]]) -> list[Sequence]:
        keep_logprobs = gang.job.request.params.logprobs is not None
        continuing: dict[Sequence, tuple[Branch, bool]] = {}
        beams = []
        for branch, was_drawn in chosen:
            if branch.parent not in continuing:
                continuing[branch.parent] = branch, was_drawn
                continue
            fork = branch.parent.fork()
            self._seat_on(fork, branch.parent, gang)
            branch.grow(fork, keep_logprobs=keep_logprobs)
            beams.append(fork)
        for parent, (branch, was_drawn) in continuing.items():
            branch.grow(parent, keep_logprobs=keep_logprobs)
            if not was_drawn:
                self._reseat(parent)
        return [*continuing, *beams]

    def _seat_on(self, sequence: Sequence, parent: Sequence, gang: Gang) -> None:
        sequence.table = self._cache.fork(parent.held_table)
        sequence.join(parent)
        sequence.row = gang.spare_rows.pop()
        sequence.gang = gang

    def _reseat(self, sequence: Sequence) -> None:
        """The runner remembers the token it drew; here another was chosen, so the row starts afresh."""
        self._unseat(sequence)
        sequence.held_table.tell_all()


def _key(gang: Gang) -> tuple[int, int, int]:
    return gang.key
