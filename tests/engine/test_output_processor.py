"""From tokens to what a client sees: whole characters, stop strings cut out, logprobs that join to the text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.scripted_engine import output_processor_for
from tokenmill import SamplingParams
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.text.tokenizer import EOS_ID, Tokenizer
from tokenmill.types import Event, Request, SequenceOutput, TokenLogprobs


def output(ids: list[int], *, index: int = 0, finish: str | None = None, logprob: float = -1.0) -> SequenceOutput:
    return SequenceOutput(
        request_id="r",
        index=index,
        token_ids=ids,
        logprobs=[TokenLogprobs(token_id, logprob, 1, [], []) for token_id in ids],
        finish_reason=finish,  # type: ignore[arg-type]
        stop_token_id=EOS_ID if ids and ids[-1] == EOS_ID else None,
    )


def push_text(processor: OutputProcessor, text: str, finish: str = "length") -> list[Event]:
    data = list(text.encode())
    events = [event for byte in data for event in processor.process(output([byte]))]
    return events + processor.process(output([], finish=finish))


@given(st.text(max_size=40))
def test_events_join_to_the_text_and_no_character_is_split(text: str) -> None:
    events = push_text(output_processor_for(SamplingParams()), text)
    assert "".join(event.text for event in events) == text
    assert all("\ufffd" not in event.text for event in events if "\ufffd" not in text)
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
    assert all(event.text or event.finish_reason for event in events)


@given(st.text(max_size=20), st.integers(1, 5), st.booleans())
def test_tokens_that_come_together_say_what_they_say_one_by_one(text: str, size: int, ends_with_id: bool) -> None:
    ids = [*text.encode(), *([EOS_ID] if ends_with_id else [])]
    processor = output_processor_for(SamplingParams())
    events = []
    for start in range(0, max(1, len(ids)), size):
        is_last = start + size >= len(ids)
        brought = output(ids[start : start + size], finish="stop" if is_last else None)
        events += processor.process(msgspec.structs.replace(brought, logprobs=None))
    assert "".join(event.text for event in events) == text
    assert [token_id for event in events for token_id in event.token_ids] == ids
    assert processor.is_finished and events[-1].usage is not None
    assert events[-1].usage.completion_tokens == len(ids)


@example("ab", ["b", "aba"])  # "aba" might still begin before the "b" when the text is over
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_before_it(text: str, stops: list[str]) -> None:
    processor = output_processor_for(SamplingParams(stop=stops, logprobs=0))
    events = push_text(processor, text)
    shown = "".join(event.text for event in events)
    ends = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(ends)] if ends else text
    assert shown == expected
    assert events[-1].finish_reason == ("stop" if ends else "length")
    assert "".join(info.text for event in events for info in event.logprobs or []) == shown
    assert ends or not processor.pop_stopped()


def test_usage_counts_up_to_the_stop_string_and_no_further() -> None:
    processor = output_processor_for(SamplingParams(stop=["END"]))
    events = push_text(processor, "abENDxyz")
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 5
    assert events[-1].stop_reason == "END"


def test_min_tokens_holds_stop_strings_off() -> None:
    events = push_text(output_processor_for(SamplingParams(stop=["b"], min_tokens=3)), "abab")
    assert "".join(event.text for event in events) == "aba"


def test_an_end_token_is_counted_but_never_shown() -> None:
    processor = output_processor_for(SamplingParams(logprobs=0, skip_special_tokens=False))
    events = processor.process(output([104, 105])) + processor.process(output([EOS_ID], finish="stop"))
    assert "".join(event.text for event in events) == "hi"
    assert [info.text for event in events for info in event.logprobs or []] == ["h", "i"]
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 3


def test_best_of_shows_the_likeliest_and_only_once_all_have_ended() -> None:
    processor = output_processor_for(SamplingParams(n=2, best_of=3))
    assert processor.process(output([97], index=0, finish="length", logprob=-3.0)) == []
    assert processor.process(output([98], index=1, finish="length", logprob=-1.0)) == []
    events = processor.process(output([99], index=2, finish="length", logprob=-2.0))
    assert [(event.index, event.text) for event in events] == [(0, "b"), (1, "c")]
    assert all(event.logprobs is None for event in events)
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 3


def test_a_prompts_logprobs_become_text_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = output_processor_for(SamplingParams(prompt_logprobs=1))
    scores = [TokenLogprobs(token_id, -0.5, 1, [token_id, 97], [-0.5, -1.0]) for token_id in (104, 105)]
    read: list[int] = []
    token_text = Tokenizer.token_text

    def watched(tokenizer: Tokenizer, token_id: int) -> str:
        read.append(token_id)
        return token_text(tokenizer, token_id)

    monkeypatch.setattr(Tokenizer, "token_text", watched)
    (event,) = processor.process(SequenceOutput(request_id="r", token_ids=[], prompt_logprobs=scores))
    infos = event.prompt_logprobs
    assert infos is not None and len(infos) == 3 and read == []
    assert [info and info.text for info in infos] == [None, "h", "i"] and infos[0] is None and read
    assert [text for _, text, _, _ in (infos[2] or infos[1]).top] == ["i", "a"]  # type: ignore[union-attr]


def test_the_first_event_says_what_the_prompt_cost() -> None:
    processor = output_processor_for(SamplingParams())
    half, rest = "é".encode()  # the first output completes no character, so there is no event of it
    first = msgspec.structs.replace(output([half]), num_cached_tokens=2, queue_s=0.5)
    assert processor.process(first) == []
    events = [event for byte in (rest, *b"ab") for event in processor.process(output([byte]))]
    assert events[0].usage is not None and events[0].usage.cached_tokens == 2 and events[0].queue_s == 0.5
    assert [event.usage for event in events[1:]] == [None, None]


def test_tokens_without_a_vocabulary_come_one_by_one() -> None:
    request = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(), max_tokens=9, seed=0)
    processor = OutputProcessor(request, None, keep_best=None, wants_logprobs=False)
    brought = [msgspec.structs.replace(output([number]), logprobs=None) for number in (5, 6, 7)]
    assert [[event.token_ids for event in processor.process(one)] for one in brought] == [[[5]], [[6]], [[7]]]
    (last,) = processor.process(output([], finish="length"))
    assert last.finish_reason == "length" and last.usage is not None and last.usage.completion_tokens == 3
