"""Rows that a thread writes later: cancelling the writer at a bad moment loses none and writes none twice."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokenmill.server import write_behind
from tokenmill.server.write_behind import WriteBehind


def test_rows_of_a_write_that_was_cancelled_before_a_thread_was_free_are_written() -> None:
    written: list[int] = []

    async def work() -> None:
        executor, gate = ThreadPoolExecutor(1), threading.Event()
        asyncio.get_running_loop().set_default_executor(executor)
        busy = asyncio.create_task(asyncio.to_thread(gate.wait))
        rows = WriteBehind[int]("rows", written.extend)
        rows.add(1)
        cancelled = asyncio.create_task(rows.flush())
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        rows.add(2)
        gate.set()
        await rows.flush()
        await busy

    asyncio.run(work())
    assert written == [1, 2]


def test_two_writes_never_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "PERIOD_S", 0.001)
    written: list[int] = []
    is_writing, gate = threading.Event(), threading.Event()

    def write(rows: list[int]) -> None:
        assert not is_writing.is_set() or gate.is_set()
        is_writing.set()
        assert gate.wait(30)
        written.extend(rows)

    async def work() -> None:
        rows = WriteBehind[int]("rows", write)
        rows.add(1)
        running = asyncio.create_task(rows.run())
        await asyncio.to_thread(is_writing.wait, 30)
        running.cancel()  # as a service does when it closes, while a write runs
        rows.add(2)
        closing = asyncio.create_task(rows.flush())
        await asyncio.sleep(0.01)
        gate.set()
        await closing

    asyncio.run(work())
    assert written == [1, 2]


def test_rows_that_could_not_be_written_are_written_with_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    written: list[int] = []
    problems = iter([OSError("no space left on device"), None])

    def write(rows: list[int]) -> None:
        if (problem := next(problems)) is not None:
            raise problem
        written.extend(rows)

    async def work() -> None:
        rows = WriteBehind[int]("rows", write)
        rows.add(1)
        await rows.flush()
        rows.add(2)
        await rows.flush()

    asyncio.run(work())
    assert written == [1, 2]
    assert "1 rows could not be written and will be tried again: no space left on device" in caplog.text
