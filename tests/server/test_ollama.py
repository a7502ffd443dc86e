"""Ollama's dialect, asked by Ollama's own client: chat, generate, streams, options, errors, embeddings, models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest

from tests.support.fake_engine import INFO, STORY, FakeEngine
from tests.support.loopback import RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.errors import RequestFailed
from tokenmill.server.gate import EngineGate
from tokenmill.types import CallArguments, CallEnd, CallStart, ChatRequest, PromptRequest, TextPart, ThoughtPart

MODEL = "fake/tiny"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def asked(server: RunningServer) -> Iterator[ollama.Client]:
    server.engine.info = replace(INFO, can_call_tools=True, can_think=True)
    with ollama.Client(host=server.url) as client:
        yield client
    server.engine.info = INFO


def lines_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n") and "\n\n" not in reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_whole_chat(asked: ollama.Client) -> None:
    reply = asked.chat(MODEL, HELLO)
    assert reply.message.content == STORY and reply.message.role == "assistant"
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "stop")
    assert reply.prompt_eval_count and reply.eval_count and reply.total_duration
    parts = (reply.load_duration or 0) + (reply.prompt_eval_duration or 0) + (reply.eval_duration or 0)
    assert abs(parts - reply.total_duration) < 1000, "nanoseconds, and they add up"


def test_a_streamed_chat_is_the_whole_one(asked: ollama.Client) -> None:
    whole = asked.chat(MODEL, HELLO)
    chunks = list(asked.chat(MODEL, HELLO, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == whole.eval_count and chunks[-1].prompt_eval_count == whole.prompt_eval_count


def test_a_stream_has_no_empty_line_and_no_ping(server: RunningServer) -> None:
    server.engine.first_delay_s = 0.7  # the server's keep_alive_s is 0.3
    reply = server.post("/api/chat", {"model": MODEL, "messages": HELLO})
    assert len(lines_of(reply)) > 5


def test_a_body_need_not_be_called_json(server: RunningServer) -> None:
    """As in every example of Ollama's documentation: curl -d without a header."""
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": False})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post(server.url + "/api/chat", content=body, headers=headers).status_code == 200
    from_a_page = {**headers, "origin": "https://evil.example"}
    refused = server.http.post(server.url + "/api/chat", content=body, headers=from_a_page)
    assert refused.status_code == 415 and isinstance(refused.json()["error"], str)


def test_options_become_parameters(server: RunningServer, asked: ollama.Client) -> None:
    options = {"temperature": 0.1, "top_k": 7, "top_p": 0.5, "seed": 3, "num_predict": 4, "stop": ["x"], "min_p": 0.2}
    asked.chat(MODEL, HELLO, options={**options, "repeat_penalty": 1.3, "num_ctx": 512, "num_keep": 4})
    params = server.engine.seen[-1].params  # type: ignore[union-attr]
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.max_tokens) == (0.1, 7, 0.5, 3, 4)
    assert (params.stop, params.min_p, params.repetition_penalty, params.context_keep) == (["x"], 0.2, 1.3, None)
    asked.chat(MODEL, HELLO, options={"num_predict": -1, "seed": -1, "top_k": -1, "repeat_last_n": 0})
    params = server.engine.seen[-1].params  # type: ignore[union-attr]
    assert (params.max_tokens, params.seed, params.top_k, params.temperature) == (None, None, 0, 0.8)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_gpu", 1),
        ("num_thread", 8),
        ("use_mlock", True),
        ("num_ctx", 4096),
        ("tfs_z", 0.5),
        ("mirostat", 1),
        ("penalize_newline", False),
        ("temperature", "hot"),
        ("temperature", -1),
        ("num_predict", -3),
        ("stop", [1]),
        ("seed", 1.5),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(asked: ollama.Client, option: str, value: object) -> None:
    with pytest.raises(ollama.ResponseError, match=option) as refusal:
        asked.chat(MODEL, HELLO, options={option: value})
    assert refusal.value.status_code == 400


def test_a_window_of_penalties_is_refused_where_it_matters(asked: ollama.Client) -> None:
    asked.chat(MODEL, HELLO, options={"repeat_last_n": 64})
    with pytest.raises(ollama.ResponseError, match="repeat_last_n"):
        asked.chat(MODEL, HELLO, options={"repeat_last_n": 64, "repeat_penalty": 1.1})


def test_format(server: RunningServer, asked: ollama.Client) -> None:
    asked.chat(MODEL, HELLO, format="json")
    assert server.engine.seen[-1].params.guided.kind == "json_object"  # type: ignore[union-attr]
    asked.chat(MODEL, HELLO, format={"type": "object", "properties": {"age": {"type": "integer"}}})
    assert server.engine.seen[-1].params.guided.kind == "json_schema"  # type: ignore[union-attr]
    refused = server.post("/api/chat", {"model": MODEL, "messages": HELLO, "format": "yaml"})
    assert refused.status_code == 400 and "invalid format" in refused.json()["error"]


