"""Whatever is sent to whatever route of the server's own description, the reply is one that the description promises:
never a server's error, every refusal in the form of the route's dialect, and what refuses a field names it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.support.good_requests import GOOD
from tests.support.scripted_server import ScriptedServer, scripted_server
from tokenmill.config.server import ServerConfig

SCRIPT = [{"match": "weather", "say": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}, {"say": "Fine."}]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**200),
    *("", "x", "0", "null", "\0", "é🌞", "\u202e", "x" * 5000, "../../etc/passwd", "user", "text", "function", "auto"),
    *([], {}, [[]], [{}], [None], ["x", 5], {"": {}}, {"type": "x"}, {"type": 1}, {"type": "text"}, {"type": "object"}),
    *(
        {"$ref": "#"},
        {"role": "user", "content": "Hi"},
        {"name": "f"},
        [[[[[[[[]]]]]]]],
        {"a": {"b": {"c": {"d": {}}}}},
    ),
]
QUERIES = (
    "limit",
    "after",
    "before",
    "order",
    "stream",
    "starting_after",
    "purpose",
    "include",
    "beta",
    "group_by",
    "since",
)
QUERY_VALUES = ("", "0", "-1", "1e9", "true", "abc", "9" * 30, "\0", "asc", "desc", "2026-01-01", "é🌞")
ODD_IDS = ("x", "a/b", "\0", "é🌞", "%2e%2e", "sha256:" + "0" * 64, "x" * 3000, " ", "?")
NOT_READ = {("/v1/chat/completions", "metadata"), ("/api/show", "verbose"), ("/api/embed", "options")}
ENDLESS = ("/ui/events",)  # a stream that goes on as long as its client
TAKEN_AWAY = ("/replicas/restart", "/replicas/drain", "/models/unload")  # the model that the others need


@dataclass(frozen=True)
class RouteCase:
    method: str
    path: str
    takes_json: bool
    replies: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.method.upper()} {self.path}"


@dataclass(frozen=True)
class Described:
    """A server, its routes, and ids of what is kept there."""

    server: ScriptedServer
    routes: list[RouteCase]
    ids: list[str]

    def send(self, route: RouteCase, path: str, body: bytes | None) -> httpx.Response:
        headers = {} if body is None else {"content-type": "application/json"}
        return self.server.http.request(route.method, self.server.url + path, content=body, headers=headers)


@pytest.fixture(scope="module")
def described(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    config = ServerConfig(state_dir=tmp_path_factory.mktemp("state"))
    template = shared_dir / "templates" / "Qwen-Qwen3-0.6B.jinja"
    with scripted_server(SCRIPT, template, config, max_context=4096) as server:
        routes = [
            RouteCase(method.upper(), path, takes_json(route), route["responses"])
            for path, methods in server.get("/openapi.json").json()["paths"].items()
            for method, route in methods.items()
            if path not in ENDLESS + TAKEN_AWAY
        ]
        kept = [server.post(path, GOOD[path]).json() for path in ("/v1/responses", "/v1/conversations")]
        yield Described(server, routes, ["scripted", *(one["id"] for one in kept), kept[0]["output"][0]["id"]])


def takes_json(route: dict[str, Any]) -> bool:
    return "application/json" in route.get("requestBody", {}).get("content", {})


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────


class RequestFuzzer:
    """Draws requests: bodies that are right but for one to three odd things somewhere in them, any ids, any queries."""

    def __init__(self, described: Described, seed: int) -> None:
        self._described = described
        self._random = random.Random(seed)

    def send(self) -> tuple[RouteCase, httpx.Response, str]:
        """One request: its route, its reply, and what was sent, for a person."""
        routes = self._described.routes
        if self._random.random() < 0.7:
            routes = [route for route in routes if route.takes_json]
        route = self._random.choice(routes)
        path, body = self._path(route), self._body(route) if route.takes_json else None
        return route, self._described.send(route, path, body), f"{route.method} {path[:200]} {str(body)[:1500]}"

    def _path(self, route: RouteCase) -> str:
        path = route.path
        while "{" in path:
            before, rest = path.split("{", 1)
            drawn = self._random.choice((*self._described.ids, *ODD_IDS))
            path = before + quote(drawn, safe="") + rest.split("}", 1)[1]
        chosen = [name for name in QUERIES if self._random.random() < 0.05]
        queries = "&".join(f"{name}={quote(self._random.choice(QUERY_VALUES))}" for name in chosen)
        return f"{path}?{queries}" if queries else path

    def _body(self, route: RouteCase) -> bytes:
        made: Any = copy.deepcopy(GOOD[route.path])
        for name in list(made):
            if name not in ("model", "messages", "prompt", "input") and self._random.random() < 0.4:
                del made[name]
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3))):
            made = self._changed(made)
        text = json.dumps(made).encode()
        return text[: self._random.randrange(len(text) + 1)] if self._random.random() < 0.02 else text

    def _changed(self, value: Any) -> Any:
        """The value with one thing in it made odd, left out or doubled."""
        if not isinstance(value, dict | list) or not value or self._random.random() < 0.15:
            return copy.deepcopy(self._random.choice(ODD))
        place = self._random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        match self._random.random():
            case drawn if drawn < 0.08:
                del value[place]
            case drawn if drawn < 0.12 and isinstance(value, list):
                value.append(copy.deepcopy(value[place]))
            case drawn if drawn < 0.16 and isinstance(value, dict):
                value[self._random.choice(("", "x", "type", "id", "name"))] = value.pop(place)
            case _:
                value[place] = self._changed(value[place])
        return value


def require_promised(route: RouteCase, reply: httpx.Response, sent: str) -> None:
    """A reply is one that the description promises, or a refusal in the form of the route's dialect."""
    told = f"{sent} → {reply.status_code} {reply.text[:500]}"
    assert reply.status_code < 500 or (route.path, reply.status_code) in (("/api/push", 501), ("/api/pull", 502)), told
    is_elsewhere = reply.status_code in (404, 405)  # an id with a slash in it makes another path
    promised = route.replies.get(str(reply.status_code), route.replies["default"] if is_elsewhere else None)
    assert promised is not None, f"not promised: {told}"
    forms = promised.get("content", {})
    kind = reply.headers.get("content-type", "").split(";")[0]
    if reply.status_code >= 400:
        assert reply.headers["x-request-id"] and kind == "application/json", told
    schema = forms.get(kind, {}).get("schema")
    if schema and kind == "application/json" and reply.content:
        problems = [error.message for error in Draft202012Validator(schema).iter_errors(reply.json())]
        assert not problems, f"{problems}: {told}"


