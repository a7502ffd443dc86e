"""Stamped now, read a little later.

When a thousand streams speak in the same moment, reading the first one's bytes makes the others late: not in truth,
only on our clock. So what arrives is stamped and put here, and read in slices between two looks at the sockets:

    sockets ─► stamp, put ─► sockets ─► stamp, put ─► ...
                      └─► read for a fraction of a millisecond ─┘

Order is kept, for all connections together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_S = 0.0002

Take = Callable[[bytes | None, float], None]  # bytes, or None at the end of the connection; and when they came


class Inbox:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Take, bytes | None, float]] = deque()
        self._is_reading = False

    def put(self, take: Take, data: bytes | None, at: float) -> None:
        self._waiting.append((take, data, at))
        if not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        waiting, clock = self._waiting, time.perf_counter
        until = clock() + SLICE_S
        while waiting:
            take, data, at = waiting.popleft()
            take(data, at)
            if clock() > until:
                self._loop.call_soon(self._read)
                return
        self._is_reading = False