def test_logprobs(asked: ollama.Client) -> None:
    reply = asked.chat(MODEL, HELLO, logprobs=True, top_logprobs=2)
    assert reply.logprobs is not None
    assert "".join(one.token for one in reply.logprobs) == STORY
    assert len(reply.logprobs[0].top_logprobs or ()) == 2
    chunks = list(asked.chat(MODEL, HELLO, logprobs=True, stream=True))
    assert all(chunk.logprobs for chunk in chunks[:-1])
    with pytest.raises(ollama.ResponseError, match="top_logprobs must be between 0 and 20"):
        asked.chat(MODEL, HELLO, logprobs=True, top_logprobs=21)


# ── tools and thinking ─────────────────────────────────────────────────────────────────────────────────

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_think(server: RunningServer, asked: ollama.Client) -> None:
    for think, is_on, effort in ((True, True, None), (False, False, None), ("high", True, "high"), (None, None, None)):
        asked.chat(MODEL, HELLO, think=think)  # type: ignore[call-overload]
        request = server.engine.seen[-1]
        assert isinstance(request, ChatRequest)
        assert (request.reasoning.is_on, request.reasoning.effort) == (is_on, effort)
    with pytest.raises(ollama.ResponseError, match="invalid think value"):
        asked.chat(MODEL, HELLO, think="enormously")  # type: ignore[call-overload]
    server.engine.info = INFO
    for think in (True, "high"):
        with pytest.raises(ollama.ResponseError, match='"fake/tiny" does not support thinking') as refusal:
            asked.chat(MODEL, HELLO, think=think)  # type: ignore[call-overload]
        assert refusal.value.status_code == 400
    asked.chat(MODEL, HELLO, think=False)


