"""Every tool-call format through a whole server and the real openai package: what a model writes arrives as a call."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.scripted_server import NAME, scripted_server
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.types import ToolCall

HELLO: Any = [{"role": "user", "content": "Weather in São Paulo?"}]
ARGUMENTS = {"city": 'São "P"', "days": 3, "tags": ["a", "b"], "deep": {"x": None}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "deep": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = ToolCall(id="abcd12345", name="get_weather", arguments=json.dumps(ARGUMENTS, ensure_ascii=False))
NO_ARGUMENTS = ToolCall(id="abcd12346", name="now")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
ROWS = [
    pytest.param(row, marks=() if number % 4 == 0 else pytest.mark.slow, id=row.name)
    for number, row in enumerate(CALL_FORMATS)
]


@contextmanager
def model_that_says(answers: list[Any], template: str | Path = PLAIN, **settings: Any) -> Iterator[openai.OpenAI]:
    script = {"answers": answers, **settings.pop("script", {})}
    with (
        scripted_server(script, template, **settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def asked(client: openai.OpenAI, *, is_stream: bool, **fields: Any) -> Any:
    fields = {"model": NAME, "messages": HELLO, "temperature": 0, **fields}
    if not is_stream:
        return client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("row", ROWS)
def test_a_call_in_every_format(row: Any) -> None:
    answers = [{"match": "now", "say": row.write([NO_ARGUMENTS])}, {"say": row.write([CALL])}]
    # The one family that writes objects as tags leaves nulls out, as its template does.
    expected = {**ARGUMENTS, "deep": {}} if row.values == "nested" else ARGUMENTS
    with model_that_says(answers, tool_format=row.name) as client:
        for is_stream in (False, True):
            choice = asked(client, is_stream=is_stream, tools=TOOLS[:1])
            (call,) = choice.message.tool_calls
            assert call.function.name == "get_weather" and json.loads(call.function.arguments) == expected
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            (call,) = asked(client, is_stream=is_stream, tools=TOOLS).message.tool_calls
            assert call.function.name == "now" and call.function.arguments == "{}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "gemma-4"])
def test_whatever_a_model_makes_of_a_format_is_an_answer(name: str) -> None:
    """Damaged answers: always 200, and a call that is announced has arguments that are JSON."""
    row = next(row for row in CALL_FORMATS if row.name == name)
    said = [mutated(row.write([CALL, NO_ARGUMENTS]), random.Random(number)) for number in range(40)]
    answers = [{"match": f"#{number}#", "say": [{"plain": text}]} for number, text in enumerate(said)]
    with scripted_server({"answers": answers}, PLAIN, tool_format=name) as server:
        for number in range(len(said)):
            body = {"model": NAME, "messages": [{"role": "user", "content": f"#{number}#"}], "tools": TOOLS}
            reply = server.post("/v1/chat/completions", body)
            assert reply.status_code == 200, (said[number], reply.text)
            for call in reply.json()["choices"][0]["message"].get("tool_calls") or ():
                json.loads(call["function"]["arguments"])


INSERTED = ("{", "}", '"', "<", "\\", "é", "\n", "]", "</tool_call>", ", ")


def mutated(text: str, random: random.Random) -> str:
    for _ in range(random.randint(1, 3)):
        start, length = random.randrange(len(text) + 1), random.randint(0, 12)
        match random.randrange(4):
            case 0:
                text = text[:start] + text[start + length :]
            case 1:
                text = text[:start] + text[start : start + length] + text[start:]
            case 2:
                text = (
                    text[:start]
                    + random.choice(["{", "}", '"', "<", "\\", "é", "\n", "]", "</tool_call>"])
                    + text[start:]
                )
            case _:
                text = text[:start]
    return text or "x"


# ── choices ────────────────────────────────────────────────────────────────────────────────────────────

REFUSAL = {"say": "No, I will not call anything.", "stubborn": True}
BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["city", "days", "ok"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def stubborn(shared_dir: Path) -> Iterator[openai.OpenAI]:
    template = shared_dir / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
    script = {"added_tokens": ["<tool_call>", "</tool_call>"], "control_tokens": ["<|im_start|>", "<|im_end|>"]}
    with model_that_says([REFUSAL], template, script={**script, "eos": "<|im_end|>"}, max_context=4096) as client:
        yield client


@pytest.mark.parametrize("row", ROWS)
def test_a_stubborn_model_must_call_in_every_format(row: Any) -> None:
    with model_that_says([REFUSAL], tool_format=row.name, max_context=4096) as client:
        fields = {"tools": [BOOK], "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"}
        choice = asked(client, is_stream=True, max_completion_tokens=1500, **fields)
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), BOOK["function"]["parameters"])


def test_named_none_and_allowed(stubborn: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    fields: Any = {"tools": [*TOOLS, BOOK], "parallel_tool_calls": False, "is_stream": False}
    choice = asked(stubborn, tool_choice=named, **fields)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.finish_reason == "tool_calls"
    none = asked(stubborn, tool_choice="none", **fields).message
    assert none.tool_calls is None and none.content == REFUSAL["say"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    choice = asked(stubborn, tool_choice=allowed, **fields)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "not a name"}}]}, "tools[0].name"),
        ({"tools": [{**BOOK, "function": {**BOOK["function"], "strict": True, "parameters": {"not": {}}}}]}, "tools"),
    ],
)
def test_what_is_refused(stubborn: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked(stubborn, is_stream=False, **fields)
    assert refused.value.param == param


def test_every_spelling_of_a_call_in_the_history_is_one_prompt(stubborn: openai.OpenAI) -> None:
    def tokens(content: Any, arguments: Any) -> Any:
        call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        told: Any = [*HELLO, turn, {"role": "tool", "tool_call_id": "c", "content": "sun"}]
        body = {"model": NAME, "messages": told, "tools": TOOLS}
        return stubborn.post("../tokenize", body=body, cast_to=object)

    contents = (None, "", [{"type": "text", "text": ""}])
    spellings = ('{"city": "Paris"}', '{"city":"Paris"}', {"city": "Paris"})
    prompts = [tokens(content, arguments) for content in contents for arguments in spellings]
    assert all(prompt == prompts[0] for prompt in prompts) and prompts[0]["count"] > 50


# ── thinking ───────────────────────────────────────────────────────────────────────────────────────────

THINK = {"added_tokens": ["<think>", "</think>"], "control_tokens": ["<|im_end|>"], "eos": "<|im_end|>"}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("template", "said", "effort"),
    [
        ("Qwen-Qwen3-0.6B", "<think>\nHm.\n</think>\n\nHi!", None),
        ("StepFun3.5-Flash", "Hm.\n</think>\n\nHi!", None),
        ("Qwen-Qwen3-0.6B", "Hi!", "none"),
    ],
)
def test_thinking(shared_dir: Path, template: str, said: str, effort: Any, is_stream: bool) -> None:
    with model_that_says([{"say": said}], shared_dir / "templates" / f"{template}.jinja", script=THINK) as client:
        fields = {"reasoning_effort": effort} if effort else {}
        message = asked(client, is_stream=is_stream, **fields).message
    assert message.content == "Hi!" and getattr(message, "reasoning_content", None) == (None if effort else "Hm.")


def test_json_comes_after_thinking(shared_dir: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 42}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answers = [{"say": "Hm, {no}?\n</think>\n\nNo JSON!", "stubborn": True}]
    with model_that_says(answers, shared_dir / "templates" / "StepFun3.5-Flash.jinja", script=THINK) as client:
        message = asked(client, is_stream=False, response_format=wanted).message
    assert message.reasoning_content == "Hm, {no}?" and json.loads(message.content) == {"a": 42}
