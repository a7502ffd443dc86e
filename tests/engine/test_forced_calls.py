"""A stubborn model is held to valid calls by a grammar: required, named, allowed, strict; JSON after thinking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.speaker import Speaker
from tests.support.tool_families import HELLO, NOW, WEATHER, called, family_speaker, written
from tokenmill import SamplingParams
from tokenmill.engine.results import reasoning_of, tool_calls_of
from tokenmill.errors import InvalidRequest
from tokenmill.params import BeamParams, Guided
from tokenmill.types import ChatRequest, Reasoning, Tool, ToolCall, ToolChoice

GREEDY = SamplingParams(temperature=0.0, max_tokens=600)
ARGUMENTS = Tool(
    name="book",
    parameters={
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "kind": {"const": "train"},
        },
        "required": ["city", "days", "kind"],
        "additionalProperties": False,
    },
)
STUBBORN = "No, I will not call anything, I say <b>no</b>."


@pytest.fixture(scope="module")
def stepfun(shared_dir: Path) -> Speaker:
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return Speaker((shared_dir / "templates" / "StepFun3.5-Flash.jinja").read_text(), special=markers)


def chat(tools: list[Tool] | None = None, params: SamplingParams = GREEDY, **fields: Any) -> ChatRequest:
    return ChatRequest(messages=HELLO, params=params, tools=tools or [], **fields)


REQUIRED = ToolChoice(mode="required")
OFF = Reasoning(effort="none")  # else a stubborn model may think for ever


def test_required(speaker: Speaker) -> None:
    answer = speaker.answer(chat([ARGUMENTS], tool_choice=REQUIRED, reasoning=OFF), STUBBORN, is_stubborn=True)
    calls = tool_calls_of(answer)
    assert calls and answer.finish_reason in ("tool_calls", "length")
    complete = calls if answer.finish_reason == "tool_calls" else calls[:-1]
    assert ARGUMENTS.parameters is not None and complete
    for call in complete:
        jsonschema.validate(json.loads(call.arguments), ARGUMENTS.parameters)


def test_named(speaker: Speaker) -> None:
    choice = ToolChoice(mode="required", names=["now"], parallel=False)
    answer = speaker.answer(chat([ARGUMENTS, NOW], tool_choice=choice, reasoning=OFF), STUBBORN, is_stubborn=True)
    assert called(tool_calls_of(answer)) == [("now", {})] and answer.finish_reason == "tool_calls"


def test_one_call(speaker: Speaker) -> None:
    said = written(speaker, [ToolCall(id="abcd12345", name="now"), ToolCall(id="abcd12346", name="now")])
    answer = speaker.answer(chat([NOW], tool_choice=ToolChoice(parallel=False)), said)
    assert called(tool_calls_of(answer)) == [("now", {})]


def test_a_willing_model_is_not_disturbed(speaker: Speaker) -> None:
    calls = [ToolCall(id="abcd12345", name="get_weather", arguments='{"city": "Paris", "days": 3}')]
    answer = speaker.answer(chat([WEATHER, NOW], tool_choice=REQUIRED), written(speaker, calls))
    assert called(tool_calls_of(answer)) == called(calls) and answer.finish_reason == "tool_calls"


def test_allowed_tools(hermes: Speaker) -> None:
    """Text is free, but a call that begins can only be of an allowed tool."""
    choice = ToolChoice(mode="auto", names=["now"])
    assert hermes.answer(chat([WEATHER, NOW], tool_choice=choice), "Hello there").text == "Hello there"
    said = written(hermes, [ToolCall(id="a", name="get_weather", arguments='{"city": "Paris"}')])
    answer = hermes.answer(chat([WEATHER, NOW], tool_choice=choice), said)
    assert {call.name for call in tool_calls_of(answer)} <= {"now"}


def test_strict(hermes: Speaker) -> None:
    strict = Tool(name="book", parameters=ARGUMENTS.parameters, strict=True)
    said = written(hermes, [ToolCall(id="a", name="book", arguments='{"city": "Oslo", "days": 77, "kind": "x"}')])
    (call, *_) = tool_calls_of(hermes.answer(chat([strict]), said, is_stubborn=True))
    jsonschema.validate(json.loads(call.arguments), ARGUMENTS.parameters or {})


def test_a_schema_that_cannot_be_enforced(hermes: Speaker) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "format": "no-such-format"}}}
    with pytest.raises(InvalidRequest, match="can't be enforced: the format") as refused:
        hermes.input_processor.process(chat([Tool(name="f", parameters=parameters, strict=True)]))
    assert refused.value.param == "tools"
    loose = chat([Tool(name="f", parameters=parameters)], tool_choice=REQUIRED)
    calls = [ToolCall(id="a", name="f", arguments='{"x": "anything"}')]
    assert called(tool_calls_of(hermes.answer(loose, written(hermes, calls)))) == called(calls)


def test_forced_after_thinking(qwen3: Speaker, stepfun: Speaker) -> None:
    call = [ToolCall(id="a", name="now")]
    answer = qwen3.answer(chat([NOW], tool_choice=REQUIRED), f"<think>\nHm\n</think>\n\n{written(qwen3, call)}")
    assert reasoning_of(answer) == "Hm" and called(tool_calls_of(answer)) == [("now", {})]
    answer = stepfun.answer(chat([NOW], tool_choice=REQUIRED), f"Hm\n</think>\n{written(stepfun, call)}")
    assert reasoning_of(answer) == "Hm" and called(tool_calls_of(answer)) == [("now", {})]


SCHEMA = Guided.schema({"type": "object", "properties": {"a": {"const": 42}}, "required": ["a"]})


@pytest.mark.parametrize("said", ['Hm, {"b": 1}?\n</think>\n\n{"a": 42}', "Hm</think>No JSON!"])
def test_json_only_after_the_thinking(stepfun: Speaker, said: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=300, guided=SCHEMA)
    answer = stepfun.answer(chat(params=params), said, is_stubborn=True)
    assert reasoning_of(answer) == said.split("</think>", maxsplit=1)[0].strip()
    assert json.loads(answer.text) == {"a": 42}


def test_json_where_the_model_opens_or_does_not_think(qwen3: Speaker) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=300, guided=SCHEMA)
    answer = qwen3.answer(chat(params=params), '<think>\nHm\n</think>\n\n{"a": 42}')
    assert (reasoning_of(answer), json.loads(answer.text)) == ("Hm", {"a": 42})
    answer = qwen3.answer(chat(params=params), '{"a": 42}')
    assert (reasoning_of(answer), json.loads(answer.text)) == (None, {"a": 42})
    off = chat(params=params, reasoning=Reasoning(effort="none"))
    answer = qwen3.answer(off, "<think>I want to think", is_stubborn=True)
    assert (reasoning_of(answer), json.loads(answer.text)) == (None, {"a": 42})


def test_a_thinking_budget_and_a_schema(stepfun: Speaker) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=300, guided=SCHEMA)
    asked = chat(params=params, reasoning=Reasoning(budget=6))
    answer = stepfun.answer(asked, "I think and think and think and think", is_stubborn=True)
    assert reasoning_of(answer) == "I thin" and json.loads(answer.text) == {"a": 42}


def test_calls_or_json(hermes: Speaker) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=300, guided=SCHEMA)
    calls = [ToolCall(id="a", name="now")]
    assert called(tool_calls_of(hermes.answer(chat([NOW], params), written(hermes, calls)))) == [("now", {})]
    answer = hermes.answer(chat([NOW], params), '{"a": 42}')
    assert json.loads(answer.text) == {"a": 42} and not tool_calls_of(answer)


LINES = "start: LINE+\nLINE: /x.+\\n/"


@pytest.mark.parametrize(
    ("name", "grammar", "said", "expected"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", Guided("regex", "[a-c]{3}"), "zzz", None),
        ("Qwen3-Coder", Guided("regex", "[a-c]{3}"), "zzz", None),
        ("Qwen3-Coder", Guided("lark", LINES), 'x"1\n', 'x"1\n'),
        ("Qwen-Qwen2.5-7B-Instruct", Guided("lark", LINES), 'x"1\n', 'x"1\n'),
        ("meta-llama-Llama-3.1-8B-Instruct", Guided("lark", LINES), 'x"1\n', 'x"1\n'),
    ],
)
def test_custom_tools_follow_their_grammar(
    shared_dir: Path, name: str, grammar: Guided, said: str, expected: str | None
) -> None:
    speaker = family_speaker(shared_dir, name)
    tool = Tool(name="patch", kind="custom", input_grammar=grammar)
    call = [ToolCall(id="a", name="patch", arguments=json.dumps({"input": said}))]
    choice = ToolChoice(mode="required", parallel=False)
    answer = speaker.answer(chat([tool], tool_choice=choice), written(speaker, call), is_stubborn=True)
    (made,) = tool_calls_of(answer)
    assert made.kind == "custom"
    assert made.arguments == expected if expected else len(made.arguments) == 3 and set(made.arguments) <= set("abc")


def test_a_marker_is_no_text_of_a_guided_answer(shared_dir: Path) -> None:
    """A model that wants to think inside a JSON string finds no token for it."""
    template = (shared_dir / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    speaker = Speaker(template, markers=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    text = {"a": {"type": "string", "maxLength": 9}}
    schema = Guided.schema({"type": "object", "properties": text, "required": ["a"], "additionalProperties": False})
    asked = chat(params=SamplingParams(temperature=0.0, max_tokens=300, guided=schema), reasoning=OFF)
    answer = speaker.answer(asked, '{"a": "<think>A</think>', is_stubborn=True)
    assert reasoning_of(answer) is None and len(json.loads(answer.text)["a"]) <= 9


def test_a_marker_in_a_schema_is_written_out(shared_dir: Path) -> None:
    template = (shared_dir / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    speaker = Speaker(template, markers=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    params = SamplingParams(temperature=0.0, max_tokens=300, guided=Guided.choice(["say </think> now"]))
    answer = speaker.answer(chat(params=params, reasoning=OFF), "no", is_stubborn=True)
    assert (reasoning_of(answer), answer.text) == (None, "say </think> now")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder"])
@pytest.mark.parametrize(
    "properties",
    [
        {"a": {"$ref": "#/properties/a"}},
        {"a": {"$ref": "#"}},
        {"a": {"$ref": "#/nowhere"}},
        {"a": {"$ref": "#/$defs/A"}},
        {'a"b\n</parameter>': {"type": "string"}, "<tool_call>": {"type": "integer"}, "": {}},
        {"a": {"type": "string", "pattern": "((a{100}){100}){100}"}},
        {"a": {"enum": []}},
        {"a": 5},
        ["a"],
        nested(20),
        nested(60),
    ],
)
def test_hostile_schemas_are_followed_loosened_or_refused(shared_dir: Path, name: str, properties: Any) -> None:
    """Never an error of ours: a 400, or a call."""
    schema = {"type": "object", "properties": properties, "$defs": {"A": {"$ref": "#/$defs/A"}}, "required": ["a"]}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for strict in (None, True):
        tool = Tool(name="f", parameters=schema, strict=strict)
        try:
            family_speaker(shared_dir, name).answer(chat([tool], params, tool_choice=REQUIRED), "no", is_stubborn=True)
        except InvalidRequest as refused:
            assert refused.param in ("tools", "guided", "messages")


def test_parameters_nested_too_deep_are_refused(hermes: Speaker) -> None:
    with pytest.raises(InvalidRequest, match="nested deeper than"):
        hermes.input_processor.process(chat([Tool(name="f", parameters=nested(900))]))


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 3},
        {"best_of": 3},
        {"n": 2, "temperature": 1.0, "seed": 7},
        {"beam": BeamParams(width=3), "n": 2},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"stop": ["Paris", "book"]},
        {"stop_regex": ["P.ris"]},
        {"min_tokens": 40},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"context_shift": True},
        {"logit_bias": {ord("{"): -100.0}},
    ],
    ids=str,
)
def test_a_forced_call_combines(hermes: Speaker, settings: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 300, **settings})
    choice = ToolChoice(mode="required", parallel=False)
    answers = hermes.answers(chat([ARGUMENTS], params, tool_choice=choice), STUBBORN, is_stubborn=True)
    for answer in answers:
        (call,) = tool_calls_of(answer)
        jsonschema.validate(json.loads(call.arguments), ARGUMENTS.parameters or {})
        assert answer.finish_reason == "tool_calls" and answer.text == ""
        assert "logprobs" not in settings or answer.logprobs == []
