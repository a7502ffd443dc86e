"""A server that promises a time to the first token: what would come later is refused, in the words of each dialect."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.scripted_server import ScriptedServer, scripted_server

SAY = {"say": "one two three four five six", "token_delay_s": 0.025}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "scripted", "prompt": "Hi", "max_tokens": 24},
    "/v1/messages": CHAT,
    "/api/chat": {**CHAT, "stream": False},
    "/v1/responses": {"model": "scripted", "input": "Hi", "max_output_tokens": 24},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server([SAY], max_running=1, speculate="off", slo="ttft=300ms") as server:
        assert server.post("/v1/completions", ASKED["/v1/completions"]).status_code == 200
        yield server


@pytest.mark.parametrize("path", ASKED)
def test_a_request_that_would_wait_too_long_is_told_how_long(server: ScriptedServer, path: str) -> None:
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda _: server.post(path, ASKED[path]), range(12)))
    statuses = {reply.status_code for reply in replies}
    refused = [reply for reply in replies if reply.status_code != 200]
    assert statuses == {200, 503 if path == "/api/chat" else 429}, "Ollama says it so"
    assert path == "/api/chat" or all("exceeds the limit" in reply.text for reply in refused)
    assert all(float(reply.headers["retry-after-ms"]) > 300 for reply in refused), "more than is promised"
