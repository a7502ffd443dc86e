"""Wrong bodies over all routes: always 4xx, always the full error body, at once, and the server goes on as before."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import orjson
import pytest

from tests.support.fake_engine import STORY
from tests.support.loopback import RunningServer
from tests.support.malformed_requests import (
    CHAT,
    COMPLETION,
    EMBED,
    GOOD,
    NUMERIC,
    cases,
    require_error_body,
)
from tests.support.timing import SOON_S


def test_every_wrong_body_is_refused_by_name(server: RunningServer) -> None:
    count, slowest = 0, 0.0
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}, timeout=SOON_S) as client:
        for path, body, blamed in cases():
            started = time.process_time()  # client and server are one process
            reply = client.post(path, content=body)
            slowest = max(slowest, time.process_time() - started)
            where = f"{path} {body[:120]!r} → {reply.status_code} {reply.text[:300]}"
            assert 400 <= reply.status_code < 500, where
            error = require_error_body(reply)
            if blamed is not None:
                assert (error["param"] or "").split("[")[0].split(".")[0] == blamed, where
            count += 1
    assert count >= 600 and slowest < 5.0
    assert server.engine.running == {}
    reply = server.post(CHAT, GOOD[CHAT])
    assert reply.json()["choices"][0]["message"]["content"] == STORY


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/jsonp"},
        {"content-type": ""},
        {},
        {"content-type": "application/json", "content-encoding": "br"},
    ],
)
@pytest.mark.parametrize("path", GOOD)
def test_wrong_content_type(server: RunningServer, path: str, headers: dict[str, str]) -> None:
    reply = server.http.post(server.url + path, content=orjson.dumps(GOOD[path]), headers=headers)
    assert reply.status_code == 415
    require_error_body(reply)


@pytest.mark.parametrize("accept", ["text/html", "*/*;q=0", "nonsense", ""])
@pytest.mark.parametrize("path", GOOD)
def test_odd_accept_headers_and_charsets_do_no_harm(server: RunningServer, path: str, accept: str) -> None:
    headers = {"accept": accept, "content-type": "application/json; charset=UTF-8"}
    assert server.http.post(server.url + path, content=orjson.dumps(GOOD[path]), headers=headers).status_code == 200


def test_null_and_unknown_fields_are_ignored(server: RunningServer) -> None:
    for path, names in NUMERIC.items():
        body = {**GOOD[path], **dict.fromkeys(names), "brand_new_field": {"x": [1]}, "metadata": {"a": "b"}}
        assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 0, -1])
def test_seeds_at_the_limits(server: RunningServer, seed: int) -> None:
    assert server.post(CHAT, {**GOOD[CHAT], "seed": seed}).status_code == 200
    assert server.engine.seen[-1].params.seed == seed  # type: ignore[union-attr]


def test_combinations(server: RunningServer) -> None:
    refused = [
        (COMPLETION, {"stream": True, "best_of": 3, "n": 2}, "best_of"),
        (COMPLETION, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETION, {"stream": True, "use_beam_search": True, "n": 2}, "use_beam_search"),
        (COMPLETION, {"stream": True, "echo": True, "logprobs": 1}, "echo"),
        (COMPLETION, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETION, {"prompt": ["x"] * 100, "n": 100}, "n"),
        (COMPLETION, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ]
    for path, extra, blamed in refused:
        reply = server.post(path, {**GOOD[path], **extra})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, blamed), reply.text


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused_while_they_arrive(server: RunningServer, chunked: bool) -> None:
    piece = b" " * 65536

    def pieces() -> Iterator[bytes]:
        for _ in range(320):  # 20 MiB; the limit is 8
            yield piece

    content = pieces() if chunked else piece * 320
    reply = httpx.post(server.url + CHAT, content=content, headers={"content-type": "application/json"}, timeout=10)
    assert reply.status_code == 413
    assert require_error_body(reply)["code"] == "body_too_large"


@pytest.mark.parametrize("path", [CHAT, COMPLETION, EMBED, "/tokenize"])
def test_text_that_cannot_fit_is_not_even_tokenised(server: RunningServer, path: str) -> None:
    key = {CHAT: "messages", EMBED: "input"}.get(path, "prompt")
    text = "x" * 4_000_000
    value = [{"role": "user", "content": text}] if path == CHAT else text
    reply = server.post(path, {**GOOD[path], key: value})
    assert (reply.status_code, require_error_body(reply)["code"]) == (400, "context_length_exceeded")


def test_a_quoted_value_is_short(server: RunningServer) -> None:
    reply = server.post(CHAT, {**GOOD[CHAT], "temperature": "x" * 10**6})
    assert reply.status_code == 400 and len(reply.text) < 500
