"""Who waits: smaller priority numbers first, then first come, first served.

A preempted gang keeps its place in that order, so it returns before everything that came later. Leaving the queue
early is lazy: the entry is marked and dropped when it surfaces, so nothing is ever searched.
"""

from __future__ import annotations

import heapq

from tokenmill.scheduler.request_state import SequenceGroup

Key = tuple[int, int, int]


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[Key, SequenceGroup]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

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
        """`gang` waits no longer; its owner has marked it gone."""
        assert group.is_gone
        self._num_live -= 1
