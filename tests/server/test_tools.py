"""Tools, reasoning and their deltas through the real openai package; the engine's parts are scripted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.loopback import RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.params import Guided
from tokenmill.types import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatRequest,
    Part,
    Reasoning,
    TextPart,
    ThoughtPart,
    Tool,
    ToolCall,
    ToolChoice,
)

MODEL = "fake/tiny"
HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}},
    },
}
ANSWER: list[Part] = [
    ThoughtPart("The user "),
    ThoughtPart("asks."),
    TextPart("Let me"),
    TextPart(" look."),
    CallStart(0, "call_a", "weather"),
    CallArguments(0, '{"city"'),
    CallArguments(0, ': "Paris"}'),
    CallEnd(0),
    CallStart(1, "call_b", "now"),
    CallArguments(1, "{}"),
    CallEnd(1),
]


@pytest.fixture
def speaking(server: RunningServer) -> RunningServer:
    server.engine.parts = ANSWER
    return server


def asked(server: RunningServer) -> ChatRequest:
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest)
    return request


def check(message: Any) -> None:
    assert message.role == "assistant" and message.content == "Let me look."
    assert message.reasoning_content == "The user asks."
    first, second = message.tool_calls
    assert (first.id, first.type, first.function.name) == ("call_a", "function", "weather")
    assert json.loads(first.function.arguments) == {"city": "Paris"}
    assert (second.id, second.function.name, second.function.arguments) == ("call_b", "now", "{}")


def test_whole(client: openai.OpenAI, speaking: RunningServer) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
    check(reply.choices[0].message)
    assert reply.choices[0].finish_reason == "tool_calls"
    details = reply.usage.completion_tokens_details
    assert details.reasoning_tokens == 2
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 3)


def test_the_stream_helper_accumulates_the_same(client: openai.OpenAI, speaking: RunningServer) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS, n=2) as stream:
        final = stream.get_final_completion()
    assert [choice.finish_reason for choice in final.choices] == ["tool_calls"] * 2
    for choice in final.choices:
        check(choice.message)


def test_id_name_type_and_role_come_once(client: openai.OpenAI, speaking: RunningServer) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.id for call in calls if call.id] == ["call_a", "call_b"]
    assert [call.type for call in calls if call.type] == ["function", "function"]
    assert [call.function.name for call in calls if call.function.name] == ["weather", "now"]
    assert [call.index for call in calls] == [0, 0, 0, 1, 1]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert all(delta.content != "" for delta in deltas[1:])


def test_only_calls_have_null_content_and_unfinished_thought_too(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.parts = [CallStart(0, "c", "now"), CallArguments(0, "{}"), CallEnd(0)]
    assert client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS).choices[0].message.content is None
    server.engine.parts = [ThoughtPart("hm")]
    message = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message
    assert message.content is None and message.reasoning_content == "hm" and message.tool_calls is None


@pytest.mark.parametrize("is_stream", [False, True])
def test_custom_tools(client: openai.OpenAI, server: RunningServer, is_stream: bool) -> None:
    server.engine.parts = [
        CallStart(0, "c", "patch", "custom"),
        CallArguments(0, "aa"),
        CallArguments(0, "a"),
        CallEnd(0),
    ]
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, tools=[PATCH], stream=is_stream)
    if is_stream:  # the SDK's helper does not accumulate calls of custom tools
        deltas = [call.to_dict() for chunk in reply for call in chunk.choices[0].delta.tool_calls or ()]
        assert [sorted(delta) for delta in deltas] == [["custom", "id", "index", "type"], *[["custom", "index"]] * 2]
        call = {**deltas[0], "custom": {"name": "patch", "input": "".join(d["custom"]["input"] for d in deltas)}}
    else:
        call = reply.to_dict()["choices"][0]["message"]["tool_calls"][0]
    assert (call["id"], call["type"], call["custom"]) == ("c", "custom", {"name": "patch", "input": "aaa"})
    assert asked(server).tools == [Tool(name="patch", kind="custom", input_grammar=Guided("lark", "start: /a+/"))]


# ── what reaches the engine ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "parallel", "expected"),
    [
        (None, None, ToolChoice()),
        ("none", None, ToolChoice(mode="none")),
        ("auto", False, ToolChoice(mode="auto", parallel=False)),
        ("required", True, ToolChoice(mode="required")),
        ({"type": "function", "function": {"name": "now"}}, None, ToolChoice(mode="required", names=["now"])),
        ({"type": "custom", "custom": {"name": "patch"}}, None, ToolChoice(mode="required", names=["patch"])),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
            None,
            ToolChoice(mode="auto", names=["now"]),
        ),
    ],
)
def test_choices(client: openai.OpenAI, server: RunningServer, given: Any, parallel: Any, expected: ToolChoice) -> None:
    extra = {"tool_choice": given, "parallel_tool_calls": parallel}
    client.chat.completions.create(model=MODEL, messages=HELLO, tools=[*TOOLS, PATCH], extra_body=extra)
    assert asked(server).tool_choice == expected
    assert [tool.name for tool in asked(server).tools] == ["weather", "now", "patch"]
    assert asked(server).tools[0] == Tool(name="weather", description="Weather", parameters=SCHEMA)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_every_effort(client: openai.OpenAI, server: RunningServer, effort: Any) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort=effort)
    assert asked(server).reasoning == Reasoning(effort=effort)


def test_an_unknown_effort_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_effort must be one of none, minimal"):
        client.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="huge")  # type: ignore[call-overload]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_and_calls_in_the_history(client: openai.OpenAI, server: RunningServer, field: str) -> None:
    history: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            field: "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
                {"id": "b", "type": "function", "function": {"name": "now", "arguments": {"x": 1}}},
                {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "aa"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "sun"}]},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    _, turn, result = asked(server).messages
    assert turn.reasoning == "hm" and turn.content is None
    assert turn.tool_calls == [
        ToolCall(id="a", name="weather", arguments='{"city": "Paris"}'),
        ToolCall(id="b", name="now", arguments='{"x":1}'),
        ToolCall(id="c", name="patch", arguments="aa", kind="custom"),
    ]
    assert (result.role, result.tool_call_id, result.content) == ("tool", "a", "sun")


def test_service_tiers_change_the_priority(client: openai.OpenAI, server: RunningServer) -> None:
    for tier, priority in (("flex", 1), ("priority", -1), ("default", 0)):
        client.chat.completions.create(model=MODEL, messages=HELLO, service_tier=tier)  # type: ignore[call-overload]
        assert asked(server).priority == priority


@pytest.mark.parametrize(
    ("setting", "fields"), [("reasoning", ["reasoning"]), ("both", ["reasoning", "reasoning_content"])]
)
def test_the_name_of_what_was_thought_is_a_setting(serving: Serving, setting: Any, fields: list[str]) -> None:
    server = serving(ServerConfig(reasoning_field=setting))
    server.engine.parts = [ThoughtPart("hm"), TextPart("Hi")]
    body = {"model": MODEL, "messages": HELLO}
    message = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert sorted(name for name in message if name.startswith("reasoning")) == fields
    assert all(message[name] == "hm" for name in fields) and message["content"] == "Hi"
