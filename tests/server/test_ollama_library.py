"""Models through Ollama's routes: pull with progress, create, copy, delete, uploads, and who may do that."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import ollama
import pytest

from tests.support.client_farm import environment_of, listening_canary, node_modules
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.loopback import RunningServer, Serving
from tests.support.loopback_hub import FakeHub
from tokenmill.config.server import ServerConfig
from tokenmill.server.gate import EngineGate
from tokenmill.store import Manifest, Store, StoredFile
from tokenmill.types import ChatRequest

WEIGHTS = b"weights" * 1000
REPO = "tester/tiny"
GGUF = bytes(range(256)) * 8192
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of its own, in which the served model is."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    store = Store()
    store.prepare()
    fresh = store.root / "partial" / "fresh"
    fresh.write_bytes(WEIGHTS)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    files = [StoredFile("model.safetensors", digest, len(WEIGHTS))]
    store.install(Manifest(name="fake/tiny", source="hub", files=files), {"model.safetensors": fresh})
    return store


@pytest.fixture(scope="module")
def library_server(serving: Serving) -> RunningServer:
    engine = FakeEngine()
    running = serving(gate=EngineGate(engine))
    running.engine = engine
    return running


@pytest.fixture
def engine(library_server: RunningServer, home: Store) -> FakeEngine:
    engine = library_server.engine
    engine.__init__()  # type: ignore[misc]
    engine.info = replace(INFO, path=home.model_dir("fake/tiny"))
    return engine


@pytest.fixture
def client(library_server: RunningServer, engine: FakeEngine) -> Iterator[ollama.Client]:
    with ollama.Client(host=library_server.url) as client:
        yield client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(REPO, {"tiny-Q4_K_M.gguf": GGUF})
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    yield fake
    fake.close()


# ── created models ─────────────────────────────────────────────────────────────────────────────────────


def test_a_created_model_answers_under_its_name(client: ollama.Client, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mario."}]
    made = client.create(
        "mario",
        from_="fake/tiny",
        system="You are Mario.",
        parameters={"temperature": 0.25, "stop": ["Luigi"]},
        messages=messages,
    )
    assert made.status == "success"
    assert {model.model for model in client.list().models} == {"fake/tiny:latest", "mario:latest"}
    assert client.chat("mario", HELLO).model == "mario"
    request = engine.seen[-1]
    assert isinstance(request, ChatRequest)
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]
    assert (request.params.temperature, request.params.stop, request.params.top_k) == (0.25, ["Luigi"], 40)
    client.chat("mario:latest", [{"role": "system", "content": "You are Peach."}, *HELLO], options={"temperature": 0})
    request = engine.seen[-1]
    assert isinstance(request, ChatRequest)
    assert "You are Mario." not in [message.content for message in request.messages]
    assert request.params.temperature == 0
    assert client.generate("mario", "Hi").response == engine.answer
    assert engine.seen[-1].messages[0].content == "You are Mario."  # type: ignore[union-attr]


def test_other_dialects_know_created_models_too(library_server: RunningServer, client: ollama.Client) -> None:
    client.create("mario", from_="fake/tiny", system="You are Mario.", parameters={"temperature": 0.25})
    body = {"model": "mario", "messages": HELLO, "top_p": 0.5}
    assert library_server.post("/v1/chat/completions", body).json()["model"] == "mario"
    assert [model["id"] for model in library_server.get("/v1/models").json()["data"]] == ["fake/tiny", "mario"]
    request = library_server.engine.seen[-1]
    assert isinstance(request, ChatRequest) and request.messages[0].content == "You are Mario."
    assert (request.params.temperature, request.params.top_p) == (0.25, 0.5)
    said = library_server.post("/v1/messages", {"model": "mario", "messages": HELLO, "max_tokens": 9, "top_k": 3})
    assert said.json()["model"] == "mario"
    request = library_server.engine.seen[-1]
    assert isinstance(request, ChatRequest) and request.messages[0].content == "You are Mario."
    assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0.25, 3, 9)


def test_a_created_model_may_want_more_context_than_there_is(client: ollama.Client) -> None:
    client.create("wide", from_="fake/tiny", parameters={"num_ctx": 4096})
    assert len(client.list().models) == 2
    with pytest.raises(ollama.ResponseError, match=r"num_ctx 4096 is more than this server's context of 512"):
        client.chat("wide", HELLO)


def test_show_tells_what_was_added(client: ollama.Client) -> None:
    client.create("mario", from_="fake/tiny", system="You are Mario.", parameters={"temperature": 0.25}, license="MIT")
    shown = client.show("mario")
    assert "FROM fake/tiny" in (shown.modelfile or "") and "PARAMETER temperature 0.25" in (shown.modelfile or "")
    assert (shown.parameters or "").split() == ["temperature", "0.25"] and shown.license == "MIT"
    assert shown.details and shown.details.parent_model == "fake/tiny"


def test_a_model_made_from_a_created_one_has_its_words_too(client: ollama.Client, engine: FakeEngine) -> None:
    client.create("mario", from_="fake/tiny", system="You are Mario.", parameters={"temperature": 0.25, "top_k": 3})
    client.create("luigi", from_="mario", parameters={"top_k": 5})
    client.delete("mario")
    client.chat("luigi", HELLO)
    request = engine.seen[-1]
    assert isinstance(request, ChatRequest) and request.messages[0].content == "You are Mario."
    assert (request.params.temperature, request.params.top_k) == (0.25, 5)


def test_copies_and_deletions(client: ollama.Client, home: Store, engine: FakeEngine) -> None:
    assert client.copy("fake/tiny", "mine").status == "success"
    assert client.chat("mine", HELLO).done and engine.seen
    assert client.delete("mine").status == "success"
    assert home.names() == ["fake/tiny"] and home.has_blob(hashlib.sha256(WEIGHTS).hexdigest())
    for call in (lambda: client.delete("mine"), lambda: client.chat("mine", HELLO)):
        with pytest.raises(ollama.ResponseError, match="model 'mine' not found") as refusal:
            call()
        assert refusal.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="is being served"):
        client.delete("fake/tiny")
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.copy("nobody", "mine")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"from": "fake/tiny", "adapters": {"a": "sha256:00"}}, "adapters"),
        ({"from": "fake/tiny", "quantize": "q4_K_M"}, "quantize"),
        ({"from": "fake/tiny", "parameters": {"num_gpu": 1}}, "num_gpu"),
        ({"from": "fake/tiny", "parameters": {"temperature": "hot"}}, "temperature"),
        ({"from": "fake/tiny", "template": "{{ .Prompt }}"}, "Go template"),
        ({"from": "fake/tiny", "messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"from": "fake/tiny", "files": {"a": "sha256:00"}}, "files"),
        ({"modelfile": "FROM fake/tiny"}, "modelfile"),
        ({"files": {"a.gguf": "sha256:" + "0" * 64}}, "no content"),
        ({}, "neither 'from' or 'files' was specified"),
    ],
    ids=str,
)
def test_what_a_created_model_cannot_have(
    library_server: RunningServer, engine: FakeEngine, fields: dict[str, object], text: str
) -> None:
    reply = library_server.post("/api/create", {"model": "mario", "stream": False, **fields})
    assert reply.status_code == 400 and text in reply.json()["error"]


@pytest.mark.parametrize("name", ["../escape", "smollm2", "smollm2:135m", "a b", "", "x" * 300])
def test_names_that_no_model_may_have(library_server: RunningServer, engine: FakeEngine, name: str) -> None:
    reply = library_server.post("/api/create", {"model": name, "from": "fake/tiny", "stream": False})
    assert reply.status_code in (400, 404)
    assert Store().names() == ["fake/tiny"]


# ── pull ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pull_reports_its_progress(client: ollama.Client, hub: FakeHub, home: Store) -> None:
    hub.delay_s = 0.02
    lines = list(client.pull(f"hf.co/{REPO}:Q4_K_M", stream=True))
    assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
    digest = hashlib.sha256(GGUF).hexdigest()
    layers = [line for line in lines if line.digest]
    assert {line.digest for line in layers} == {f"sha256:{digest}"} and layers[0].status == f"pulling {digest[:12]}"
    completed = [line.completed or 0 for line in layers]
    assert completed == sorted(completed) and completed[-1] == layers[-1].total == len(GGUF) and len(layers) >= 2
    assert home.get(f"{REPO}:Q4_K_M") is not None
    assert client.pull(f"{REPO}:Q4_K_M").status == "success", "it is here already"
    client.delete(f"{REPO}:Q4_K_M")
    assert home.get(f"{REPO}:Q4_K_M") is None


@pytest.mark.slow
def test_the_javascript_client_manages_models(
    library_server: RunningServer, engine: FakeEngine, hub: FakeHub, home: Store, tmp_path: Path
) -> None:
    node, place = node_modules()
    pulled = f"{REPO}:Q4_K_M"
    command = [str(node), str(place / "programs" / "ollama_library.mjs"), library_server.url, "fake/tiny", pulled]
    with listening_canary() as canary:
        environment = environment_of(tmp_path, canary)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and canary.callers == [], done.stderr
    told = json.loads(done.stdout)
    assert told["steps"][0][0] == "pulling manifest" and told["steps"][-1][0] == "success"
    assert [len(GGUF), len(GGUF)] in [step[1:] for step in told["steps"]]
    assert (told["created"], told["copied"], told["system"]) == ("success", "success", "You are Mario.")
    assert told["before"] == ["fake/tiny:latest", "luigi:latest", "mario:latest"], "what can answer"
    assert told["after"] == ["fake/tiny:latest"] and home.names() == ["fake/tiny"]
    assert told["refused"] == [404, "model 'mario' not found"]


def test_a_failed_pull_ends_in_an_error(client: ollama.Client, library_server: RunningServer, hub: FakeHub) -> None:
    for name in ("nobody", "/etc/passwd", str(Path(__file__).parent)):
        with pytest.raises(ollama.ResponseError, match="file does not exist"):
            list(client.pull(name, stream=True))
    with pytest.raises(ollama.ResponseError, match="could not be pulled"):
        client.pull("other/repository")


def test_a_client_that_leaves_ends_its_pull(library_server: RunningServer, engine: FakeEngine, hub: FakeHub) -> None:
    hub.delay_s = 0.1
    body = {"model": f"{REPO}:Q4_K_M"}
    with httpx.stream("POST", library_server.url + "/api/pull", json=body) as reply:
        next(reply.iter_lines())
    hub.delay_s = 0.0
    with ollama.Client(host=library_server.url) as client:
        for _ in range(3):  # the places are free again, and what had arrived is kept
            assert client.pull(f"{REPO}:Q4_K_M").status == "success"


# ── uploads ────────────────────────────────────────────────────────────────────────────────────────────


def test_uploaded_files_become_a_model(client: ollama.Client, tmp_path: Path, home: Store) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(GGUF)
    digest = client.create_blob(file)
    assert client.create("mine", files={"mine.gguf": digest}).status == "success"
    manifest = home.get("mine")
    assert manifest is not None and home.path_of(manifest).read_bytes() == GGUF
    with pytest.raises(ollama.ResponseError, match="model 'mine' not found"):
        client.chat("mine", HELLO)  # it is in the store, but this server runs another one


def test_blobs_are_checked(library_server: RunningServer, engine: FakeEngine, home: Store) -> None:
    http, url = library_server.http, f"{library_server.url}/api/blobs/sha256:"
    digest = hashlib.sha256(b"right").hexdigest()
    leftover = home.root / "partial" / "upload-of-a-killed-process"
    leftover.write_bytes(b"ri")
    os.utime(leftover, (0, 0))
    assert http.head(url + digest).status_code == 404
    wrong = http.post(url + digest, content=b"wrong")
    assert wrong.status_code == 400 and "digest mismatch" in wrong.json()["error"] and not home.has_blob(digest)
    assert http.post(url + digest, content=b"right", headers={"origin": "https://evil.example"}).status_code == 403
    assert http.post(url + digest, content=b"right").status_code == 201
    assert http.head(url + digest).status_code == 200 and http.post(url + digest, content=b"right").status_code == 200
    assert http.head(url + "zz").status_code == 400
    assert list((home.root / "partial").glob("upload-*")) == []


# ── who may ────────────────────────────────────────────────────────────────────────────────────────────


def test_models_are_fixed_beyond_this_machine(serving: Serving, home: Store) -> None:
    """The test's servers listen on loopback whatever their setting says."""
    open_server = serving(ServerConfig(host="0.0.0.0", allow_open=True))
    allowed = serving(ServerConfig(host="0.0.0.0", allow_open=True, manage_models=True))
    fixed = serving(ServerConfig(manage_models=False))
    calls = [
        ("POST", "/api/pull", {"model": "x"}),
        ("POST", "/api/create", {"model": "x", "from": "y"}),
        ("POST", "/api/copy", {"source": "x", "destination": "y"}),
        ("DELETE", "/api/delete", {"model": "x"}),
        ("POST", "/api/blobs/sha256:" + "0" * 64, None),
        ("HEAD", "/api/blobs/sha256:" + "0" * 64, None),
        ("POST", "/api/push", {"model": "x"}),
    ]
    for method, path, body in calls:
        for server in (open_server, fixed):
            assert server.http.request(method, server.url + path, json=body).status_code == 403, path
        assert allowed.http.request(method, allowed.url + path, json=body).status_code != 403, path


def test_a_page_whose_name_leads_here_changes_nothing(library_server: RunningServer, engine: FakeEngine) -> None:
    body = {"model": "mario", "from": "fake/tiny", "stream": False}
    assert library_server.post("/api/create", body, headers={"host": "evil.example"}).status_code == 403
    assert library_server.post("/api/create", body, headers={"host": "localhost:8000"}).status_code == 200
