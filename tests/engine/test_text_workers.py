"""Long text work runs in threads: bounded, cancellable, in step with the event loop; short work runs at once."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from tokenmill.engine import text_workers
from tokenmill.engine.text_workers import LONG_CHARACTERS, TextWorkers, text_size
from tokenmill.errors import Overloaded
from tokenmill.types import ChatRequest, Message, PromptRequest, ToolCall


def test_short_work_runs_at_once_and_long_work_in_a_thread() -> None:
    async def scenario() -> tuple[int, int]:
        workers = TextWorkers()
        short = await workers.run(LONG_CHARACTERS, threading.get_ident)
        long = await workers.run(LONG_CHARACTERS + 1, threading.get_ident)
        workers.close()
        return short, long

    short, long = asyncio.run(scenario())
    assert short == threading.get_ident() != long


def test_work_in_threads_is_bounded_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "MAX_CHARACTERS", 20_000)
    may_end = threading.Event()
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        assert may_end.wait(60)
        return number

    async def scenario() -> None:
        workers = TextWorkers()
        running = [asyncio.create_task(workers.run(5_000, partial(work, number))) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workers.run(5_000, partial(work, 4))
        assert await workers.run(10, lambda: "short") == "short"
        running[3].cancel()
        await asyncio.gather(running[3], return_exceptions=True)
        late = asyncio.create_task(workers.run(5_000, partial(work, 5)))  # the cancelled one's room
        await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.gather(*running[:3], late) == [0, 1, 2, 5]
        assert await workers.run(1 << 30, partial(work, 6)) == 6, "alone, any size finds room"
        workers.close()

    asyncio.run(scenario())
    assert 4 not in begun


def test_work_that_was_cancelled_before_it_began_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "NUM_THREADS", 1)
    may_end = threading.Event()
    begun: list[str] = []

    def work(name: str) -> None:
        begun.append(name)
        assert may_end.wait(60)

    async def scenario() -> None:
        workers = TextWorkers()
        first = asyncio.create_task(workers.run(5_000, partial(work, "first")))
        second = asyncio.create_task(workers.run(5_000, partial(work, "second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        may_end.set()
        await first
        workers.close()

    asyncio.run(scenario())
    assert begun == ["first"]


def test_sizes() -> None:
    assert text_size(PromptRequest(prompt="x" * 100)) == 100 == text_size(PromptRequest(prompt=[1] * 100))
    assert text_size(ChatRequest(messages=[Message(role="user", content="hi")] * 8192)) > LONG_CHARACTERS
    calls = [ToolCall(id="c", name="f", arguments="x" * 2_000_000)]
    assert text_size(ChatRequest(messages=[Message(role="assistant", tool_calls=calls)])) > LONG_CHARACTERS
    assert text_size(ChatRequest(messages=[Message(role="user", content="hi")])) < LONG_CHARACTERS
