"""/openapi.json tells the truth: answers have the form it promises, and its ranges are the parser's."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.loopback import RunningServer

CHAT = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "fake/tiny", "prompt": "Hi"}
EMBEDDING = {"model": "fake/tiny", "input": ["Hi", "you"]}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDING,
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}
NEEDS = {"top_logprobs": {"logprobs": True}, "max_tokens": {"max_completion_tokens": None}, "best_of": {"n": 1}}
NARROWER = {"n", "best_of", "min_tokens", "dimensions"}  # the upper limit is set elsewhere too


def described(server: RunningServer) -> dict[str, Any]:
    paths: dict[str, Any] = server.get("/openapi.json").json()["paths"]
    return {path: next(iter(methods.values())) for path, methods in paths.items()}


def require_promised(route: dict[str, Any], reply: Any) -> None:
    responses = route["responses"]
    promised = responses.get(str(reply.status_code)) or responses["default"]
    kind = reply.headers["content-type"].split(";")[0]
    schema = promised["content"][kind].get("schema", {})
    Draft202012Validator.check_schema(schema)
    if kind == "application/json":
        Draft202012Validator(schema).validate(reply.json())


@pytest.mark.parametrize("path", BODIES)
def test_answers_to_bodies_are_as_promised(server: RunningServer, path: str) -> None:
    route = described(server)[path]
    sent = route["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator(sent).validate(BODIES[path])
    for body in (BODIES[path], {}, {"model": "nobody's", **{key: 1 for key in sent["required"]}}, []):
        require_promised(route, server.post(path, body))
    require_promised(route, server.http.post(server.url + path, content=b"x"))
    require_promised(route, server.get(path))


@pytest.mark.parametrize("extra", [{"logprobs": True, "n": 2}, {"stream": True}, {"stop": "upon"}], ids=str)
def test_answers_of_other_forms(server: RunningServer, extra: dict[str, object]) -> None:
    routes = described(server)
    for path in ("/v1/chat/completions", "/v1/completions"):
        numbered = {"logprobs": 2} if path == "/v1/completions" and "logprobs" in extra else {}
        reply = server.post(path, {**BODIES[path], **extra, **numbered})
        assert reply.status_code == 200
        require_promised(routes[path], reply)
    require_promised(
        routes["/v1/embeddings"], server.post("/v1/embeddings", {**EMBEDDING, "encoding_format": "base64"})
    )


def test_answers_to_questions_are_as_promised(server: RunningServer) -> None:
    routes = described(server)
    for path in set(routes) - set(BODIES) - {"/ui/events"}:  # which never ends
        for name in ("fake/tiny", "nobody's"):
            require_promised(routes[path], server.get(path.replace("{model_id}", name)))
    server.engine.state = "draining"
    require_promised(routes["/health"], server.get("/health"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_ranges_are_the_parsers(server: RunningServer, path: str) -> None:
    route = described(server)[path]
    schema = route["requestBody"]["content"]["application/json"]["schema"]
    bounded = {name: field for name, field in schema["properties"].items() if "minimum" in field}
    assert len(bounded) > 20 or path == "/v1/embeddings"
    for name, field in bounded.items():
        kind = int if "integer" in field["type"] else float
        low, high, others = kind(field["minimum"]), kind(field["maximum"]), NEEDS.get(name, {})
        inside = [low, None] if name in NARROWER else [low, high, None]
        tried = [(value, 200) for value in inside] + [(value, 400) for value in (low - 1, high + 1, "1", True)]
        for value, status in tried:
            reply = server.post(path, {**BODIES[path], **others, name: value})
            assert reply.status_code == status, f"{name}={value}: {reply.text}"