@pytest.mark.parametrize("seed", range(2))
def test_any_request_has_a_reply_that_is_promised(described: Described, seed: int) -> None:
    sender = RequestFuzzer(described, seed)
    for _ in range(60):
        require_promised(*sender.send())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 108))
def test_many_requests_have_replies_that_are_promised(described: Described, seed: int) -> None:
    sender = RequestFuzzer(described, seed)
    for _ in range(1000):
        require_promised(*sender.send())
    answer = described.server.post("/v1/completions", {"model": "scripted", "prompt": "Hi"})
    assert answer.json()["choices"][0]["text"].startswith("Fine."), "and the server goes on as before"


@pytest.mark.parametrize("path", [path for path in GOOD if path != "/infill"])  # which this model can't do at all
def test_a_field_of_a_wrong_type_is_named(described: Described, path: str) -> None:
    route = next(one for one in described.routes if one.path == path and one.takes_json)
    place = path.replace("{conversation_id}", described.ids[2])
    for name, right in GOOD[path].items():
        wrong: Any = {"x": [1]} if isinstance(right, list) else [[["x"]]]
        reply = described.send(route, place, json.dumps({**GOOD[path], name: wrong}).encode())
        require_promised(route, reply, f"{path} {name}")
        is_named = reply.status_code in (400, 422) and name in reply.text
        assert is_named or (path, name) in NOT_READ, f"{path} {name}: {reply.status_code} {reply.text[:300]}"
