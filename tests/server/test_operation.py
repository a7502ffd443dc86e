"""Operating it: departures, health, metrics, log lines."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_engine import FakeEngine
from tests.support.loopback import RunningServer, Serving
from tests.support.metric_values import metric_values
from tests.support.timing import eventually
from tokenmill.config.server import ServerConfig
from tokenmill.engine.status import EngineStats
from tokenmill.server.gate import EngineGate

CHAT = {"model": "fake/tiny", "messages": [{"role": "user", "content": "my secret question"}]}


def half_open(server: RunningServer, body: dict[str, object], path: str = "/v1/chat/completions") -> socket.socket:
    """A connection on which a request was sent and nothing was read."""
    content = orjson.dumps(body)
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_departure_before_the_first_token(server: RunningServer, stream: bool) -> None:
    server.engine.first_delay_s = 30
    connection = half_open(server, {**CHAT, "stream": stream})
    assert eventually(lambda: len(server.engine.running) == 1)
    connection.close()
    assert eventually(lambda: server.engine.running == {}) and len(server.engine.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_departure_while_the_prompt_is_tokenised(serving: Serving, stream: bool) -> None:
    server = serving()
    server.engine.prepare_delay_s = 30
    connection = half_open(server, {**CHAT, "stream": stream})
    assert eventually(lambda: server.engine.num_preparing == 1)
    connection.close()
    assert eventually(lambda: server.engine.num_preparing == 0)
    assert server.engine.seen == [] and eventually(lambda: samples(server)["tokenmill_requests_total", "abort"] == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_departure_in_the_middle(server: RunningServer, stream: bool) -> None:
    server.engine.delay_s = 0.2
    prompts = {"model": "fake/tiny", "prompt": ["a", "b", "c"], "stream": stream, "max_tokens": 99}
    connection = half_open(server, prompts, "/v1/completions")
    assert eventually(lambda: len(server.engine.running) == 3)
    if stream:
        connection.recv(100)
    connection.close()
    assert eventually(lambda: server.engine.running == {}) and len(server.engine.aborted) == 3


def test_two_hundred_vanishing_clients(server: RunningServer) -> None:
    server.engine.delay_s = 0.1
    connections = [half_open(server, {**CHAT, "stream": True, "n": 2}) for _ in range(200)]
    assert eventually(lambda: len(server.engine.running) == 200)
    for connection in connections:
        connection.close()
    assert eventually(lambda: server.engine.running == {})
    server.engine.delay_s = 0
    assert server.post("/v1/chat/completions", CHAT).status_code == 200


def test_departure_while_sending(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    connection.close()
    assert server.post("/v1/chat/completions", CHAT).status_code == 200 and server.engine.aborted == []


def test_a_slow_sender_is_let_go(serving: Serving) -> None:
    hasty = serving(ServerConfig(body_timeout_s=0.2))
    host, port = hasty.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert b" 408 " in connection.recv(1000).splitlines()[0]


@pytest.mark.parametrize(("state", "status"), [("ready", 200), ("loading", 503), ("draining", 503), ("dead", 503)])
def test_health(server: RunningServer, state: str, status: int) -> None:
    server.engine.state = state
    reply = server.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (status, state)
    if status == 503:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"} and reply.headers["retry-after"]


def test_the_gate_opens_and_closes(serving: Serving) -> None:
    gate = EngineGate()
    loading = serving(gate=gate)
    assert loading.get("/health").json()["status"] == "loading"
    for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "x"})):
        reply = loading.post(path, body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "loading") and reply.headers["retry-after"]
    assert loading.get("/v1/models").status_code == 503 and loading.get("/metrics").status_code == 200
    assert loading.post("/v1/chat/completions", []).status_code == 400
    gate.open(FakeEngine())
    assert loading.get("/health").status_code == 200 and loading.post("/v1/chat/completions", CHAT).status_code == 200
    gate.close()
    assert loading.get("/health").json()["status"] == "draining"
    assert loading.post("/v1/chat/completions", CHAT).json()["error"]["code"] == "draining"


def test_queue_limit_refuses_at_once(server: RunningServer) -> None:
    server.engine.max_running, server.engine.delay_s = 4, 0.02

    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: server.post("/v1/chat/completions", CHAT), range(20)))
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused and all(reply.headers["retry-after"] for reply in refused)
    assert all(reply.status_code in (200, 429) for reply in replies)


def test_tokenize_and_back(server: RunningServer) -> None:
    reply = server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert reply == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [256, 72, 195, 169],
        "token_strs": ["", "H", "\ufffd", "\ufffd"],
    }
    assert server.post("/tokenize", {"prompt": "H", "add_special_tokens": False}).json()["tokens"] == [72]
    assert server.post("/detokenize", {"tokens": [72, 195, 169]}).json() == {"prompt": "Hé", "content": "Hé"}
    chat = server.post("/tokenize", {"messages": CHAT["messages"]}).json()
    assert chat["count"] == server.post("/v1/chat/completions", CHAT).json()["usage"]["prompt_tokens"]


def test_any_model_name(serving: Serving) -> None:
    lenient = serving(ServerConfig(any_model_name=True))
    for model in ({"model": "gpt-4o"}, {}):
        reply = lenient.post("/v1/chat/completions", {"messages": CHAT["messages"], **model})
        assert reply.json()["model"] == "fake/tiny"


# ── metrics and log ────────────────────────────────────────────────────────────────────────────────────


def samples(server: RunningServer) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("outcome") or sample.labels.get("le") or ""): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_equal_the_sum_of_usage(serving: Serving) -> None:
    server = serving()
    prompt_tokens = completion_tokens = 0
    for number in range(50):
        body = {**CHAT, "max_tokens": number % 7 + 1, "n": number % 3 + 1}
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        prompt_tokens += usage["prompt_tokens"]
        completion_tokens += usage["completion_tokens"]
    assert server.post("/v1/chat/completions", {**CHAT, "n": 0}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400  # not a generation: not counted
    seen = samples(server)
    assert all(value == value for value in seen.values()), "a NaN"
    assert seen["tokenmill_prompt_tokens_total", ""] == prompt_tokens
    assert seen["tokenmill_generation_tokens_total", ""] == completion_tokens
    assert seen["tokenmill_requests_total", "length"] == 50
    assert seen["tokenmill_requests_total", "rejected"] == 1
    assert seen["tokenmill_request_seconds_count", ""] == 50
    buckets = [value for (name, _), value in seen.items() if name == "tokenmill_time_to_first_token_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 50


def test_departures_and_failures_are_counted(serving: Serving) -> None:
    server = serving()
    server.engine.first_delay_s = 5
    half_open(server, {**CHAT, "stream": True}).close()
    assert eventually(lambda: samples(server)["tokenmill_requests_total", "abort"] == 1)


def test_one_log_line_without_text(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tokenmill.server"):
        reply = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 3})
        server.get("/bad%0Apath")
        assert eventually(lambda: len(caplog.records) == 2)
    line, other = (record.getMessage() for record in caplog.records)
    assert f"id={reply.headers['x-request-id']}" in line and "secret" not in line and "upon" not in line
    for part in (
        "status=200",
        "model=fake/tiny",
        "prompt_tokens=25",
        "completion_tokens=3",
        "cached_tokens=2",
        "ttft_ms=",
    ):
        assert part in line, line
    assert "\n" not in other and "status=404" in other


def test_all_restarts_between_two_scrapes_are_counted(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serving()
    for restarts, counted in ((0, 0), (3, 3), (3, 3), (4, 4)):
        monkeypatch.setattr(FakeEngine, "stats", lambda _, restarts=restarts: EngineStats(restarts=restarts))
        assert metric_values(server.get("/metrics").text)["tokenmill_engine_restarts_total"] == counted
