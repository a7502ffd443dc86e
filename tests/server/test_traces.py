"""Spans of requests as a collector sees them: their parents, times and attributes, and what is never in them."""

from __future__ import annotations

import random
import sys

import pytest

from tests.support.otlp_collector import otlp_collector
from tests.support.scripted_server import scripted_server
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig
from tokenmill.observe.traces import Tracer

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Tell me the secret"}], "max_tokens": 6}
SERVER, INTERNAL, ERROR = 2, 1, 2


def test_a_collector_sees_the_spans_of_requests() -> None:
    with otlp_collector() as collector:
        config = ServerConfig(otlp_endpoint=collector.url, keep_alive_s=0.3)
        script = [{"say": "word " * 300, "token_delay_s": 0.002}]
        with scripted_server(script, template="{{ messages[0].content }}", config=config) as server:
            body = {**CHAT, "temperature": 0.5, "seed": 7, "stream": True, "n": 2}
            reply = server.post("/v1/chat/completions", body, headers={"traceparent": CLIENT})
            own = reply.headers["traceparent"].split("-")
            assert own[1] == CLIENT.split("-")[1] and own[2] != CLIENT.split("-")[2], (
                "the same trace, a span of its own"
            )
            unsampled = server.post("/v1/chat/completions", CHAT, headers={"traceparent": UNSAMPLED})
            assert unsampled.status_code == 200 and "traceparent" not in unsampled.headers
            wrong = server.post(
                "/v1/chat/completions", {**CHAT, "temperature": -1}, headers={"traceparent": "nonsense"}
            )
            server.get("/health")
    outer, inner = (collector.of(own[1])[name] for name in ("POST /v1/chat/completions", "chat scripted"))
    assert (outer.parent_id, outer.span_id, outer.kind) == (CLIENT.split("-")[2], own[2], SERVER)
    assert (inner.parent_id, inner.kind) == (outer.span_id, INTERNAL)
    stages = [collector.of(own[1])[name] for name in ("queue", "prefill", "decode")]
    assert all(stage.parent_id == inner.span_id for stage in stages)
    assert outer.start_ns <= stages[0].start_ns <= stages[0].end_ns == stages[1].start_ns
    assert stages[1].end_ns == stages[2].start_ns <= stages[2].end_ns <= outer.end_ns
    assert outer.attributes["http.response.status_code"] == 200
    told = inner.attributes
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.provider.name"] == "tokenmill"
    assert (told["gen_ai.request.model"], told["gen_ai.request.max_tokens"]) == ("scripted", 6)
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.seed"]) == (0.5, 7)
    assert told["gen_ai.request.choice.count"] == 2 and told["gen_ai.request.stream"] is True
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert told["gen_ai.usage.output_tokens"] == 12 and told["gen_ai.usage.input_tokens"] > 0
    assert not collector.of(UNSAMPLED.split("-")[1])
    (refused,) = collector.of(wrong.headers["traceparent"].split("-")[1]).values()
    assert refused.parent_id == "" and refused.attributes["error.type"] == "invalid_value"
    assert refused.status != ERROR, "the client's mistake is no failure of the server"
    assert collector.resources[0]["service.name"] == "tokenmill"
    assert "secret" not in repr(collector.spans) and "word" not in repr(collector.spans)
    assert len(collector.spans) == 6, "questions about health are no traces"


def test_a_share_of_the_traces_is_sampled() -> None:
    with otlp_collector() as collector:
        tracer = Tracer(collector.url, 0.25)
        random.seed(7)
        began = [tracer.begin({}) for _ in range(2000)]
        assert 350 < sum(one is not None for one in began) < 650
        assert all(tracer.begin({"traceparent": CLIENT}) is not None for _ in range(50))
        tracer.close()


def test_what_is_missing_or_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="http://collector:4318"):
        Tracer("collector:4318", 1.0)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(InvalidConfig, match=r"tokenmill\[traces\]"):
        Tracer("http://127.0.0.1:1", 1.0)
