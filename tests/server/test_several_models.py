"""Several models behind one server: names, states, loads on demand, failures, keep-alives, routes of administrators.
Fake engines, real HTTP."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import ollama
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.fake_models import GB, FakeSource, fake_models
from tests.support.loopback import GENERATIONS, RunningServer, Serving, keys_file
from tests.support.metric_values import metric_values
from tests.support.timing import SOON_S
from tokenmill.cli import main
from tokenmill.cli.serve import planned_memory
from tokenmill.config import EngineConfig
from tokenmill.config.server import ServerConfig
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.errors import DamagedFile, UnknownModel
from tokenmill.server import loader as loader_module
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRing
from tokenmill.server.loader import ModelSource
from tokenmill.server.run import stored_model

HELLO = [{"role": "user", "content": "Hi"}]


class Several(NamedTuple):
    server: RunningServer
    gates: dict[str, EngineGate]
    sources: dict[str, FakeSource]

    def chat(self, model: str, **fields: object) -> httpx.Response:
        return self.server.post("/v1/chat/completions", {"model": model, "messages": HELLO, **fields})

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.server.get("/models").json()["data"]}

    def wait_for(self, name: str, state: str) -> None:
        deadline = time.monotonic() + SOON_S
        while self.rows()[name]["status"]["value"] != state:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def several(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Several:
    """Three models, of which two fit."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    monkeypatch.setattr(loader_module, "SWEEP_S", 0.02)
    loader, gates, sources = fake_models("first", "coder", "third", memory_bytes=2 * GB)
    gates["coder"].aliases = ("gpt-4o-mini", "claude-sonnet-*", "claude-*")
    gates["third"].aliases = ("claude-opus-*",)

    def make_model(name: str) -> tuple[EngineGate, ModelSource]:
        if name != "stored":
            raise UnknownModel(f"{name} is not in the store", param="model")
        return EngineGate(name=name, is_added=True), sources.setdefault(name, FakeSource(name))

    loader.make_model = make_model
    server = serving(ServerConfig(keep_alive_s=0.1), list(gates.values()), loader=loader)
    return Several(server, gates, sources)


def test_models_answer_to_names_aliases_and_wildcards(several: Several) -> None:
    asked = {
        "first": "first",
        "coder": "coder",
        "gpt-4o-mini": "coder",
        "claude-sonnet-4-6": "coder",
        "claude-haiku": "coder",
        "claude-opus-5": "third",
    }
    assert {name: several.chat(name).json()["model"] for name in asked} == asked
    unknown = several.chat("gpt-5")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "first, coder, third" in unknown.json()["error"]["message"]
    answered = several.server.post("/v1/responses", {"model": "claude-opus-5", "input": "Hi"}).json()
    assert (answered["model"], answered["status"]) == ("third", "completed")
    default = several.server.post("/generate", {"inputs": "Hi"})
    assert default.status_code == 200 and len(several.sources["first"].engines) >= 1


def test_adapters_are_names_of_their_own(several: Several) -> None:
    several.sources["coder"].info = replace(several.sources["coder"].info, adapters=("sql", "shell"))
    asked = {"coder:sql": "coder:sql", "shell": "coder:shell"}
    assert several.chat("nobody").status_code == 404  # and all files are read
    several.server.get("/v1/models")
    assert {name: several.chat(name).json()["model"] for name in asked} == asked
    seen = several.sources["coder"].engines[-1].seen
    assert [request.adapter for request in seen] == ["sql", "shell"]
    assert several.chat("coder").json()["model"] == "coder" and seen[-1].adapter is None
    row = several.rows()["coder:sql"]
    assert (row["parent"], row["status"]["value"]) == ("coder", "loaded")
    assert several.chat("coder:nothing").status_code == several.chat("first:sql").status_code == 404


