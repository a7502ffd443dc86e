"""What a model thinks, apart from what it says: through the real template, core and reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.speaker import Speaker
from tokenmill import SamplingParams
from tokenmill.engine.results import reasoning_of
from tokenmill.types import ChatRequest, Event, Message, Reasoning, ThoughtPart

THINK = ("<think>", "</think>")
HELLO = [Message(role="user", content="Hello")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=400)


@pytest.fixture(scope="module")
def qwen3(shared_dir: Path) -> Speaker:
    """The model opens think sections; when they are off, the prompt closes one."""
    return Speaker((shared_dir / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(), THINK)


@pytest.fixture(scope="module")
def stepfun(shared_dir: Path) -> Speaker:
    """The prompt opens the think section."""
    return Speaker((shared_dir / "templates" / "StepFun3.5-Flash.jinja").read_text(), THINK)


def chat(params: SamplingParams = GREEDY, **fields: object) -> ChatRequest:
    return ChatRequest(messages=HELLO, params=params, **fields)  # type: ignore[arg-type]


def split(event: Event) -> tuple[str | None, str]:
    return reasoning_of(event), event.text


def test_the_model_opens(qwen3: Speaker) -> None:
    answer = qwen3.answer(chat(), "<think>\nHm, hello.\n</think>\n\nHi there!")
    assert split(answer) == ("Hm, hello.", "Hi there!")
    assert answer.usage is not None and answer.usage.reasoning_tokens == len("<>\nHm, hello.\n")
    assert answer.finish_reason == "stop"


def test_the_prompt_opens(stepfun: Speaker) -> None:
    assert stepfun.prompt(chat()).endswith("<think>\n")
    answer = stepfun.answer(chat(), "Hm, hello.\n</think>\n\nHi there!")
    assert split(answer) == ("Hm, hello.", "Hi there!")


def test_off(qwen3: Speaker) -> None:
    for off in (chat(reasoning=Reasoning(effort="none")), chat(reasoning=Reasoning(is_on=False))):
        assert qwen3.prompt(off).endswith("<think>\n\n</think>\n\n")
        answer = qwen3.answer(off, "Hi there!")
        assert split(answer) == (None, "Hi there!") and answer.parts is None
        assert answer.usage is not None and answer.usage.reasoning_tokens == 0


def test_off_where_the_template_opens_all_the_same(stepfun: Speaker) -> None:
    answer = stepfun.answer(chat(reasoning=Reasoning(effort="none")), "XHi there!")  # the closer takes the place of X
    assert split(answer) == (None, "Hi there!")


def test_thoughts_that_never_end_are_all_there_is(stepfun: Speaker) -> None:
    answer = stepfun.answer(chat(SamplingParams(temperature=0.0, max_tokens=4)), "Hm, and on")
    assert split(answer) == ("Hm, ", "") and answer.finish_reason == "length"


def test_markers_written_out_are_text(qwen3: Speaker) -> None:
    """The same characters as a marker, but not its token: as a model that quotes a file writes them."""
    answer = qwen3.answer(chat(), [*b"Use </think>"])
    assert split(answer) == (None, "Use </think>")


@pytest.mark.parametrize(("effort", "budget"), [("minimal", 256), ("low", 1024), ("max", None)])
def test_effort_is_a_budget(qwen3: Speaker, effort: str, budget: int | None) -> None:
    request = qwen3.input_processor.process(chat(reasoning=Reasoning(effort=effort)))  # type: ignore[arg-type]
    assert request.params.thinking_budget == budget


def test_a_budget_forces_the_closer(qwen3: Speaker) -> None:
    answer = qwen3.answer(chat(reasoning=Reasoning(budget=5)), "<think>abcdefghijklmnop</think>")
    thought, text = split(answer)
    assert thought == "abcde"
    assert text == "ghijklmnop</think>"  # its position in the script; a closer in the answer is text


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0, n=3), SamplingParams(temperature=0.0, best_of=3)])
def test_several_answers(qwen3: Speaker, params: SamplingParams) -> None:
    answers = qwen3.answers(chat(params), "<think>Hm</think>Hi")
    assert [split(one) for one in answers] == [("Hm", "Hi")] * params.n
    assert answers[-1].usage is not None and answers[-1].usage.reasoning_tokens == 3 * 4


def test_stop_strings_are_looked_for_in_the_text_alone(qwen3: Speaker) -> None:
    params = SamplingParams(temperature=0.0, stop=["stop"])
    answer = qwen3.answer(chat(params), "<think>I shall not stop yet</think>Now I stop here")
    assert split(answer) == ("I shall not stop yet", "Now I ") and answer.stop_reason == "stop"
    assert answer.finish_reason == "stop"


def test_logprobs_are_those_of_the_text(qwen3: Speaker) -> None:
    params = SamplingParams(temperature=0.0, logprobs=0)
    answer = qwen3.answer(chat(params), "<think>\nHm</think>\n\nHi é!")
    assert b"".join(token.raw for token in answer.logprobs or ()) == "Hi é!".encode()


def test_events_are_small_and_in_order(qwen3: Speaker) -> None:
    events = qwen3.events(chat(), "<think>ab</think>cd")
    assert [event.parts for event in events[:2]] == [[ThoughtPart("a")], [ThoughtPart("b")]]
    assert [(event.text, event.parts) for event in events[2:4]] == [("c", None), ("d", None)]


def test_old_thoughts_are_not_shown_again(qwen3: Speaker) -> None:
    turns = [*HELLO, Message(role="assistant", content="Hi", reasoning="OLD"), *HELLO]
    assert "OLD" not in qwen3.prompt(ChatRequest(messages=turns))
    loop = [*HELLO, Message(role="assistant", content="Hi", reasoning="NEW"), Message(role="tool", content="x")]
    assert "NEW" in qwen3.prompt(ChatRequest(messages=loop))
