"""Wrong bodies on Ollama's routes: always a 400 with one line of text, never a server error, and nothing runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.loopback import RunningServer
from tests.support.malformed_requests import NOT_NUMBERS, WRONG_BODIES
from tokenmill.params import INTEGERS, NUMBERS

GOOD: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": False},
    "/api/generate": {"model": "fake/tiny", "prompt": "Hi", "stream": False},
    "/api/embed": {"model": "fake/tiny", "input": "Hi"},
    "/api/embeddings": {"model": "fake/tiny", "prompt": "Hi"},
    "/api/show": {"model": "fake/tiny"},
}
CHANGING = ("/api/create", "/api/copy", "/api/pull")
OPTIONS = [*NUMBERS, *(name for name in INTEGERS if name != "n"), "num_predict", "num_ctx", "num_keep", "seed"]
OPTIONS += ["repeat_penalty", "repeat_last_n", "top_k"]
WRONG: dict[str, list[tuple[str, Any]]] = {
    "/api/chat": [
        *(("messages", value) for value in (5, "text", {}, [5], [[]], [{}], [{"role": 5}], [{"role": "wizard"}])),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        ("messages", [{"role": "user", "content": "x", "images": ["aaaa"]}]),
        ("messages", [{"role": "assistant", "tool_calls": [5]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]),
        ("tools", 5),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),  # the scripted engine calls none
        ("think", 5),
        ("think", True),
        ("format", 5),
        ("format", "yaml"),
        ("options", 5),
        ("stream", "yes"),
        ("keep_alive", "soon"),
        ("keep_alive", True),
        ("logprobs", 5),
        ("top_logprobs", 5),  # without logprobs
        ("truncate", 5),
        ("shift", 5),
    ],
    "/api/generate": [
        ("prompt", 5),
        ("system", 5),
        ("template", "{{ .Prompt }}"),
        ("context", [-1]),
        ("context", ["x"]),
        ("context", [10**9]),
        ("suffix", "x"),
        ("raw", 5),
        ("images", ["aaaa"]),
        ("width", 512),
    ],
    "/api/embed": [("input", 5), ("input", [5]), ("input", [""]), ("dimensions", 0), ("truncate", 5)],
    "/api/embeddings": [("prompt", 5), ("options", [])],
    "/api/show": [("model", 5), ("model", "")],
}


def require_refusal(server: RunningServer, path: str, content: bytes) -> None:
    reply = server.http.post(server.url + path, content=content, headers={"content-type": "application/json"})
    where = f"{path} {content[:120]!r}: {reply.status_code} {reply.text[:200]}"
    assert reply.status_code == 400 and list(reply.json()) == ["error"], where
    assert isinstance(reply.json()["error"], str) and "\n" not in reply.json()["error"], where


@pytest.mark.parametrize("path", [*GOOD, *CHANGING])
def test_bodies_that_are_no_objects(server: RunningServer, path: str) -> None:
    for body in WRONG_BODIES:
        require_refusal(server, path, body)
    assert server.engine.seen == []


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_options_that_are_no_numbers(server: RunningServer, path: str) -> None:
    for option in OPTIONS:
        for value in NOT_NUMBERS:
            body = json.dumps({**GOOD[path], "options": {option: "@"}}).replace('"@"', value)
            require_refusal(server, path, body.encode())
    assert server.engine.seen == []


@pytest.mark.parametrize("path", WRONG)
def test_fields_of_the_wrong_kind(server: RunningServer, path: str) -> None:
    for field, value in WRONG[path]:
        require_refusal(server, path, json.dumps({**GOOD[path], field: value}).encode())
    assert server.engine.seen == []
    assert server.post(path, GOOD[path]).status_code == 200, "and a right one is answered"