def test_lists_show_all_models_and_load_none(several: Several) -> None:
    listed = several.server.get("/v1/models").json()["data"]
    assert [row["id"] for row in listed] == ["first", "coder", "third"]
    assert {row["status"]["value"] for row in listed} == {"unloaded"} and listed[0]["max_model_len"] == 512
    assert [row["is_default"] for row in listed] == [True, False, False]
    assert several.server.get("/v1/models/gpt-4o-mini").json()["id"] == "coder"
    anthropic = several.server.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    tags = several.server.get("/api/tags").json()["models"]
    assert [row["id"] for row in anthropic] == ["first", "coder", "third"] and len(tags) == 3
    shown = several.server.post("/api/show", {"model": "coder"}).json()
    assert shown["details"]["family"] == "llama"
    assert several.server.post("/tokenize", {"model": "coder", "prompt": "Hi"}).json()["count"] == 3
    assert several.server.get("/health").json() == {"status": "ready", "detail": "0 of 3 models in memory"}
    assert several.server.get("/api/ps").json() == {"models": []}
    assert not any(source.engines for source in several.sources.values())


def test_a_crowd_for_three_models_with_room_for_two(several: Several) -> None:
    for source in several.sources.values():
        source.delay_s = 0.002
    names = ["first", "coder", "third"] * 12
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(several.chat, names))
    assert [answer.json()["model"] for answer in answers] == names
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {FakeEngine().answer}
    assert sum(source.num_alive for source in several.sources.values()) <= 2
    rendered = several.server.get("/metrics").text
    for name, source in several.sources.items():
        assert f'tokenmill_requests_total{{model="{name}",outcome="stop"}} 12.0' in rendered
        assert f'tokenmill_model_unloads_total{{model="{name}"}} {float(source.num_closed)}' in rendered
        assert f'tokenmill_model_loaded{{model="{name}"}} {float(source.num_alive)}' in rendered
    assert metric_values(rendered)["tokenmill_engine_restarts_total"] == 0


@pytest.mark.parametrize("dialect", GENERATIONS)
def test_a_failed_load_is_a_503_with_the_reason_in_every_dialect(several: Several, dialect: str) -> None:
    several.sources["third"].failure = DamagedFile("third.gguf is truncated")
    path, body = GENERATIONS[dialect]
    reply = several.server.post(path, {**body, "model": "third"})
    assert reply.status_code == (529 if dialect == "anthropic" else 503)
    assert "third.gguf is truncated" in reply.text and int(reply.headers["retry-after"]) > 0
    assert several.chat("first").status_code == 200
    row = several.rows()["third"]
    assert row["status"] == {"value": "failed", "reason": "third.gguf is truncated"}


@pytest.mark.parametrize(
    ("dialect", "ping"), [("openai", b": ping\n\n"), ("anthropic", b"event: ping"), ("ollama", b"")]
)
def test_streams_are_kept_open_while_a_model_loads(several: Several, dialect: str, ping: bytes) -> None:
    several.sources["coder"].load_s = 0.35
    path, body = GENERATIONS[dialect]
    reply = several.server.post(path, {**body, "model": "coder", "stream": True})
    assert reply.status_code == 200 and FakeEngine().answer.split()[0] in reply.text
    if ping:
        assert reply.content.startswith(ping) and reply.content.count(ping) >= 2
    else:
        assert b"\n\n" not in reply.content and reply.content.startswith(b"{")


def test_a_load_that_fails_after_pings_ends_the_stream(several: Several) -> None:
    several.sources["coder"].load_s = 0.25
    several.sources["coder"].failure = DamagedFile("coder.gguf is truncated")
    reply = several.chat("coder", stream=True)
    assert reply.status_code == 200 and reply.content.startswith(b": ping")
    assert "coder.gguf is truncated" in reply.text and "[DONE]" not in reply.text.split("error")[0]


def test_clients_of_ollama_decide_how_long_a_model_stays(several: Several) -> None:
    with ollama.Client(host=several.server.url) as client:
        for keep_alive in (1e300, "9" * 400 + "h", "1h"):  # what is beyond all dates is for ever, and no date
            assert client.generate("coder", keep_alive=keep_alive).done_reason == "load"
            assert [one.model for one in client.ps().models] == ["coder:latest"]
        (running,) = client.ps().models
        assert running.model == "coder:latest" and running.size == GB and running.context_length == 512
        assert running.expires_at is not None and 3500 < running.expires_at.timestamp() - time.time() < 3601
        assert several.rows()["coder"]["keep_alive_s"] == 3600 and several.rows()["coder"]["expires_in_s"] > 3500
        assert client.chat("coder", HELLO, keep_alive=-1).done and several.rows()["coder"]["keep_alive_s"] is None
        assert client.generate("coder", keep_alive=0).done_reason == "unload"
        assert several.rows()["coder"]["status"]["value"] == "unloaded"
        assert client.generate("coder", "Hi", keep_alive=0).done  # answered first
        several.wait_for("coder", "unloaded")
        several.sources["coder"].load_s = 0.2
        late = client.generate("coder", "Hi")
        assert (late.load_duration or 0) > 0.2e9 > (late.prompt_eval_duration or 0)  # the load is not the prompt's
        several.gates["first"].is_pinned = True
        with pytest.raises(ollama.ResponseError, match="can't be unloaded"):
            client.chat("first", [], keep_alive=0)


