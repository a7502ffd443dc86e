"""Rows that are gathered on the event loop and written by a thread, twice a second, so that no request waits for a
disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenmill.errors import TokenmillError
from tokenmill.observe.log import get_log

log = get_log("server")
Row = TypeVar("Row")
PERIOD_S = 0.5


class WriteBehind(Generic[Row]):
    """Gathers rows, and writes them in order. What can't be written is tried again with the next ones; beyond `most`
    rows the newest are dropped."""

    def __init__(self, what: str, write: Callable[[list[Row]], None], most: int = 10_000) -> None:
        """`what`: rows are called so in the log. `write` is called in a thread; it raises OSError or TokenmillError."""
        self._what = what
        self._write = write
        self._most = most
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        if len(self._rows) < self._most:
            self._rows.append(row)

    async def flush(self) -> None:
        """Write all rows that have come."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            await asyncio.to_thread(self._write, rows)
        except (OSError, TokenmillError) as problem:
            log.error("%d %s could not be written yet: %s", len(rows), self._what, problem)
            self._rows = rows + self._rows

    async def run(self, before: Callable[[], None] = lambda: None) -> None:
        """Write now and then, for ever. `before`: done before each time."""
        while True:
            await asyncio.sleep(PERIOD_S)
            before()
            await self.flush()
