"""A buffer of rows that a thread writes twice a second, so that no request waits for the disk."""

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
    """Buffers rows and writes them in order. If writing fails, the rows are tried again with the next ones; beyond
    `max_rows` new rows are dropped."""

    def __init__(self, what: str, write: Callable[[list[Row]], None], max_rows: int = 10_000) -> None:
        """`what`: what the rows are, for log lines. `write`: called in a thread; may raise OSError or
        TokenmillError."""
        self._what = what
        self._write = write
        self._max_rows = max_rows
        self._rows: list[Row] = []
        self._newest_write: asyncio.Task[None] | None = None

    def add(self, row: Row) -> None:
        if len(self._rows) < self._max_rows:
            self._rows.append(row)

    async def flush(self) -> None:
        """Write all buffered rows. Cancelling the caller, as `close` of a service does with `run`, neither loses rows
        nor lets two writes run at the same time: the write continues, and the next one waits for it."""
        self._newest_write = asyncio.create_task(self._write_after(self._newest_write))
        await asyncio.shield(self._newest_write)

    async def _write_after(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None and not earlier.done():
            await asyncio.wait({earlier})
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            await asyncio.to_thread(self._write, rows)
        except (OSError, TokenmillError) as problem:
            log.error("%d %s could not be written and will be tried again: %s", len(rows), self._what, problem)
            self._rows = rows + self._rows

    async def run(self, before: Callable[[], None] = lambda: None) -> None:
        """Write periodically until cancelled. `before`: called before each write."""
        while True:
            await asyncio.sleep(PERIOD_S)
            before()
            await self.flush()