def test_tools_go_in(server: RunningServer, asked: ollama.Client) -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in ("Paris", "Rome")]
    history = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    asked.chat(MODEL, history, tools=[WEATHER])
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest)
    assert request.tools[0].name == "weather" and request.tools[0].parameters == WEATHER["function"]["parameters"]  # type: ignore[index]
    _, turn, first, second = request.messages
    assert [json.loads(call.arguments) for call in turn.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert [first.tool_call_id, second.tool_call_id] == [call.id for call in turn.tool_calls]
    server.engine.info = INFO
    with pytest.raises(ollama.ResponseError, match='"fake/tiny" does not support tools'):
        asked.chat(MODEL, HELLO, tools=[WEATHER])


THINKS_AND_CALLS = [
    ThoughtPart("The user "),
    ThoughtPart("wants rain."),
    TextPart("Let me "),
    TextPart("look."),
    CallStart(0, "call_a", "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Paris"}'),
    CallEnd(0),
    CallStart(1, "call_b", "now"),
    CallArguments(1, "{}"),
    CallEnd(1),
]


def test_thoughts_and_calls_come_out(server: RunningServer, asked: ollama.Client) -> None:
    server.engine.parts = THINKS_AND_CALLS
    message = asked.chat(MODEL, HELLO, tools=[WEATHER], think=True).message
    assert (message.thinking, message.content) == ("The user wants rain.", "Let me look.")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == [("weather", {"city": "Paris"}), ("now", {})]


def test_streamed_thoughts_and_calls(server: RunningServer, asked: ollama.Client) -> None:
    server.engine.parts = THINKS_AND_CALLS
    lines = lines_of(server.post("/api/chat", {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "think": True}))
    messages = [line["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages) == "The user wants rain."
    assert "".join(message["content"] for message in messages) == "Let me look."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert [call["id"] for call in calls] == ["call_a", "call_b"], "each is sent whole, once"
    assert calls[0]["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
    assert calls[1]["function"] == {"index": 1, "name": "now", "arguments": {}}
    assert lines[-1]["done"] and lines[-1]["done_reason"] == "stop"
    chunks = list(asked.chat(MODEL, HELLO, tools=[WEATHER], stream=True))
    assert sum(len(chunk.message.tool_calls or ()) for chunk in chunks) == 2


def test_a_call_that_was_cut_off_is_left_out(server: RunningServer, asked: ollama.Client) -> None:
    server.engine.parts = [TextPart("Let me look."), *THINKS_AND_CALLS[4:6]]
    for chunks in ([asked.chat(MODEL, HELLO, tools=[WEATHER])], asked.chat(MODEL, HELLO, tools=[WEATHER], stream=True)):
        found = list(chunks)
        assert not any(chunk.message.tool_calls for chunk in found)
        assert "".join(chunk.message.content or "" for chunk in found) == "Let me look."


def test_thoughts_of_generate(server: RunningServer, asked: ollama.Client) -> None:
    server.engine.parts = THINKS_AND_CALLS[:4]
    reply = asked.generate(MODEL, "Hi", think=True)
    assert (reply.thinking, reply.response) == ("The user wants rain.", "Let me look.")


# ── generate ───────────────────────────────────────────────────────────────────────────────────────────


def test_generate(server: RunningServer, asked: ollama.Client) -> None:
    reply = asked.generate(MODEL, "Hi", system="Be brief")
    assert reply.response == STORY and reply.done_reason == "stop" and reply.context
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest)
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief"), ("user", "Hi")]
    chunks = list(asked.generate(MODEL, "Hi", stream=True))
    assert "".join(chunk.response or "" for chunk in chunks) == STORY and chunks[-1].context


def test_a_conversation_by_context(server: RunningServer, asked: ollama.Client) -> None:
    first = asked.generate(MODEL, "Hi")
    second = asked.generate(MODEL, "More", context=first.context)
    assert list(second.context or ())[: len(first.context or ())] == list(first.context or ())
    request = server.engine.seen[-1]
    assert isinstance(request, PromptRequest) and isinstance(request.prompt, list)
    assert server.engine.detokenize(request.prompt).endswith("<user>More")


def test_raw(server: RunningServer, asked: ollama.Client) -> None:
    reply = asked.generate(MODEL, "[INST] Hi [/INST]", raw=True)
    assert reply.context is None
    assert isinstance(server.engine.seen[-1], PromptRequest)
    for field in ({"system": "x"}, {"template": "{{ messages }}"}, {"context": [1]}):
        with pytest.raises(ollama.ResponseError, match="raw mode does not support template, system, or context"):
            asked.generate(MODEL, "Hi", raw=True, **field)  # type: ignore[call-overload]


def test_suffix(server: RunningServer, asked: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match='"fake/tiny" does not support insert'):
        asked.generate(MODEL, "def f(", suffix="return x")
    server.engine.info = replace(INFO, can_fill_in=True)
    asked.generate(MODEL, "def f(", suffix="return x")
    request = server.engine.seen[-1]
    assert isinstance(request, PromptRequest) and (request.prompt, request.suffix) == ("def f(", "return x")
    assert asked.show(MODEL).capabilities == ["completion", "insert"]
    with pytest.raises(ollama.ResponseError, match="suffix does not combine"):
        asked.generate(MODEL, "def f(", suffix="return x", system="Be brief")


def test_thoughts_need_the_template(asked: ollama.Client) -> None:
    for field in ({"raw": True}, {"context": [1, 2]}):
        with pytest.raises(ollama.ResponseError, match="think does not combine"):
            asked.generate(MODEL, "Hi", think=True, **field)  # type: ignore[call-overload]
        assert asked.generate(MODEL, "Hi", think=False, **field).done  # type: ignore[call-overload]


def test_a_template_is_jinja(server: RunningServer, asked: ollama.Client) -> None:
    asked.generate(MODEL, "Hi", template="{{ messages[0].content }}!")
    assert server.engine.seen[-1].chat_template == "{{ messages[0].content }}!"  # type: ignore[union-attr]
    with pytest.raises(ollama.ResponseError, match="Go templates"):
        asked.generate(MODEL, "Hi", template="{{ .System }} {{ .Prompt }}")


def test_without_a_prompt_the_model_is_loaded(server: RunningServer, asked: ollama.Client) -> None:
    assert asked.generate(MODEL).done_reason == "load"
    assert asked.chat(MODEL, keep_alive="5m").done_reason == "load"
    assert [chunk.done_reason for chunk in asked.chat(MODEL, stream=True)] == ["load"]
    assert server.engine.seen == []
    with pytest.raises(ollama.ResponseError, match="can't be unloaded"):
        asked.generate(MODEL, keep_alive=0)
    assert asked.generate(MODEL, "Hi", keep_alive=0).done
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        asked.generate(MODEL, "Hi", keep_alive="soon")


def test_a_long_history_is_cut_only_when_asked(server: RunningServer, asked: ollama.Client) -> None:
    long = [{"role": "system", "content": "S"}, *({"role": "user", "content": "x" * 100} for _ in range(9))]
    body = {"model": MODEL, "messages": long, "stream": False}
    refused = server.post("/api/chat", body)
    assert refused.status_code == 400 and "tokens" in refused.json()["error"]
    assert server.post("/api/chat", {**body, "truncate": True}).status_code == 200
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest)
    assert [m.role for m in request.messages] == ["system", "user", "user", "user", "user"]


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "missing request body"),
        (b"{}", 400, "model is required"),
        (b'{"model": "nobody"}', 404, "model 'nobody' not found"),
        (b'{"model": "fake/tiny", "messages": 5}', 400, "messages must be a list"),
        (b'{"model": "fake/tiny", "messages": [{"role": "wizard"}]}', 400, "role"),
        (b'{"model": "fake/tiny", "messages": [{"role": "user", "images": ["aaaa"]}]}', 400, "images"),
        (b"[]", 400, "JSON object"),
    ],
)
def test_errors(server: RunningServer, body: bytes, status: int, text: str) -> None:
    reply = server.http.post(server.url + "/api/chat", content=body)
    assert reply.status_code == status and list(reply.json()) == ["error"] and text in reply.json()["error"]


