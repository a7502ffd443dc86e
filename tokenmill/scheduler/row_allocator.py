"""Permanent rows: a live sequence keeps one row of the runner's state until it is freed or preempted.

The runner hears of freed rows with the next plan, and only of rows it was told about.
"""

from __future__ import annotations

import heapq


class RowAllocator:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))  # a heap: low rows first keeps the runner's batch dense
        self._left: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self.num_rows - len(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        heapq.heappush(self._free, row)

    def mark_released(self, row: int) -> None:
        """The runner must forget the row's present occupant."""
        self._left.append(row)

    def pop_released(self) -> list[int]:
        """Rows that were left since the last call."""
        left, self._left = self._left, []
        return left
