"""Streams byte by byte: what comes in which order, and what never comes."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.fake_engine import STORY
from tests.support.loopback import GENERATIONS, RunningServer
from tokenmill.errors import RequestFailed
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.openai.render import ChatRendering

CHAT = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
COMPLETION = {"model": "fake/tiny", "prompt": ["a", "b"], "stream": True}


def frames(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return [block for block in text.split("\n\n") if block and not block.startswith(":")]


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    blocks = frames(reply.text)
    assert blocks[-1] == "data: [DONE]" and blocks.count("data: [DONE]") == 1
    assert all(block.startswith("data: ") for block in blocks)
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def test_headers(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", CHAT)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache" and reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-request-id"]


class WholeWrites:
    """Wraps an ASGI app; keeps the body messages it sends."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.sent: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep(message: Message) -> None:
            self.sent.append(message)
            await send(message)

        await self.app(scope, receive, keep)


LAST_FRAMES = {
    "openai": b"data: [DONE]\n\n",
    "anthropic": b'data: {"type":"message_stop"}\n\n',
    "ollama": b"}\n",
    "tgi": b"}\n\n",
    "llama.cpp": b"}\n\n",
}


@pytest.mark.parametrize("dialect", GENERATIONS)
def test_the_body_ends_in_one_write_with_its_last_frame(server: RunningServer, dialect: str) -> None:
    path, body = GENERATIONS[dialect]
    app = WholeWrites(server.app)
    TestClient(app).post(path, json={**body, "stream": True})
    assert app.sent[-1]["body"].endswith(LAST_FRAMES[dialect]) and not app.sent[-1].get("more_body", False)
    assert all(message["more_body"] for message in app.sent[1:-1])


PINGS = {
    "openai": b": ping\n\n",
    "anthropic": b'event: ping\ndata: {"type":"ping"}\n\n',
    "tgi": b": ping\n\n",
    "llama.cpp": b": ping\n\n",
}


@pytest.mark.parametrize("dialect", GENERATIONS)
def test_silence_is_filled_as_the_dialect_wants_it(server: RunningServer, dialect: str) -> None:
    path, body = GENERATIONS[dialect]
    server.engine.first_delay_s = 0.7  # a period is 0.3
    reply = server.post(path, {**body, "stream": True})
    if dialect not in PINGS:
        assert all(orjson.loads(line) for line in reply.content.splitlines()), "clients parse every line"
    else:
        assert PINGS[dialect] in reply.content


def test_a_beginning_knows_the_prompts_tokens(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GenerationFacts] = []

    def begin(rendering: ChatRendering, facts: GenerationFacts) -> bytes:
        seen.append(facts)
        return b""

    monkeypatch.setattr(ChatRendering, "begin", begin)
    reply = server.post("/v1/chat/completions", CHAT)
    assert reply.status_code == 200 and seen[0].request_id == reply.headers["request-id"]
    assert (seen[0].usage.prompt_tokens, seen[0].usage.completion_tokens) == (len("<user>Hi") + 1, 0)
    assert seen[0].first_token_s is not None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [None, False, True])
def test_chat_order(server: RunningServer, n: int, include_usage: bool | None) -> None:
    body: dict[str, Any] = {**CHAT, "n": n}
    if include_usage is not None:
        body["stream_options"] = {"include_usage": include_usage}
    received = chunks(server.post("/v1/chat/completions", body))
    assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in received}) == 1
    if include_usage:
        last = received.pop()
        assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in received)
    else:
        assert all("usage" not in chunk for chunk in received)
    for index in range(n):
        own = [c["choices"][0] for c in received if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "stop"
        assert all(c["finish_reason"] is None for c in own[:-1])
        assert all(c["delta"]["content"] for c in own[1:-1]), "an empty delta"
        assert "".join(c["delta"]["content"] for c in own[1:-1]) == STORY


def test_completion_order(server: RunningServer) -> None:
    received = chunks(server.post("/v1/completions", {**COMPLETION, "n": 2, "stream_options": {"include_usage": True}}))
    assert received[-1]["choices"] == [] and received[-1]["usage"]["prompt_tokens"] == 4
    finishes = [c["choices"][0]["index"] for c in received[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2, 3]


def test_failure_is_the_last_thing(server: RunningServer) -> None:
    server.engine.failure = RequestFailed("it broke")
    blocks = frames(server.post("/v1/chat/completions", CHAT).text)
    error = orjson.loads(blocks[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] == "it broke"
    assert "data: [DONE]" not in blocks


def test_an_unforeseen_failure_tells_no_details(server: RunningServer) -> None:
    server.engine.failure = ValueError("secret prompt text")  # type: ignore[assignment]
    reply = server.post("/v1/chat/completions", CHAT)
    assert "secret" not in reply.text and '"code":"internal_error"' in reply.text
    whole = server.post("/v1/chat/completions", {**CHAT, "stream": False})
    assert whole.status_code == 500 and "secret" not in whole.text


def test_silence_is_filled_with_comments(server: RunningServer) -> None:
    server.engine.first_delay_s = 0.8  # the server's period is 0.3 s
    reply = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 2})
    assert ": ping\n\n" in reply.text
    assert chunks(reply)[0]["choices"][0]["delta"]["role"] == "assistant"


def test_usage_none_is_not_sent_without_stream(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {**CHAT, "stream": False})
    assert reply.json()["usage"]["completion_tokens"] > 0 and reply.headers["content-type"] == "application/json"
