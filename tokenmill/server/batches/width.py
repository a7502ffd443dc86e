"""The number of batch lines that run concurrently on an engine: the capacity that interactive requests leave free.

    no interactive requests            more lines than the engine has rows, so that no row is ever idle
    interactive requests are running   a quarter of the free rows
    interactive requests are waiting   no new lines; running ones continue at a lower priority

The number of interactive requests is checked 20 times a second. A batch starts with a quarter of the rows, and gets all
of them after `QUIET_S` without interactive requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_S = 0.05
QUIET_S = 2.0
DEFAULT_ROWS = 8  # for an engine with an unknown number of rows


class BatchWidth:
    """A semaphore with a variable limit, which limits the batch lines on one engine; granted in order of arrival."""

    def __init__(self, max_running: int) -> None:
        self._num_rows = max_running or DEFAULT_ROWS
        self._limit = max(1, self._num_rows // 4)
        self._others_seen = time.monotonic()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_running = 0

    async def enter(self) -> None:
        """Wait until another line may run."""
        if self.num_running < self._limit and not self._waiting:
            self.num_running += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.leave()  # it was granted at the same moment
            raise

    def leave(self) -> None:
        self.num_running -= 1
        self._admit()

    def adapt(self, num_others: int, num_waiting: int) -> None:
        """Set the limit. `num_others`: interactive requests; `num_waiting`: those of them without a first token."""
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
        while self._waiting and self.num_running < self._limit:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                self.num_running += 1