def test_errors_of_the_outer_layers(server: RunningServer) -> None:
    assert ": Not Found (" in server.get("/api/nothing").json()["error"]
    assert server.get("/api/chat").status_code == 405 and isinstance(server.get("/api/chat").json()["error"], str)
    server.engine.max_running = 0
    busy = server.post("/api/chat", {"model": MODEL, "messages": HELLO})
    assert (busy.status_code, busy.json()["error"][:11]) == (503, "server busy")


def test_an_error_in_a_stream_is_its_last_line(server: RunningServer, asked: ollama.Client) -> None:
    server.engine.failure = RequestFailed("the tokens ran out")
    lines = lines_of(server.post("/api/chat", {"model": MODEL, "messages": HELLO}))
    assert lines[-1] == {"error": "the tokens ran out"} and len(lines) == 4
    with pytest.raises(ollama.ResponseError, match="the tokens ran out"):
        list(asked.chat(MODEL, HELLO, stream=True))


def test_names(asked: ollama.Client) -> None:
    for name in ("fake/tiny", "fake/tiny:latest", "Fake/Tiny"):
        assert asked.chat(name, HELLO).model == name
    with pytest.raises(ollama.ResponseError, match="model 'fake/tiny:7b' not found") as refusal:
        asked.chat("fake/tiny:7b", HELLO)
    assert refusal.value.status_code == 404


# ── embeddings ─────────────────────────────────────────────────────────────────────────────────────────


def test_embeddings(asked: ollama.Client) -> None:
    reply = asked.embed(MODEL, ["a cat", "a dog"])
    assert len(reply.embeddings) == 2 and len(reply.embeddings[0]) == 16 and reply.prompt_eval_count == 12
    assert abs(sum(value * value for value in reply.embeddings[0]) - 1) < 1e-5
    assert len(asked.embed(MODEL, "a cat", dimensions=4).embeddings[0]) == 4
    assert asked.embed(MODEL, []).embeddings == []
    assert len(asked.embed(MODEL, "x" * 2000).embeddings) == 1, "cut to the context"
    with pytest.raises(ollama.ResponseError, match="exceeds the context length"):
        asked.embed(MODEL, "x" * 2000, truncate=False)
    assert len(asked.embeddings(MODEL, "a cat").embedding) == 16


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────


def test_tags_show_and_ps(asked: ollama.Client) -> None:
    listed = asked.list().models[0]
    assert (listed.model, listed.details.family if listed.details else None) == ("fake/tiny:latest", "llama")
    shown = asked.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"
    assert (shown.modelinfo["llama.context_length"], shown.modelinfo["llama.embedding_length"]) == (512, 16)
    running = asked.ps().models[0]
    assert (running.name, running.context_length) == ("fake/tiny:latest", 512) and running.expires_at
    with pytest.raises(ollama.ResponseError, match="model 'x' not found"):
        asked.show("x")


def test_what_clients_look_for_first(server: RunningServer, serving: Serving) -> None:
    for method in ("GET", "HEAD"):
        reply = server.http.request(method, server.url + "/api/version")
        assert reply.status_code == 200 and (method == "HEAD" or reply.json() == {"version": "0.33.0"})
        root = server.http.request(method, server.url + "/")
        assert root.status_code == 200 and (method == "HEAD" or root.text == "Ollama is running")
        assert server.http.request(method, server.url + "/api/tags").status_code == 200
    page = server.get("/", headers={"accept": "text/html"})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    keyed = serving(ServerConfig(api_key=("secret",)))
    assert keyed.get("/api/version").status_code == 200 and keyed.get("/").status_code == 200
    assert keyed.get("/api/tags").json() == {"error": keyed.get("/api/tags").json()["error"]}
    with ollama.Client(host=keyed.url, headers={"authorization": "Bearer secret"}) as client:
        assert client.chat(MODEL, HELLO).done


def test_while_the_model_loads(serving: Serving) -> None:
    loading = serving(gate=EngineGate())
    reply = loading.post("/api/chat", {"model": MODEL, "messages": HELLO})
    assert reply.status_code == 503 and "loading" in reply.json()["error"]
    assert FakeEngine().info == INFO
