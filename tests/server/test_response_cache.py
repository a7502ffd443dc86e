"""Answers that are given again: only where they can't be others, never across keys, within their bounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.support.scripted_server import ScriptedServer, scripted_server
from tokenmill.config.server import ServerConfig
from tokenmill.server.response_cache import ResponseCache
from tokenmill.types import Event

CACHED = ServerConfig(response_cache_mb=1.0)


def ask(server: ScriptedServer, key: str = "", **more: Any) -> httpx.Response:
    body = {"model": "scripted", "prompt": "Once", "max_tokens": 8, "temperature": 0, **more}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.post("/v1/completions", body, headers=headers)


def answer(reply: httpx.Response) -> Any:
    told = reply.json()
    return told["choices"], {name: told["usage"][name] for name in ("prompt_tokens", "completion_tokens")}


def test_a_hit_is_the_same_answer() -> None:
    with scripted_server([{"say": "One two three four five six seven eight"}], config=CACHED) as server:
        seen = [ask(server, **more).headers.get("x-cache") for more in ({}, {}, {"max_tokens": 7}, {}, {"stop": ["x"]})]
        assert seen == ["miss", "hit", "miss", "hit", "miss"]
        assert answer(ask(server)) == answer(ask(server)) and ask(server).json()["id"] != ask(server).json()["id"]
        streamed = [ask(server, stream=True).text for _ in range(2)]
        assert all("One" in text and text.rstrip().endswith("data: [DONE]") for text in streamed)
        sampled = [ask(server, temperature=1.0).headers.get("x-cache") for _ in range(2)]
        assert sampled == [None, None], "without a seed the answer may be another one"
        seeded = [ask(server, temperature=1.0, seed=5, n=2) for _ in range(2)]
        assert [one.headers["x-cache"] for one in seeded] == ["miss", "hit"]
        assert answer(seeded[0]) == answer(seeded[1])
        assert ask(server, temperature=1.0, seed=6, n=2).headers["x-cache"] == "miss"


def test_hits_equal_what_is_computed_over_random_requests() -> None:
    rng = random.Random(5)
    kinds = [
        {"prompt": rng.choice(["Once", "The sky", "A b c"]), "max_tokens": rng.randint(1, 9), "seed": rng.randint(0, 3)}
        | {"temperature": rng.choice([0, 0.7]), "n": rng.choice([1, 2])}
        for _ in range(60)
    ]
    script = [{"say": "One two three four five six seven eight nine ten"}]
    with scripted_server(script, config=CACHED) as cached, scripted_server(script) as plain:
        replies = [ask(cached, **more) for more in kinds]
        assert 0 < sum(one.headers["x-cache"] == "hit" for one in replies) < 60
        assert [answer(one) for one in replies] == [answer(ask(plain, **more)) for more in kinds]
        assert "x-cache" not in ask(plain).headers, "off unless asked for"


def test_keys_share_no_answers() -> None:
    config = ServerConfig(response_cache_mb=1.0, api_key=("alice", "bob"))
    with scripted_server([{"say": "One two three"}], config=config) as server:
        seen = [ask(server, key).headers["x-cache"] for key in ("alice", "bob", "alice", "bob")]
        assert seen == ["miss", "miss", "hit", "hit"]
        assert ask(server, "alice", cache_salt="mine").headers["x-cache"] == "miss"


def test_bounds_of_size_and_age() -> None:
    now_s = [0.0]
    cache = ResponseCache(20_000, 10.0, lambda: now_s[0])

    async def events(text: str, finish: str) -> AsyncIterator[Event]:
        yield Event(request_id="a", text=text[:2])
        yield Event(request_id="a", text=text[2:], finish_reason=finish)  # type: ignore[arg-type]

    async def keep(key: bytes, text: str, finish: str = "stop") -> None:
        async for _ in cache.keep(key, events(text, finish), 1):
            pass

    async def scenario() -> None:
        await keep(b"aborted", "text", "abort")
        assert cache.find(b"aborted", "b") is None
        await keep(b"large", "x" * 5000)
        assert cache.find(b"large", "b") is None, "one answer does not push out all others"
        for number in range(40):
            await keep(b"%d" % number, f"answer {number} " + "y" * 200)
        assert cache.find(b"0", "b") is None and cache._num_bytes <= 20_000
        (found,) = cache.find(b"39", "new") or ()
        assert found.text.startswith("answer 39") and found.request_id == "new"
        now_s[0] = 11.0
        assert cache.find(b"39", "b") is None
        while cache._answers:
            cache._forget(next(iter(cache._answers)))
        assert cache._num_bytes == 0

    asyncio.run(scenario())
