"""Tool calls through the real template, core and reader: one conversation in several families' formats."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.speaker import Speaker
from tests.support.tool_families import HELLO, NOW, WEATHER, called, family_speaker, written
from tokenmill import SamplingParams
from tokenmill.engine.results import EventFold, reasoning_of, tool_calls_of
from tokenmill.engine.tool_use import describe_speech
from tokenmill.errors import InvalidRequest
from tokenmill.text.tokenizer import EOS_ID
from tokenmill.types import (
    CallArguments,
    CallStart,
    ChatRequest,
    Message,
    SequenceOutput,
    TokenLogprobs,
    Tool,
    ToolCall,
    ToolChoice,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
PATCH = Tool(name="patch", kind="custom")
CALLS = [
    ToolCall(id="a", name="get_weather", arguments='{"city": "São \\"P\\"", "days": 3}'),
    ToolCall(id="b", name="now", arguments="{}"),
]


def chat(params: SamplingParams = GREEDY, tools: list[Tool] | None = None, **fields: Any) -> ChatRequest:
    return ChatRequest(messages=HELLO, params=params, tools=tools or [WEATHER, NOW], **fields)


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 2])
def test_calls(speaker: Speaker, count: int) -> None:
    calls = CALLS[-count:] if count == 1 else CALLS
    events = speaker.events(chat(), written(speaker, calls))
    answer = speaker.answer(chat(), written(speaker, calls))
    assert called(tool_calls_of(answer)) == called(calls)
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    ids = [call.id for call in tool_calls_of(answer)]
    assert len(set(ids)) == count and all(len(one) >= 9 for one in ids)
    starts = [part for event in events for part in event.parts or () if isinstance(part, CallStart)]
    fragments = [part for event in events for part in event.parts or () if isinstance(part, CallArguments)]
    assert [start.name for start in starts] == [call.name for call in calls]
    assert "".join(part.fragment for part in fragments if part.index == count - 1) == "{}"


def test_text_around_calls_is_kept(hermes: Speaker) -> None:
    answer = hermes.answer(chat(), f"I look.\n{written(hermes, CALLS[:1])}")
    assert answer.text.strip() == "I look." and len(tool_calls_of(answer)) == 1


def test_thoughts_and_calls(qwen3: Speaker) -> None:
    answer = qwen3.answer(chat(), f"<think>\nHm\n</think>\n\n{written(qwen3, CALLS)}")
    assert reasoning_of(answer) == "Hm" and called(tool_calls_of(answer)) == called(CALLS)
    assert answer.text == ""


def test_an_unknown_tool_is_text(hermes: Speaker) -> None:
    said = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    answer = hermes.answer(chat(), said)
    assert tool_calls_of(answer) == [] and '"rm"' in answer.text and answer.finish_reason == "stop"


def test_a_marker_written_out_is_no_call(hermes: Speaker) -> None:
    said = "Write <tool_call>\n" + '{"name": "now", "arguments": {}}\n</tool_call>'
    answer = hermes.answer(chat(), [*said.encode()])
    assert tool_calls_of(answer) == [] and answer.text == said


def test_without_tools_a_call_is_text(hermes: Speaker) -> None:
    said = written(hermes, CALLS[:1])
    for asked in (ChatRequest(messages=HELLO, params=GREEDY), chat(tool_choice=ToolChoice(mode="none"))):
        answer = hermes.answer(asked, said)
        assert answer.parts is None and "get_weather" in answer.text and answer.finish_reason == "stop"


def test_a_call_cut_off_ends_with_length(hermes: Speaker) -> None:
    said = written(hermes, CALLS[:1])
    params = SamplingParams(temperature=0.0, max_tokens=len(said) - 40)
    answer = hermes.answer(chat(params), said)
    assert answer.finish_reason == "length"
    assert json.loads(tool_calls_of(answer)[0].arguments)["city"].startswith("S")


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0, n=2), SamplingParams(temperature=0.0, best_of=2)])
def test_several_answers(hermes: Speaker, params: SamplingParams) -> None:
    for answer in hermes.answers(chat(params), written(hermes, CALLS)):
        assert called(tool_calls_of(answer)) == called(CALLS) and answer.finish_reason == "tool_calls"


def test_stop_strings_do_not_cut_calls(hermes: Speaker) -> None:
    params = SamplingParams(temperature=0.0, stop=["city", "}"])
    assert called(tool_calls_of(hermes.answer(chat(params), written(hermes, CALLS)))) == called(CALLS)


def test_logprobs_do_not_hold_calls(hermes: Speaker) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    answer = hermes.answer(chat(params), "Look:" + written(hermes, CALLS))
    assert called(tool_calls_of(answer)) == called(CALLS)
    assert "".join(token.text for token in answer.logprobs or ()) == answer.text == "Look:"


def test_the_input_of_a_custom_tool_is_unwrapped(speaker: Speaker) -> None:
    said = written(speaker, [ToolCall(id="abc123abc", name="patch", arguments='{"input": "+ \\"é\\"\\n"}')])
    (call,) = tool_calls_of(speaker.answer(chat(tools=[PATCH]), said))
    assert (call.name, call.kind, call.arguments) == ("patch", "custom", '+ "é"\n')


# ── prompts ────────────────────────────────────────────────────────────────────────────────────────────


def test_all_spellings_of_a_history_are_rendered_alike(speaker: Speaker) -> None:
    def prompt(content: str | None, arguments: str) -> str:
        call = ToolCall(id="call_0123456789", name="get_weather", arguments=arguments)
        turn = Message(role="assistant", content=content, tool_calls=[call])
        result = Message(role="tool", content="sun", tool_call_id="call_0123456789", name="get_weather")
        return speaker.prompt(ChatRequest(messages=[*HELLO, turn, result], tools=[WEATHER]))

    prompts = {prompt(content, text) for content in (None, "") for text in ('{"city":"Paris"}', '{ "city": "Paris" }')}
    assert len(prompts) == 1 and "Paris" in prompts.pop()


def test_a_narrower_choice_keeps_the_prompt(hermes: Speaker) -> None:
    assert hermes.prompt(chat()) == hermes.prompt(chat(tool_choice=ToolChoice(names=["now"])))
    assert "get_weather" not in hermes.prompt(chat(tool_choice=ToolChoice(mode="none")))


def test_a_template_that_knows_no_tools_is_told_in_the_system_message(shared_dir: Path) -> None:
    speaker = family_without_tools()
    prompt = speaker.prompt(chat())
    assert "get_weather" in prompt and prompt.index("get_weather") < prompt.index("Weather in Paris?")
    assert called(tool_calls_of(speaker.answer(chat(), written(speaker, CALLS)))) == called(CALLS)


def family_without_tools() -> Speaker:
    return Speaker("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [NOW, WEATHER, NOW]}, "tools"),
        ({"tools": [Tool(name="a b")]}, "tools[0].name"),
        ({"tools": [Tool(name="")]}, "tools[0].name"),
        ({"tools": [Tool(name="x" * 129)]}, "tools[0].name"),
        ({"tool_choice": ToolChoice(mode="required", names=["other"])}, "tool_choice"),
    ],
)
def test_what_is_refused(hermes: Speaker, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        hermes.input_processor.process(chat(**fields))
    assert refused.value.param == param


def test_a_model_told_to_call_nothing_refuses_tools(shared_dir: Path) -> None:
    speaker = Speaker((shared_dir / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text(), tool_format="none")
    with pytest.raises(InvalidRequest, match="can't call tools"):
        speaker.prompt(chat())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 40), has_logprobs=st.booleans())
def test_tokens_that_come_together_are_read_as_one_by_one(qwen3: Speaker, size: int, has_logprobs: bool) -> None:
    """Drafts that were right and text that a grammar forced come several at a time."""
    asked = chat(SamplingParams(temperature=0.0, logprobs=0 if has_logprobs else None))
    request = qwen3.input_processor.process(asked)
    said = f"<think>\nHm\n</think>\n\nLook é: {written(qwen3, CALLS)}"
    ids = [*qwen3.tokenizer.encode(said, add_special_tokens=False), EOS_ID]
    processor, fold = qwen3.frontend.output_processor(asked, request), EventFold()
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        is_last = start + size >= len(ids)
        output = SequenceOutput(
            request_id=request.request_id,
            token_ids=some,
            logprobs=[TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in some] if has_logprobs else None,
            finish_reason="stop" if is_last else None,
            stop_token_id=EOS_ID if is_last else None,
        )
        for event in processor.process(output):
            fold.add(event)
    whole = fold.event
    assert (reasoning_of(whole), whole.text.strip(), whole.finish_reason) == ("Hm", "Look é:", "tool_calls")
    assert called(tool_calls_of(whole)) == called(CALLS)
    assert whole.usage is not None and whole.usage.reasoning_tokens == len("<\nHm\n>")
    if has_logprobs:
        assert b"".join(token.raw for token in whole.logprobs or ()).decode() == whole.text


def test_ids_are_those_of_the_family(shared_dir: Path) -> None:
    for name, markers in (
        ("mistralai-Mistral-Nemo-Instruct-2407", ["[TOOL_CALLS]"]),  # its id comes last, too late for a stream
        ("unsloth-mistral-Devstral-Small-2507", ["[TOOL_CALLS]", "[ARGS]"]),
    ):
        mistral = Speaker((shared_dir / "templates" / f"{name}.jinja").read_text(), special=markers)
        (call,) = tool_calls_of(mistral.answer(chat(), written(mistral, CALLS[1:])))
        assert len(call.id) == 9 and call.id.isalnum()
    kimi = Speaker((shared_dir / "templates" / "Kimi-K2-Instruct.jinja").read_text())
    said = written(kimi, [ToolCall(id="functions.now:0", name="now")])
    assert [call.id for call in tool_calls_of(kimi.answer(chat(), said))] == ["functions.now:0"]


def test_foreign_ids_fit_the_template(shared_dir: Path) -> None:
    """Nemo's template refuses ids of other lengths; the call and its result keep one id."""
    mistral = family_speaker(shared_dir, "mistralai-Mistral-Nemo-Instruct-2407")
    turn = Message(role="assistant", tool_calls=[ToolCall(id="toolu_012345678901", name="now")])
    result = Message(role="tool", content="noon", tool_call_id="toolu_012345678901")
    prompt = mistral.prompt(ChatRequest(messages=[*HELLO, turn, result], tools=[NOW]))
    ids = set(re.findall(r'"(?:id|call_id)": "([^"]+)"', prompt))
    assert len(ids) == 1 and len(ids.pop()) == 9


def test_what_was_found_is_said(qwen3: Speaker) -> None:
    found = "tool calls hermes (its chat template writes this format); thinks in <think>"
    assert describe_speech(qwen3.frontend.speech) == found
    assert describe_speech(family_without_tools().frontend.speech).startswith("tool calls hermes (not written")
    assert "no tool calls" in describe_speech(None)
