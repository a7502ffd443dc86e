"""The outer layers know no dialect: each error has the form of the dialect that its path belongs to, also before
routing; a registry finds the model that a request names."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.loopback import RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.errors import Draining, InvalidRequest, TokenmillError, UnknownModel
from tokenmill.server.app import DIALECTS
from tokenmill.server.body import require_json
from tokenmill.server.dialect import Dialect, Dialects, RequestHead, path_only
from tokenmill.server.errors import Loading, WrongContentType
from tokenmill.server.gate import EngineGate
from tokenmill.server.openai.render import OPENAI
from tokenmill.server.registry import ModelRegistry
from tokenmill.server.routing import TEXT, Endpoint, json_response, object_of, routes_of

KEY = "a-long-secret"


def other_content(error: TokenmillError, request_id: str) -> dict[str, Any]:
    return {"kind": "error", "why": error.code, "request": request_id}


def is_other(head: RequestHead) -> bool:
    return "x-other" in head.headers


OTHER = Dialect(
    name="other",
    prefixes=("/other/", "/v1/other"),
    error_content=other_content,
    error_schema={"type": "object"},
    key_hint="send `x-api-key: KEY`",
    statuses={503: 529},
    shared={"/v1/models": is_other},
    takes_any_content_type=True,
)


@pytest.fixture(scope="module")
def two(serving: Serving) -> RunningServer:
    config = ServerConfig(api_key=(KEY,), max_body_bytes=1000)
    return serving(config, dialects=Dialects(OPENAI, OTHER))


def test_the_longest_prefix_decides() -> None:
    dialects = Dialects(OPENAI, OTHER)
    found = [dialects.of(path_only(path)) for path in ("/v1/otherwise", "/v1/models", "")]
    assert found == [OTHER, OPENAI, OPENAI]
    assert DIALECTS.of(path_only("/anything")) is OPENAI
    with pytest.raises(ValueError, match="prefix"):
        Dialects(OTHER)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/other/nothing", 404, "unknown_route"), ("/v1/other", 404, "unknown_route")],
)
def test_routing_errors_are_the_paths(two: RunningServer, path: str, status: int, code: str) -> None:
    reply = two.get(path, headers={"x-api-key": KEY, "x-request-id": "mine"})
    assert (reply.status_code, reply.json()) == (status, {"kind": "error", "why": code, "request": "mine"})
    ours = two.get("/v1/nothing", headers={"authorization": f"Bearer {KEY}"})
    assert ours.status_code == 404 and ours.json()["error"]["code"] == "unknown_route"


def test_a_shared_path_belongs_to_the_dialect_that_recognises_the_request(two: RunningServer) -> None:
    plain, other = two.get("/v1/models"), two.get("/v1/models", headers={"x-other": "1"})
    assert (plain.status_code, other.status_code) == (401, 401)
    assert plain.json()["error"]["code"] == other.json()["why"] == "invalid_api_key"


def test_a_dialect_may_have_statuses_of_its_own() -> None:
    error, headers = Loading("still loading"), {"x-other": "1"}
    reply = OTHER.error_response(error, "mine", headers)
    assert (reply.status_code, OPENAI.error_response(error, "mine").status_code) == (529, 503)
    assert reply.headers["retry-after"] and reply.headers["x-other"] == "1"


def test_endpoints_of_one_path_are_chosen_by_what_they_recognise() -> None:
    async def ours(request: Request) -> Response:
        return json_response({"who": "ours"})

    async def others(request: Request) -> Response:
        return json_response({"who": "others"})

    async def posted(request: Request) -> Response:
        return json_response({"who": "posted"})

    rows = [
        Endpoint("GET", "/both", others, "x", object_of(who=TEXT), when=is_other),
        Endpoint("GET", "/both", ours, "x", object_of(who=TEXT)),
        Endpoint("POST", "/both", posted, "x", object_of(who=TEXT)),
    ]
    with TestClient(Starlette(routes=routes_of(rows, Dialects(OPENAI, OTHER)))) as client:
        found = [client.get("/both"), client.get("/both", headers={"x-other": "1"}), client.post("/both")]
        assert [reply.json()["who"] for reply in found] == ["ours", "others", "posted"]
        assert set(client.delete("/both").headers["allow"].split(", ")) == {"GET", "POST"}
        assert set(client.get("/openapi.json").json()["paths"]["/both"]) == {"get", "post"}


@pytest.mark.parametrize(("headers", "is_read"), [({}, True), ({"origin": "https://evil.example"}, False)])
def test_a_dialect_may_take_json_by_any_name_but_not_from_web_pages(headers: dict[str, str], is_read: bool) -> None:
    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    request = Request({**scope, "method": "POST", "path": "/other/x"})
    with contextlib.nullcontext() if is_read else pytest.raises(WrongContentType):
        require_json(request, takes_any_type=True)
    with pytest.raises(WrongContentType):
        require_json(request)


@pytest.mark.parametrize("path", ["/other/x", "/v1/chat/completions"])
def test_heads_that_are_too_large_are_refused_in_the_paths_dialect(two: RunningServer, path: str) -> None:
    url = httpx.URL(two.url)
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.sendall(f"POST {path}?a=/v1 HTTP/1.1\r\nhost: x\r\nx: ".encode() + b"y" * 70_000)
        said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert said.startswith(b"HTTP/1.1 431") and b"head_too_large" in said
    assert (b'"kind"' in said) == path.startswith("/other")


# ── models by name ─────────────────────────────────────────────────────────────────────────────────────


def registry(any_name: bool = False) -> ModelRegistry:
    gates = [EngineGate(FakeEngine(replace(INFO, name=name))) for name in ("first", "second")]
    return ModelRegistry(*gates, any_name=any_name)


def test_a_registry_finds_models_by_name() -> None:
    models = registry()
    assert [info.name for info in models.listed()] == ["first", "second"]
    assert models.find("second").info.name == "second" and models.find("first") is models.default
    assert models.find(None, is_required=False) is models.default
    with pytest.raises(UnknownModel, match=r"this server has first, second"):
        models.find("third")
    with pytest.raises(InvalidRequest, match="model is required"):
        models.find(None)


def test_with_any_name_the_default_answers_to_unknown_ones() -> None:
    models = registry(any_name=True)
    assert models.find("gpt-4o") is models.default and models.find(None) is models.default
    assert models.find("second").info.name == "second"


def test_a_gate_says_why_it_is_closed() -> None:
    gate = EngineGate()
    models = ModelRegistry(gate)
    with pytest.raises(Loading):
        models.find("any")
    gate.open(FakeEngine())
    assert models.find(INFO.name) is gate
    gate.close()
    with pytest.raises(Draining):
        models.find(INFO.name)
