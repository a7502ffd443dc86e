"""Ctrl-C while nothing of an answer has come yet: a long prompt is being read."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.cli.chat import Conversation
from tokenmill.cli.session import Answer, ServedEvents, write_answer
from tokenmill.config.sampling import SamplingConfig
from tokenmill.engine.stream import EventBuffer, EventStream
from tokenmill.types import Event, TextPart, ThoughtPart, Usage


@pytest.fixture
def left() -> list[EventBuffer]:
    return []


def unanswered(runner: asyncio.Runner, left: list[EventBuffer], *said: str) -> ServedEvents:
    """An answer of which nothing more will come; Ctrl-C is pressed as soon as it is waited for."""
    outlet: Any = SimpleNamespace(request_id="r")
    arrivals = EventBuffer(outlet)
    for text in said:
        arrivals.put(Event(request_id="r", text=text))
    loop = runner.get_loop()
    loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
    return ServedEvents(runner, EventStream(arrivals, left.append, loop))


def test_ctrl_c_ends_an_answer_that_has_not_begun(left: list[EventBuffer]) -> None:
    out = io.StringIO()
    with asyncio.Runner() as runner:
        answer = write_answer(unanswered(runner, left), out)
    assert answer.was_stopped and answer.usage is None and out.getvalue() == "\n"
    assert left  # the engine was told


def test_what_was_said_before_ctrl_c_is_kept(left: list[EventBuffer]) -> None:
    out = io.StringIO()
    with asyncio.Runner() as runner:
        answer = write_answer(unanswered(runner, left, "The capital"), out)
    assert answer.was_stopped and answer.text == "The capital" and out.getvalue() == "The capital\n"


def test_tokens_of_a_stopped_answer_are_counted() -> None:
    answer, told = Answer(), Usage(prompt_tokens=9, completion_tokens=1)
    answer.add(Event(request_id="r", text="The", token_ids=[1], usage=told))
    answer.add(Event(request_id="r", text=" capital is", token_ids=[2, 3]))
    assert answer.usage is not None and answer.usage.completion_tokens == 3 and "answer 3 tokens" in answer.stats()
    answer.add(Event(request_id="r", finish_reason="stop", usage=Usage(prompt_tokens=9, completion_tokens=7)))
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    remote = Answer(asked_at=time.monotonic() - 2)  # whose server tells it at the end only
    for text in ("The", " capital"):
        remote.add(Event(request_id="", text=text))
    assert remote.stats().startswith("answer about 2 tokens (") and remote.first_s is not None and remote.first_s >= 2


def test_a_turn_stopped_before_a_word_is_not_remembered(
    left: list[EventBuffer], capsys: pytest.CaptureFixture[str]
) -> None:
    with asyncio.Runner() as runner:
        model: Any = SimpleNamespace(stream_chat=lambda messages, params: unanswered(runner, left))
        conversation = Conversation(lambda name: (model, "m"), None, SamplingConfig(), None, None)
        conversation.answer("a very long question")
    assert conversation.messages == [] and "(stopped)" in capsys.readouterr().err


class FakeScreen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Said(Iterator[Event]):
    def __init__(self, *events: Event) -> None:
        self._events = iter(events)

    def __next__(self) -> Event:
        return next(self._events)

    def stop(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_dimmed_beside_the_answer_on_a_terminal_only(is_terminal: bool) -> None:
    out, screen = io.StringIO(), FakeScreen(is_terminal)
    said = Said(
        Event(request_id="r", parts=[ThoughtPart("Hm")]),
        Event(request_id="r", text="Hi", parts=[ThoughtPart("."), TextPart("Hi")]),
        Event(request_id="r", text="!", finish_reason="stop"),
    )
    assert write_answer(said, out, screen).text == "Hi!" and out.getvalue() == "Hi!\n"
    assert screen.getvalue() == ("\x1b[2mHm.\x1b[0m\n\n" if is_terminal else "")
