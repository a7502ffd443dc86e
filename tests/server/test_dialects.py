"""The outer layers know no dialect: each error has the form of the dialect that its path belongs to, also before
routing; a registry finds the model that a request names."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.loopback import RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.errors import Draining, InvalidRequest, TokenmillError, UnknownModel
from tokenmill.server.app import DIALECTS
from tokenmill.server.dialect import Dialect, Dialects
from tokenmill.server.errors import Loading
from tokenmill.server.openai.render import OPENAI
from tokenmill.server.registry import EngineGate, ModelRegistry

KEY = "a-long-secret"


def other_content(error: TokenmillError) -> dict[str, Any]:
    return {"kind": "error", "why": error.code}


OTHER = Dialect(
    name="other",
    prefixes=("/other/", "/v1/other"),
    error_content=other_content,
    error_schema={"type": "object"},
    key_headers=("x-key", "authorization"),
    key_hint="send `x-key: KEY`",
)


@pytest.fixture(scope="module")
def two(serving: Serving) -> RunningServer:
    config = ServerConfig(api_key=(KEY,), max_body_bytes=1000)
    return serving(config, dialects=Dialects(OPENAI, OTHER))


def test_the_longest_prefix_decides() -> None:
    dialects = Dialects(OPENAI, OTHER)
    assert dialects.of("/v1/otherwise") is OTHER and dialects.of("/v1/models") is OPENAI and dialects.of("") is OPENAI
    assert DIALECTS.of("/anything") is OPENAI
    with pytest.raises(ValueError, match="prefix"):
        Dialects(OTHER)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/other/nothing", 404, "unknown_route"), ("/v1/other", 404, "unknown_route")],
)
def test_routing_errors_are_the_paths(two: RunningServer, path: str, status: int, code: str) -> None:
    reply = two.get(path, headers={"x-key": KEY})
    assert (reply.status_code, reply.json()) == (status, {"kind": "error", "why": code})
    ours = two.get("/v1/nothing", headers={"authorization": f"Bearer {KEY}"})
    assert ours.status_code == 404 and ours.json()["error"]["code"] == "unknown_route"


def test_each_dialect_has_its_own_key_headers(two: RunningServer) -> None:
    refused = two.get("/other/nothing", headers={"x-key": "wrong"})
    assert (refused.status_code, refused.json()["why"]) == (401, "invalid_api_key")
    assert two.get("/other/nothing", headers={"authorization": f"Bearer {KEY}", "x-key": "wrong"}).status_code == 404
    assert two.get("/v1/models", headers={"x-key": KEY}).status_code == 401, "not one of OpenAI's headers"


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
    assert [info.name for info in models.models()] == ["first", "second"]
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