@pytest.fixture
def tenants(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Several:
    """Two models, and keys that are their own names: of an operator, of two tenants, one of them for `first` alone."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    monkeypatch.setattr(loader_module, "SWEEP_S", 0.02)
    loader, gates, sources = fake_models("first", "coder", memory_bytes=2 * GB)
    path = keys_file(tmp_path, operator={"sees_all": True}, alice={}, bound={"models": ["first"]})
    server = serving(ServerConfig(keys_file=path), list(gates.values()), loader=loader, keys=KeyRing(path=path))
    return Several(server, gates, sources)


def test_a_tenant_decides_nothing_about_how_long_a_model_stays(tenants: Several) -> None:
    def ask(key: str, **fields: object) -> int:
        body = {"model": "coder", "stream": False, **fields}
        return tenants.server.post("/api/generate", body, headers={"authorization": f"Bearer {key}"}).status_code

    coder = tenants.gates["coder"]
    assert ask("operator", keep_alive="1h") == 200 and coder.keep_alive_s == 3600
    for asked in ({"prompt": "Hi", "keep_alive": 0.01}, {"keep_alive": 1}, {"prompt": "Hi", "keep_alive": -1}):
        assert ask("alice", **asked) == 200
        assert coder.keep_alive_s == 3600, asked
    for path, body in {
        "/api/chat": {"messages": HELLO},
        "/api/embed": {"input": "Hi"},
        "/api/embeddings": {"prompt": "Hi"},
    }.items():
        body = {"model": "coder", "stream": False, "keep_alive": 0, **body}
        assert tenants.server.post(path, body, headers={"authorization": "Bearer alice"}).status_code == 200
        assert coder.keep_alive_s == 3600, path
    assert ask("operator", prompt="Hi", keep_alive=60) == 200 and coder.keep_alive_s == 60


def test_a_key_loads_no_model_that_it_may_not_use(tenants: Several) -> None:
    bound = {"authorization": "Bearer bound"}
    for fields in ({}, {"keep_alive": "1h"}, {"prompt": "Hi"}):
        body = {"model": "coder", "stream": False, **fields}
        assert tenants.server.post("/api/generate", body, headers=bound).status_code == 403
        assert tenants.gates["coder"].state == "unloaded"
    assert tenants.server.post("/api/generate", {"model": "first", "stream": False}, headers=bound).status_code == 200


def test_how_much_a_model_is_used_is_told_to_operators_alone(tenants: Several) -> None:
    tenants.gates["first"].keep_alive_s = 600.0
    load = {"model": "first", "wait": True}
    assert tenants.server.post("/models/load", load, headers={"authorization": "Bearer operator"}).status_code == 200
    told = {}
    for key in ("operator", "alice"):
        headers = {"authorization": f"Bearer {key}"}
        rows = [
            tenants.server.get("/models", headers=headers).json()["data"][0],
            tenants.server.get("/v1/models", headers=headers).json()["data"][0],
            tenants.server.get("/v1/models/first", headers=headers).json(),
            tenants.server.get("/ui/models", headers=headers).json()["served"][0],
        ]
        (card,) = tenants.server.get("/api/ps", headers=headers).json()["models"]
        uses = {(row["num_running"], row["num_waiting"], row["expires_in_s"] is None) for row in rows}
        told[key] = uses, datetime.fromisoformat(card["expires_at"][:19]).year
    assert told["alice"][0] == {(None, None, True)} and told["alice"][1] > datetime.now(UTC).year + 50
    assert told["operator"][0] == {(0, 0, False)} and told["operator"][1] <= datetime.now(UTC).year + 1


def test_administrators_load_and_unload(several: Several) -> None:
    server = several.server
    assert server.post("/models/load", {"model": "gpt-4o-mini", "wait": True}).json() == {
        "success": True,
        "model": "coder",
        "status": "loaded",
    }
    assert server.post("/models/load", {"model": "coder"}).json()["status"] == "loaded"
    assert server.post("/models/load", {"model": "third"}).json()["status"] == "loading"
    several.wait_for("third", "loaded")
    memory = server.get("/models").json()["memory"]
    assert memory == {"cpu": {"total_bytes": 2 * GB, "used_bytes": 2 * GB}}
    assert several.rows()["third"]["memory_bytes"] == GB
    for _ in range(2):
        assert server.post("/models/unload", {"model": "coder"}).json()["status"] == "unloaded"
    several.sources["coder"].failure = DamagedFile("coder.gguf is truncated")
    failed = server.post("/models/load", {"model": "coder", "wait": True})
    assert failed.status_code == 503 and "truncated" in failed.text
    assert server.post("/models/load", {"model": "nobody"}).status_code == 404
    assert server.post("/models/unload", {"model": "nobody"}).status_code == 404
    assert server.post("/models/load", {"model": "coder", "wait": "soon"}).status_code == 400


def test_a_model_of_the_store_can_be_added(several: Several) -> None:
    assert several.chat("stored").status_code == 404
    assert several.server.post("/models/load", {"model": "stored", "wait": True}).json()["status"] == "loaded"
    assert several.chat("stored").json()["model"] == "stored"
    assert list(several.rows()) == ["first", "coder", "third", "stored"]
    assert several.server.post("/models/unload", {"model": "stored"}).json()["status"] == "unloaded"
    assert several.chat("stored").json()["model"] == "stored"


def test_an_added_model_can_be_deleted(several: Several) -> None:
    assert several.server.post("/models/load", {"model": "stored", "wait": True}).status_code == 200
    deleted = several.server.http.request("DELETE", f"{several.server.url}/api/delete", json={"model": "stored"})
    assert deleted.status_code == 404  # this store does not have its files; but it is served no longer
    assert several.chat("stored").status_code == 404 and several.sources["stored"].num_alive == 0
    refused = several.server.http.request("DELETE", f"{several.server.url}/api/delete", json={"model": "first"})
    assert refused.status_code == 400 and "is being served" in refused.text


def test_ps_and_stop_ask_a_server(several: Several, capsys: pytest.CaptureFixture[str]) -> None:
    several.gates["coder"].keep(600.0)
    several.sources["third"].failure = DamagedFile("third.gguf is truncated")
    for name in ("coder", "third"):
        several.chat(name)
    assert main(["ps", "--url", several.server.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["first", "unloaded", "0"] and lines[2][:4] == ["coder", "loaded", "1.0", "GB"]
    assert lines[2][-1] == "s" and 590 < int(lines[2][-2]) <= 600
    assert lines[3][1:6] == ["failed:", "third.gguf", "is", "truncated", "0"]
    assert main(["ps", "--json", "--url", several.server.url]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ["first", "coder", "third"]
    assert main(["stop", "gpt-4o-mini", "--url", several.server.url]) == 0
    assert capsys.readouterr().out == "coder is unloaded\n" and several.sources["coder"].num_alive == 0
    several.chat("coder")
    assert main(["stop", "--url", several.server.url]) == 0  # all that are loaded
    assert main(["stop", "--url", several.server.url]) == 0
    assert capsys.readouterr().out == "coder is unloaded\nno model is loaded\n"
    assert main(["stop", "nobody", "--url", several.server.url]) != 0
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["scripted:{}/model.json", "{}/model.json", "{}", "../x", "nobody/knows"])
def test_clients_add_no_files_and_nothing_that_is_not_here(name: str, tmp_path: Path, several: Several) -> None:
    (tmp_path / "model.json").write_text('[{"say": "secret"}]')
    with pytest.raises(UnknownModel):
        stored_model(EngineConfig(), planned_memory, SpareCore(), name.format(tmp_path))


def test_who_may_not_manage_models_loads_none(serving: Serving) -> None:
    server = serving(ServerConfig(manage_models=False))
    for path in ("/models/load", "/models/unload"):
        reply = server.post(path, {"model": "fake/tiny"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "models_are_fixed")
    assert server.get("/models").json()["data"][0]["status"]["value"] == "loaded"
