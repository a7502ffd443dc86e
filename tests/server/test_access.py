"""Access control: keys on every route except the public ones, methods, CORS, exposure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tests.support.loopback import CHAT, GENERATIONS, RunningServer, Serving
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig, Overloaded, RequestFailed
from tokenmill.server.app import DIALECTS
from tokenmill.server.auth import PUBLIC_METHODS, PUBLIC_PATHS, RequireKey, require_safe_exposure
from tokenmill.server.dialect import RequestHead
from tokenmill.server.errors import error_headers
from tokenmill.server.keys import KeyRing, load_keys

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
KEY = "a-long-secret"


@pytest.fixture(scope="module")
def keyed(serving: Serving) -> RunningServer:
    return serving(ServerConfig(api_key=(KEY,)))


def paths_of(server: RunningServer) -> list[str]:
    """All paths of the app, from its own table and from its OpenAPI description, so a new route is caught."""
    listed = {route.path for route in server.app.routes if isinstance(route, Route)}
    described = server.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()["paths"]
    return sorted(listed | set(described) | {"/docs", "/openapi.json"})


def test_the_walk_sees_the_routes(keyed: RunningServer) -> None:
    expected = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize", "/detokenize"}
    assert expected | {"/docs", "/metrics", *PUBLIC_PATHS} <= set(paths_of(keyed))


@pytest.mark.parametrize("form", ["{}", "{}/", "/{}", "{}?key=1"])
def test_every_route_and_method_needs_the_key(keyed: RunningServer, form: str) -> None:
    with httpx.Client() as client:
        for path in [*paths_of(keyed), "/no/such/route"]:
            for method in METHODS:
                url = keyed.url + form.format(path.replace("{model_id}", "fake/tiny").replace("{model_id:path}", "x"))
                reply = client.request(method, url, headers={"authorization": "Bearer wrong"})
                is_public = path in PUBLIC_PATHS and method in PUBLIC_METHODS and not form.startswith("/")
                where = f"{method} {url} {reply.status_code}"
                assert (reply.status_code != 401) == is_public or (path == "/" and form == "/{}"), where
                if reply.status_code == 401 and method != "HEAD":
                    asked = httpx.URL(url).path.rstrip("/") or "/"  # as the server reads it
                    dialect = DIALECTS.of(RequestHead(method, asked, Headers()))
                    Draft202012Validator(dialect.error_schema).validate(reply.json())
                    assert "a valid API key is required" in reply.text, where
                    assert reply.headers["www-authenticate"].startswith("Bearer"), where
    assert keyed.engine.seen == []


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer  x", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY},"]
)
def test_near_misses_stay_outside(keyed: RunningServer, header: str) -> None:
    assert keyed.get("/v1/models", headers={"authorization": header}).status_code == 401


def test_the_key_opens_everything(keyed: RunningServer) -> None:
    headers = {"authorization": f"bearer {KEY}"}  # the scheme's case does not matter
    for path in ("/v1/models", "/v1/models/fake/tiny", "/docs", "/openapi.json", "/metrics"):
        assert keyed.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key", "x-goog-api-key"])
def test_the_key_may_come_in_any_header(keyed: RunningServer, header: str) -> None:
    def sent(name: str, key: str) -> dict[str, str]:
        return {name: f"Bearer {key}" if name == "authorization" else key}

    for path in paths_of(keyed):
        url = path.replace("{model_id}", "fake/tiny").replace("{model_id:path}", "fake/tiny")
        assert keyed.status(url, sent(header, KEY)) != 401, url
        other = "x-api-key" if header == "authorization" else "authorization"
        assert keyed.status(url, {**sent(other, "wrong"), **sent(header, KEY)}) != 401, url
    assert keyed.get("/v1/models", headers=sent(header, "wrong")).status_code == 401
    assert keyed.get(f"/v1/models?key={KEY}&api-key={KEY}").status_code == 401, "never from the URL"


def test_metrics_can_be_public(serving: Serving) -> None:
    open_metrics = serving(ServerConfig(api_key=(KEY,), public_metrics=True))
    assert open_metrics.get("/metrics").status_code == 200
    assert open_metrics.get("/v1/models").status_code == 401


def test_keys_never_show(keyed: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        keyed.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        keyed.get("/v1/models", headers={"authorization": "Bearer other-secret"})
    assert "secret" not in caplog.text
    assert KEY not in repr(ServerConfig(api_key=(KEY,)))


def test_keys_from_flags_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nthree\n\n  four  \n")
    config = ServerConfig(api_key=("one", "two"), api_key_file=file)
    assert load_keys(config, {"TOKENMILL_API_KEY": "five,one"}) == (b"one", b"two", b"five", b"three", b"four")


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_key_file_without_keys_is_an_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidConfig):
        load_keys(ServerConfig(api_key_file=file), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_open_to_others_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(InvalidConfig):
        require_safe_exposure(ServerConfig(host=host), KeyRing())
    require_safe_exposure(ServerConfig(host=host), KeyRing([b"key"]))
    require_safe_exposure(ServerConfig(host=host, allow_open=True), KeyRing())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_nothing(host: str) -> None:
    require_safe_exposure(ServerConfig(host=host), KeyRing())


# ── methods and paths ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"])
def test_wrong_method_names_the_right_one(server: RunningServer, path: str) -> None:
    reply = server.get(path)
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_route(server: RunningServer) -> None:
    reply = server.get("/v1/nothing")
    assert reply.status_code == 404
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    for path in ("/v1/chat/completion", "/v1/chat", "/v1/chat/"):
        assert "there is /v1/chat/completions" in server.get(path).json()["error"]["message"]
    assert "/ui/" not in server.get("/chat.js").json()["error"]["message"], "files of the page are no routes"


def test_head_options_and_trailing_slashes_behave(server: RunningServer) -> None:
    assert httpx.head(f"{server.url}/health").status_code == 200
    assert httpx.head(f"{server.url}/v1/models").text == ""
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
    assert server.get("/v1/models/fake/tiny/").json()["id"] == "fake/tiny"
    reply = httpx.options(f"{server.url}/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (204, "POST")


def test_cors_is_off_unless_asked_for(server: RunningServer, serving: Serving) -> None:
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.get("/health", headers=preflight).headers
    allowed = serving(ServerConfig(api_key=(KEY,), cors_origin=("https://app.example",)))
    reply = httpx.options(f"{allowed.url}/v1/chat/completions", headers=preflight)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://app.example")
    for method in ("DELETE", "PATCH", "HEAD"):
        asked = {**preflight, "access-control-request-method": method}
        assert httpx.options(f"{allowed.url}/api/delete", headers=asked).status_code == 200
    shown = httpx.get(f"{allowed.url}/health", headers={"origin": "https://app.example"}).headers
    assert {"request-id", "retry-after-ms"} <= set(shown["access-control-expose-headers"].split(", "))
    other = httpx.options(f"{allowed.url}/v1/chat/completions", headers={**preflight, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


WITH_IDS = [(path, {**body, "stream": on}, (200,)) for path, body in GENERATIONS.values() for on in (False, True)]
WITH_IDS += [(path, {}, (400, 422)) for path, _ in GENERATIONS.values()]
WITH_IDS += [("/nothing", {}, (404,)), ("/api/nothing", {}, (404,)), ("/health", {}, (405,))]


@pytest.mark.parametrize(("path", "body", "status"), WITH_IDS)
def test_both_id_headers_are_the_logs_id(
    server: RunningServer, caplog: pytest.LogCaptureFixture, path: str, body: object, status: tuple[int, ...]
) -> None:
    for given in ("mine-1", "bad id"):
        caplog.clear()
        with caplog.at_level("INFO", logger="tokenmill"):
            reply = server.post(path, body, headers={"x-request-id": given})
        request_id = reply.headers["x-request-id"]
        assert reply.status_code in status, reply.text
        assert reply.headers.get_list("request-id") == [request_id]
        assert request_id == given if given == "mine-1" else request_id.startswith("req-")
        assert [line for line in caplog.messages if line.startswith(f"request id={request_id} ")]


def test_retry_headers_say_whether_and_when(server: RunningServer) -> None:
    server.engine.max_running = 0
    full = server.post("/v1/chat/completions", CHAT)
    assert (full.status_code, full.headers["retry-after"], full.headers["retry-after-ms"]) == (429, "3", "3000")
    assert full.headers["x-should-retry"] == "true"
    server.engine.max_running, server.engine.failure, server.engine.fail_after = 10, RequestFailed("odd"), 0
    failed = server.post("/v1/chat/completions", CHAT)
    assert (failed.status_code, failed.headers["x-should-retry"]) == (500, "false")
    assert "retry-after" not in failed.headers
    assert "x-should-retry" not in server.post("/v1/chat/completions", {}).headers
    assert error_headers(Overloaded("full", retry_after_s=1e6))["retry-after"] == "120", "clients give up beyond that"
    assert error_headers(Overloaded("full", retry_after_s=0.0))["retry-after"] == "1"


def test_docs_describe_the_routes(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"]


def test_other_ways_in_than_http_are_closed() -> None:
    """A route for WebSockets that somebody adds must not be open to everyone."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it was let in")

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None: ...

    guarded = RequireKey(app, keys=KeyRing((KEY.encode(),)), public_paths=PUBLIC_PATHS, dialects=DIALECTS)
    with pytest.raises(RuntimeError, match="only HTTP"):
        asyncio.run(guarded({"type": "websocket", "path": "/health", "headers": []}, receive, send))
