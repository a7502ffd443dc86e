"""The number of batch lines that an engine runs at once: what interactive requests leave free.

    no other requests           more than the engine computes together, so that no row is ever idle
    others are being answered   a quarter of the rows that they leave
    others wait                 none is begun; those under way go on, behind the others (`priority`)

The requests under way are looked at some twenty times a second. A batch begins with a quarter of the rows, and gets all
of them once there were no other requests for a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_S = 0.05
QUIET_S = 2.0
LEAST_ROWS = 8  # of an engine that does not say how many it has


class BatchWidth:
    """Places for lines of batches in one engine, given out in the order in which they are asked for."""

    def __init__(self, max_running: int) -> None:
        self._num_rows = max_running or LEAST_ROWS
        self._limit = max(1, self._num_rows // 4)
        self._others_seen = time.monotonic()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_under_way = 0

    async def enter(self) -> None:
        """Wait for a place."""
        if self.num_under_way < self._limit and not self._waiting:
            self.num_under_way += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # it was given in the same moment
            raise

    def leave(self) -> None:
        self.num_under_way -= 1
        self._admit()

    def adapt(self, num_others: int, num_waiting: int) -> None:
        """Set the limit by how many interactive requests there are, and how many of them wait for their first token."""
        now = time.monotonic()
        if num_others:
            self._others_seen = now
        if num_waiting:
            self._limit = 0
        elif now - self._others_seen < QUIET_S:
            self._limit = max(1, max(0, self._num_rows - num_others) // 4)
        else:
            self._limit = self._num_rows + max(2, self._num_rows // 4)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.num_under_way < self._limit:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self.num_under_way += 1
