"""Clients with different keys: none reads, outruns or impersonates another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.loopback import CHAT, RunningServer, Serving, keys_file
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.timing import eventually
from tokenmill.config.server import ServerConfig
from tokenmill.server import generation
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.auth import names_this_machine
from tokenmill.server.errors import ModelsAreFixed
from tokenmill.server.keys import KeyRecord, KeyRing
from tokenmill.server.ollama.routes import PresenceReply
from tokenmill.server.openai import parse

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
KEYS = ("alice", "bob")
SECRET = " ".join(f"word{number}" for number in range(60))


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server([{"say": "Fine."}], config=ServerConfig(api_key=KEYS)) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(serving: Serving) -> RunningServer:
    return serving(ServerConfig(api_key=KEYS))


def cached(server: ScriptedServer, headers: dict[str, str], **more: Any) -> int:
    body = {"model": "scripted", "prompt": SECRET, "max_tokens": 2, **more}
    reply = server.post("/v1/completions", body, headers=headers)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_tell_nothing_of_others(scripted: ScriptedServer) -> None:
    assert cached(scripted, ALICE) == 0
    assert cached(scripted, ALICE) > 0, "the test can see: the same key finds its own"
    assert cached(scripted, BOB) == 0
    assert cached(scripted, BOB, cache_salt="x") == 0
    assert cached(scripted, BOB, cache_salt="x") > 0


def test_a_server_may_be_told_to_share_its_cache() -> None:
    config = ServerConfig(api_key=KEYS, share_cache=True)
    with scripted_server([{"say": "Fine."}], config=config) as server:
        assert cached(server, ALICE) == 0 and cached(server, BOB) > 0


SALTED = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "fake/tiny", "prompt": "Hi"},
    "/v1/embeddings": {"model": "fake/tiny", "input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/api/chat": {**CHAT, "stream": False},
    "/completion": {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", SALTED)
def test_every_route_has_salts_of_its_key(keyed: RunningServer, path: str) -> None:
    keyed.engine.seen.clear()
    for headers in (ALICE, BOB, ALICE):
        assert keyed.post(path, SALTED[path], headers=headers).status_code == 200
    first, other, again = [request.cache_salt for request in keyed.engine.seen]
    assert first == again != other, "speculation guesses from answers with the same salt only"
    assert len(first) == len(other) == 64


def test_embeddings_take_a_salt_of_the_client(server: RunningServer) -> None:
    server.post("/v1/embeddings", {"model": "fake/tiny", "input": "Hi", "cache_salt": "mine"})
    assert server.engine.seen[-1].cache_salt == "mine"


def test_control_characters_are_no_salt(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {**CHAT, "cache_salt": "a\u0000b"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


def test_no_client_goes_before_the_others(keyed: RunningServer, server: RunningServer) -> None:
    urgent = {**CHAT, "priority": -5}
    refused = keyed.post("/v1/chat/completions", urgent, headers=ALICE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    tier = keyed.post("/v1/chat/completions", {**CHAT, "service_tier": "priority"}, headers=ALICE)
    assert tier.status_code == 200 and keyed.engine.seen[-1].priority == 0, "as with OpenAI: the usual tier"
    assert keyed.post("/v1/chat/completions", {**CHAT, "priority": 5}, headers=ALICE).status_code == 200
    assert server.post("/v1/chat/completions", urgent).status_code == 200, "alone on a machine one may"


def test_an_operator_may_allow_more(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=KEYS, min_priority=-3))
    for priority, status in ((-3, 200), (-4, 400)):
        reply = server.post("/v1/chat/completions", {**CHAT, "priority": priority}, headers=ALICE)
        assert reply.status_code == status


def test_a_server_without_keys_answers_to_names_of_this_machine_only(
    serving: Serving, server: RunningServer, keyed: RunningServer
) -> None:
    evil = {"host": "evil.example"}
    reply = server.post("/v1/chat/completions", CHAT, headers=evil)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "unknown_host")
    assert server.post("/v1/chat/completions", CHAT, headers={"host": "localhost:8000"}).status_code == 200
    assert keyed.post("/v1/chat/completions", CHAT, headers={**evil, **ALICE}).status_code == 200
    named = serving(ServerConfig(allowed_host=("Evil.example",)))
    assert named.post("/v1/chat/completions", CHAT, headers=evil).status_code == 200


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *((host, True) for host in ("", "localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5")),
        *((host, True) for host in ("ollama:11434", "box.local", "host.docker.internal", "a.localhost")),
        *((host, False) for host in ("evil.example", "evil.example:8000", "localhost.evil.com", "127.0.0.1.nip.io")),
        *((host, False) for host in ("a.b", "foo?.example.com", "[::1].evil.com", "evil.example.")),
    ],
)
def test_names_of_this_machine(host: str, is_local: bool) -> None:
    assert names_this_machine(host, ()) is is_local


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_reply_holds_a_bounded_number_of_logprobs(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(generation, "MAX_REPLY_LOGPROBS", 300)
    asked = {"model": "fake/tiny", "prompt": "x" * 40, "max_tokens": 30, "stream": is_streamed}
    assert server.post("/v1/completions", {**asked, "logprobs": 2}).status_code == 200
    many = server.post("/v1/completions", {**asked, "n": 8, "logprobs": 2})
    assert many.status_code == (200 if is_streamed else 400), "a stream keeps none"
    if not is_streamed:
        assert many.json()["error"]["param"] == "logprobs"
        few = server.post("/v1/completions", {**asked, "prompt_logprobs": 2, "prompt": ["x" * 40]})
        refused = server.post("/v1/completions", {**asked, "prompt_logprobs": 2, "prompt": ["x" * 40] * 3})
        assert (few.status_code, refused.status_code) == (200, 400)
        assert refused.json()["error"]["param"] == "prompt_logprobs"
    assert not server.engine.running


def counted(server: ScriptedServer) -> tuple[float, float]:
    text = server.get("/metrics", headers=ALICE).text
    names = ("tokenmill_prompt_tokens_total", "tokenmill_generation_tokens_total")
    return tuple(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(n)) for n in names)  # type: ignore[return-value]


def test_tokens_of_clients_that_leave_are_counted() -> None:
    config = ServerConfig(api_key=KEYS, public_metrics=True)
    with scripted_server([{"say": "word " * 400, "token_delay_s": 0.02}], config=config) as server:
        body = {"model": "scripted", "prompt": "Once upon a time", "max_tokens": 300, "stream": True}
        with server.http.stream("POST", server.url + "/v1/completions", json=body, headers=ALICE) as reply:
            lines = reply.iter_lines()
            seen = [next(lines) for _ in range(40)]
        num_seen = sum(line.startswith("data: {") for line in seen)
        assert eventually(lambda: counted(server)[0] > 0)
        prompt, generated = counted(server)
        assert prompt > 3 and num_seen <= generated < 300


def test_two_last_messages_of_the_assistant_are_refused_where_one_is_to_be_continued(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "x"}, *[{"role": "assistant", "content": "a"}] * 2]
    asked = {**CHAT, "messages": turns, "add_generation_prompt": False}
    reply = server.post("/v1/chat/completions", {**asked, "continue_final_message": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert server.post("/v1/chat/completions", asked).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strng"}}}),
        ("guided_json", {"type": 5}),
        ("guided_regex", "("),
    ],
)
def test_a_wrong_schema_is_blamed_on_its_field(scripted: ScriptedServer, field: str, value: Any) -> None:
    body = {"model": "scripted", "prompt": "x", field: value}
    reply = scripted.post("/v1/completions", body, headers=ALICE)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_lists_of_token_ids_are_bounded_over_all_prompts(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parse, "MAX_LISTED_IDS", 100)
    asked = {"model": "fake/tiny", "allowed_token_ids": list(range(40))}
    assert server.post("/v1/completions", {**asked, "prompt": ["a", "b"]}).status_code == 200
    assert server.post("/v1/completions", {**asked, "prompt": ["a", "b", "c"]}).status_code == 400


# ── keys as tenants of the engine ──────────────────────────────────────────────────────────────────────


def test_a_key_is_a_tenant_with_its_weight_and_limits(serving: Serving, tmp_path: Path) -> None:
    path = keys_file(tmp_path, alice={"weight": 2.5, "max_sequences": 3}, bob={})
    server = serving(ServerConfig(keys_file=path), keys=KeyRing(path=path))
    for headers in (ALICE, BOB):
        assert server.post("/v1/chat/completions", CHAT, headers=headers).status_code == 200
    alice, bob = [request.tenant for request in server.engine.seen]
    assert (alice.id, alice.weight, alice.max_sequences) == ("alice", 2.5, 3)
    assert (bob.id, bob.weight, bob.max_sequences) == ("bob", 1.0, None)


def test_of_several_keys_one_that_sees_all_changes_models(serving: Serving, tmp_path: Path) -> None:
    """Behind a proxy on the same machine every client comes from there."""
    path = keys_file(tmp_path, alice={}, bob={"sees_all": True})
    server = serving(ServerConfig(keys_file=path), keys=KeyRing(path=path))
    for route, body in (
        ("/models/unload", {"model": "fake/tiny"}),
        ("/replicas/restart", {"model": "fake/tiny"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}),
        ("/api/create", {"model": "evil", "from": "fake/tiny", "stream": False}),
        ("/api/copy", {"source": "fake/tiny", "destination": "evil"}),
    ):
        assert server.post(route, body, headers=ALICE).status_code == 403, route
    unload = ("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert server.post(*unload, headers=BOB).status_code == 404
    alone = serving(ServerConfig(api_key=("alice",)))
    assert alone.post(*unload, headers=ALICE).status_code == 404, "a lone key is that of who runs the server"


def test_of_several_keys_one_that_sees_all_reads_what_is_about_all(serving: Serving, tmp_path: Path) -> None:
    path = keys_file(tmp_path, alice={}, bob={"sees_all": True})
    server = serving(ServerConfig(keys_file=path), keys=KeyRing(path=path))
    for route in ("/metrics", "/replicas", "/slots"):
        refused = server.get(route, headers=ALICE)
        assert refused.status_code == 403 and "sees all" in refused.text and "tokenmill_" not in refused.text, route
        assert server.get(route, headers=BOB).status_code == 200, route
    alone = serving(ServerConfig(api_key=("alice",)))
    assert alone.get("/metrics", headers=ALICE).status_code == 200
    equal = serving(ServerConfig(api_key=("alice", "bob")))
    assert equal.get("/metrics", headers=ALICE).status_code == 403
    public = serving(ServerConfig(api_key=("alice", "bob"), public_metrics=True))
    assert public.get("/metrics").status_code == 200


def test_of_several_keys_one_that_sees_all_unloads_models_by_keep_alive() -> None:
    unloaded: list[str] = []

    async def unload() -> None:
        unloaded.append("model")

    async def send(message: Any) -> None:
        pass

    async def ask(*, sees_all: bool) -> None:
        record = RequestRecord("r", "POST", "/api/chat", key=KeyRecord(id="x", sha256="", sees_all=sees_all))
        scope = {"type": "http", "state": {"record": record}}
        await PresenceReply("m", unload, dict, needs_operator=True)(scope, None, send)  # type: ignore[arg-type]

    with pytest.raises(ModelsAreFixed):
        asyncio.run(ask(sees_all=False))
    assert not unloaded
    asyncio.run(ask(sees_all=True))
    assert unloaded == ["model"]


def test_a_key_has_a_smallest_priority_of_its_own(serving: Serving, tmp_path: Path) -> None:
    path = keys_file(tmp_path, alice={"min_priority": -2}, bob={})
    server = serving(ServerConfig(keys_file=path), keys=KeyRing(path=path))
    paths = {"/v1/chat/completions": CHAT, "/v1/completions": {"model": "fake/tiny", "prompt": "Hi"}}
    for route, body in paths.items():
        statuses = [
            server.post(route, {**body, "priority": priority}, headers=headers).status_code
            for headers in (ALICE, BOB)
            for priority in (-2, -3)
        ]
        assert statuses == [200, 400, 400, 400]
    for headers, tier, priority in ((ALICE, "priority", -1), (BOB, "default", 0)):
        reply = server.post("/v1/chat/completions", {**CHAT, "service_tier": "priority"}, headers=headers)
        assert reply.json()["service_tier"] == tier and server.engine.seen[-1].priority == priority
        asked = {"model": "fake/tiny", "input": "Hi", "service_tier": "priority"}
        made = server.post("/v1/responses", asked, headers=headers)
        assert made.json()["service_tier"] == tier and server.engine.seen[-1].priority == priority
    assert "service_tier" not in server.post("/v1/chat/completions", CHAT, headers=ALICE).json()
