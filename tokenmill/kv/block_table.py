"""A block table: where the tokens of one sequence lie, per KV group.

Entry i of a group holds tokens [i * block_size, (i + 1) * block_size). The runner keeps its own copy of every table;
it hears about changes only. A table that the runner has not seen yet (new, forked, back from preemption) is sent whole.
"""

from __future__ import annotations

from tokenmill.kv.pool import NULL_BLOCK
from tokenmill.types import BlockTableUpdate


class BlockTable:
    __slots__ = ("_pending", "groups", "live_from", "num_registered")

    def __init__(self, groups: list[list[int]], live_from: list[int], num_registered: int = 0) -> None:
        self.groups = groups  # block ids, one list a group; NULL_BLOCK where the window has passed
        self.live_from = live_from  # per group: entries before this one are null
        self.num_registered = num_registered  # leading entries already offered to the prefix cache
        self._pending: list[BlockTableUpdate] | None = None  # None: the runner knows nothing of this table

    def append(self, group: int, blocks: list[int]) -> None:
        self._note(group, len(self.groups[group]), blocks)
        self.groups[group].extend(blocks)

    def replace(self, group: int, index: int, block: int) -> None:
        self.groups[group][index] = block
        self._note(group, index, [block])

    def drop_before(self, group: int, end: int) -> list[int]:
        """Entries before `end` become null; returns the blocks that stood there."""
        start = self.live_from[group]
        dropped = self.groups[group][start:end]
        nulls = [NULL_BLOCK] * len(dropped)
        self.groups[group][start:end] = nulls
        self._note(group, start, nulls)
        self.live_from[group] = end
        return dropped

    def resend_all(self) -> None:
        """The runner forgot this table: the next updates carry all of it."""
        self._pending = None

    def updates(self) -> list[BlockTableUpdate]:
        """What the runner has not been told yet; telling it is the caller's promise."""
        untold, self._pending = self._pending, []
        if untold is None:
            return [BlockTableUpdate(group, 0, list(blocks)) for group, blocks in enumerate(self.groups) if blocks]
        return untold

    @property
    def num_held(self) -> int:
        return sum(len(blocks) - first for blocks, first in zip(self.groups, self.live_from, strict=True))

    def _note(self, group: int, start: int, blocks: list[int]) -> None:
        if self._pending is not None:
            self._pending.append(BlockTableUpdate(group, start, list(blocks)))
