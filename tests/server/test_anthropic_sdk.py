"""The real anthropic package against a real HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from tests.support.fake_engine import INFO, STORY
from tests.support.loopback import RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.errors import EngineDead, RequestFailed
from tokenmill.types import CallArguments, CallEnd, CallStart, ChatRequest, TextPart, ThoughtPart

MODEL = "fake/tiny"
HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}
ABLE = replace(INFO, can_call_tools=True, can_think=True)


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def asked(server: RunningServer) -> ChatRequest:
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest)
    return request


def folded(client: anthropic.Anthropic, **extra: Any) -> dict[str, Any]:
    """The message that the SDK makes of a stream; ids differ between two replies."""
    with client.messages.stream(model=MODEL, **extra) as stream:
        return {**stream.get_final_message().to_dict(), "id": None}


def whole(client: anthropic.Anthropic, **extra: Any) -> dict[str, Any]:
    return {**client.messages.create(model=MODEL, **extra).to_dict(), "id": None}


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_has_all_fields(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.create(model=MODEL, max_tokens=1000, messages=HELLO)
    assert reply.id.startswith("msg_") and (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in reply.content] == [("text", STORY)]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    prompt = len("<user>Hello") + 1
    assert (reply.usage.input_tokens, reply.usage.cache_read_input_tokens) == (prompt - 2, 2)
    assert (reply.usage.cache_creation_input_tokens, reply.usage.output_tokens) == (0, len(STORY.split()))
    assert reply._request_id and reply._request_id.startswith("req-")


def test_a_stream_folded_is_the_whole_message(claude: anthropic.Anthropic) -> None:
    assert folded(claude, max_tokens=1000, messages=HELLO) == whole(claude, max_tokens=1000, messages=HELLO)


def test_stop_reasons(claude: anthropic.Anthropic, server: RunningServer) -> None:
    stopped = claude.messages.create(model=MODEL, max_tokens=99, messages=HELLO, stop_sequences=["girl", "Lily"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "girl")
    assert stopped.content[0].text == STORY[: STORY.index("girl")]
    cut = claude.messages.create(model=MODEL, max_tokens=3, messages=HELLO)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    nothing = claude.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
    assert (nothing.stop_reason, nothing.content) == ("max_tokens", [])
    assert asked(server).params.max_tokens == 0


def test_system_as_text_as_blocks_and_inside(claude: anthropic.Anthropic, server: RunningServer) -> None:
    blocks: Any = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "x"},
    ]
    for system, expected in (("Be brief", "Be brief"), (blocks, "Be\nx")):
        claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO, system=system)
        first = asked(server).messages[0]
        assert (first.role, first.content) == ("system", expected)
    claude.messages.create(model=MODEL, max_tokens=9, messages=[*HELLO, {"role": "system", "content": "Now"}])
    assert [message.role for message in asked(server).messages] == ["user", "system"]


def test_turns_of_one_role_are_one(claude: anthropic.Anthropic, server: RunningServer) -> None:
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}, *HELLO]
    claude.messages.create(model=MODEL, max_tokens=9, messages=turns)
    assert [(message.role, message.content) for message in asked(server).messages] == [("user", "a\nb\nHello")]


def test_accounting_blocks_are_left_out(claude: anthropic.Anthropic, server: RunningServer) -> None:
    accounting = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=9f3;"}
    system: Any = [accounting, {"type": "text", "text": "Be brief"}]
    claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO, system=system)
    assert asked(server).messages[0].content == "Be brief"


def test_tokens_are_counted_as_they_are_used(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief")
    used = claude.messages.create(model=MODEL, max_tokens=3, messages=HELLO, system="Be brief").usage
    assert (
        counted.input_tokens
        == used.input_tokens + used.cache_read_input_tokens
        == len("<system>Be brief<user>Hello") + 1
    )


def test_sampling_parameters_reach_the_engine(claude: anthropic.Anthropic, server: RunningServer) -> None:
    extra = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
    claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO, extra_body=extra)
    params = asked(server).params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 9)


def test_a_schema_for_the_answer(claude: anthropic.Anthropic, server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: Any = {"format": {"type": "json_schema", "schema": schema}}
    claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO, output_config=wanted)
    guided = asked(server).params.guided
    assert guided is not None and guided.kind == "json_schema" and '"a"' in guided.text


# ── models and errors ──────────────────────────────────────────────────────────────────────────────────


def test_models_by_the_version_header(claude: anthropic.Anthropic, server: RunningServer) -> None:
    models = list(claude.models.list(limit=1))
    assert [(model.id, model.type, model.lifecycle, model.max_input_tokens) for model in models] == [
        (MODEL, "model", "active", 512)
    ]
    assert models[0].capabilities is not None and not models[0].capabilities.image_input.supported
    assert claude.models.retrieve(MODEL).display_name == MODEL
    assert server.get("/v1/models").json()["object"] == "list"
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nobody's")


def test_errors_have_their_types(claude: anthropic.Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model=MODEL, max_tokens=-1, messages=HELLO)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == refused.value.request_id and "max_tokens" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="nobody's", max_tokens=1, messages=HELLO)
    server.engine.max_running = 0
    with pytest.raises(anthropic.RateLimitError) as full:
        claude.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
    assert full.value.response.headers["retry-after"] == "3"
    server.engine.state = "draining"
    with pytest.raises(anthropic.InternalServerError) as overloaded:
        claude.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
    assert overloaded.value.status_code == 529 and "overloaded_error" in str(overloaded.value.body)


def test_a_failure_in_a_stream_is_raised(claude: anthropic.Anthropic, server: RunningServer) -> None:
    server.engine.failure = RequestFailed("it broke")
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        folded(claude, max_tokens=99, messages=HELLO)
    server.engine.failure, server.engine.fail_after = EngineDead("gone"), 0
    with pytest.raises(anthropic.InternalServerError) as failed:
        folded(claude, max_tokens=99, messages=HELLO)
    assert failed.value.status_code == 529, "nothing was sent yet"


def test_keys(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=("secret",)))
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as right:
        assert right.messages.create(model=MODEL, max_tokens=1, messages=HELLO).content
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        wrong.models.list()
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
    old = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    assert server.post(
        "/v1/messages?beta=true", {"model": MODEL, "max_tokens": 1, "messages": HELLO}, headers=old
    ).is_success


# ── tools and thinking ─────────────────────────────────────────────────────────────────────────────────

CALLS: list[Any] = [
    ThoughtPart("Let me "),
    ThoughtPart("look."),
    TextPart("\n"),
    TextPart("I look "),
    TextPart("it up."),
    CallStart(0, "call_1", "weather"),
    CallArguments(0, '{"city": "Mün'),
    CallArguments(0, 'chen", "days": [1, 2]}'),
    CallEnd(0),
    CallStart(1, "functions.weather:1", "weather"),
    CallArguments(1, "{}"),
    CallEnd(1),
]
ADAPTIVE: Any = {"type": "adaptive"}


def test_calls_and_thoughts(claude: anthropic.Anthropic, server: RunningServer) -> None:
    server.engine.info, server.engine.parts = ABLE, CALLS
    extra: Any = {"max_tokens": 99, "messages": HELLO, "tools": [WEATHER], "thinking": ADAPTIVE}
    reply = whole(claude, **extra)
    assert folded(claude, **extra) == reply
    thought, text, first, second = reply["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Let me look.") and thought["signature"]
    assert text == {"type": "text", "text": "\nI look it up."}
    assert first == {
        "type": "tool_use",
        "id": "call_1",
        "name": "weather",
        "input": {"city": "München", "days": [1, 2]},
    }
    assert second["input"] == {} and second["id"].replace("_", "").isalnum()
    assert reply["stop_reason"] == "tool_use"
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] == 2


def test_the_history_comes_back_as_it_was(claude: anthropic.Anthropic, server: RunningServer) -> None:
    server.engine.info, server.engine.parts = ABLE, CALLS
    for display in ("summarized", "omitted"):
        thinking: Any = {"type": "adaptive", "display": display}
        extra: Any = {"max_tokens": 99, "tools": [WEATHER], "thinking": thinking}
        reply = whole(claude, messages=HELLO, **extra)
        assert reply["content"][0]["thinking"] == ("Let me look." if display == "summarized" else "")
        streamed = folded(claude, messages=HELLO, **extra)
        if display == "omitted":  # no two seals are alike
            streamed["content"][0]["signature"] = reply["content"][0]["signature"]
        assert streamed == reply
        results: Any = [
            {"type": "tool_result", "tool_use_id": reply["content"][2]["id"], "content": "sunny"},
            {
                "type": "tool_result",
                "tool_use_id": reply["content"][3]["id"],
                "content": [{"type": "text", "text": "no such place"}],
                "is_error": True,
            },
            {"type": "text", "text": "So?"},
        ]
        turns = [*HELLO, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
        whole(claude, messages=turns, **extra)
        _, said, first, second, last = asked(server).messages
        assert (said.reasoning, said.content) == ("Let me look.", "\nI look it up.")
        assert [(call.id, call.name) for call in said.tool_calls] == [
            ("call_1", "weather"),
            ("functions.weather:1", "weather"),
        ]
        assert said.tool_calls[0].arguments == '{"city":"München","days":[1,2]}'
        assert (first.role, first.tool_call_id, first.content) == ("tool", "call_1", "sunny")
        assert (second.tool_call_id, second.content) == ("functions.weather:1", "Error: no such place")
        assert (last.role, last.content) == ("user", "So?")


def test_notes_between_tools_are_thoughts(claude: anthropic.Anthropic, server: RunningServer) -> None:
    server.engine.info = ABLE
    extra: Any = {"max_tokens": 99, "messages": HELLO, "tools": [WEATHER], "thinking": {"type": "between_tools"}}
    server.engine.parts = CALLS[2:]
    reply = whole(claude, **extra)
    assert folded(claude, **extra) == reply
    assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use", "tool_use"]
    server.engine.parts = [TextPart("All "), TextPart("done.")]
    reply = whole(claude, **extra)
    assert folded(claude, **extra) == reply
    assert [(block["type"], block["text"]) for block in reply["content"]] == [("text", "All done.")]


@pytest.mark.parametrize(
    ("choice", "mode", "names", "parallel"),
    [
        ({"type": "auto"}, "auto", None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "weather"}, "required", ["weather"], True),
        ({"type": "none"}, "none", None, True),
    ],
)
def test_tool_choices(
    claude: anthropic.Anthropic,
    server: RunningServer,
    choice: Any,
    mode: str,
    names: list[str] | None,
    parallel: bool,
) -> None:
    server.engine.info = ABLE
    tool: Any = {**WEATHER, "strict": True}
    claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO, tools=[tool], tool_choice=choice)
    got = asked(server)
    assert (got.tool_choice.mode, got.tool_choice.names, got.tool_choice.parallel) == (mode, names, parallel)
    assert [(one.name, one.description, one.strict) for one in got.tools] == [("weather", "Tells it.", True)]


@pytest.mark.parametrize(
    ("thinking", "is_on", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
        ({"type": "adaptive"}, True, None),
        ({"type": "disabled"}, False, None),
        ({"type": "between_tools"}, False, None),
    ],
)
def test_thinking_reaches_the_engine(
    claude: anthropic.Anthropic, server: RunningServer, thinking: Any, is_on: bool, budget: int | None
) -> None:
    server.engine.info = ABLE
    effort: Any = {"effort": "xhigh"}
    claude.messages.create(model=MODEL, max_tokens=2000, messages=HELLO, thinking=thinking, output_config=effort)
    reasoning = asked(server).reasoning
    assert (reasoning.is_on, reasoning.budget) == (is_on, budget)
    assert reasoning.effort == ("xhigh" if is_on else None)
