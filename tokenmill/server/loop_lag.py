"""Measures the lag of the event loop: a timer fires late while something blocks the loop.

All streams of the server wait equally long, so this metric is the first to check when tokens arrive in bursts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.25


class LoopLag:
    """Measures the lag of the event loop four times a second, as a service of the server."""

    def __init__(self, note: Callable[[float], None], period_s: float = PERIOD_S) -> None:
        self._note = note
        self._period_s = period_s
        self._measuring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._measuring = asyncio.create_task(self._measure())

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._period_s
            await asyncio.sleep(self._period_s)
            self._note(max(0.0, loop.time() - due_s))
