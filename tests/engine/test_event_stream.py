"""What waits for a reader: one who keeps up gets every event as it came, one who is behind gets them folded."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.scripted_engine import output_processor_for
from tokenmill import SamplingParams
from tokenmill.engine import stream
from tokenmill.engine.stream import EventBuffer, EventStream
from tokenmill.errors import RequestFailed
from tokenmill.types import Event, SequenceOutput, TokenInfo, TokenLogprobs, Usage


def word(text: str, index: int = 0, **more: object) -> Event:
    info = TokenInfo(len(text), text, text.encode(), -1.0, 1)
    return Event(request_id="r", index=index, text=text, token_ids=[len(text)], logprobs=[info], **more)  # type: ignore[arg-type]


def read(*steps: list[Event], error: RequestFailed | None = None) -> list[Event]:
    """What a reader gets who looks once after each step."""

    async def scenario() -> list[Event]:
        buffer = EventBuffer(output_processor_for(SamplingParams()))
        stream = EventStream(buffer, lambda _: None, asyncio.get_running_loop())
        got: list[Event] = []
        reading = asyncio.create_task(_collect(stream, got))
        for events in steps:
            for event in events:
                buffer.put(event)
            for _ in range(3):  # time to wake up, to read and to wait again
                await asyncio.sleep(0)
        if error is None:
            buffer.end()
            await reading
            with pytest.raises(StopAsyncIteration):  # and stays at its end
                await anext(stream)
        else:
            buffer.fail(error)
            with pytest.raises(RequestFailed):
                await reading
        return got

    return asyncio.run(scenario())


async def _collect(stream: EventStream, got: list[Event]) -> None:
    async for event in stream:
        got.append(event)
        await asyncio.sleep(0)


def test_who_keeps_up_sees_every_event_as_it_came() -> None:
    events = [word("a"), word("b"), word("c", finish_reason="stop")]
    assert read(*([event] for event in events)) == events


def test_what_waits_is_one_event_a_choice() -> None:
    early, late = Usage(prompt_tokens=1, completion_tokens=3), Usage(prompt_tokens=1, completion_tokens=5)
    waiting = [
        word("a", queue_s=0.5),
        word("x", index=1),
        word("bc"),
        word("y", index=1, finish_reason="length", usage=early),
        word("d", finish_reason="stop", usage=late),
    ]
    second, first = read(waiting)
    assert (second.index, second.text, second.finish_reason, second.usage) == (1, "xy", "length", early)
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "abcd", [1, 2, 1], "stop")
    assert first.usage == late, "the newest count comes last"
    assert first.queue_s == 0.5 and [info.text for info in first.logprobs or []] == ["a", "bc", "d"]


def test_a_failure_comes_after_what_was_said_before_it() -> None:
    assert [event.text for event in read([word("a"), word("b")], error=RequestFailed("no"))] == ["ab"]


def test_a_reader_far_behind_does_not_fill_the_memory_with_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_UNREAD_LOGPROBS", 10)
    buffer = EventBuffer(output_processor_for(SamplingParams(logprobs=1, max_tokens=99, ignore_eos=True)))
    info = TokenLogprobs(token_id=97, logprob=-1.0, rank=1, top_ids=[97], top_logprobs=[-1.0])

    def output() -> SequenceOutput:
        return SequenceOutput(request_id="r", token_ids=[97], logprobs=[info])

    for _ in range(20):  # who keeps up may have any number
        assert buffer.process(output()) is None
        buffer.pop()
    errors = [buffer.process(output()) for _ in range(6)]
    assert [error is None for error in errors] == [True] * 5 + [False]
    assert isinstance(errors[-1], RequestFailed)
