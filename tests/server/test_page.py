"""The page at `/` without a browser: who gets which files and which data, the feed of the load, aborts."""

from __future__ import annotations

import hashlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

import tokenmill.server.ui
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import CHAT, RunningServer, Serving
from tests.support.metric_values import metric_values
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.timing import eventually
from tokenmill.config.server import ServerConfig
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRecord, KeyRing, new_key, write_keys
from tokenmill.server.ui.feed import SHOWN_SERIES
from tokenmill.server.ui.pages import PAGE_PATHS, PAGES, PARTS

ASSETS = Path(tokenmill.server.ui.__file__).parent / "assets"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FIRST, SECOND = "first-key", "second-key"
ENDLESS = [{"match": "forever", "say": "on and on ", "repeat": True, "token_delay_s": 0.005}, {"say": "Hello."}]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def reading(server: RunningServer | ScriptedServer, **headers: str) -> dict[str, Any]:
    """The first event of the feed."""
    with server.http.stream("GET", f"{server.url}/ui/events", headers=headers) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in reply.iter_lines() if line.startswith("data: "))
    event: dict[str, Any] = orjson.loads(line.removeprefix("data: "))
    return event


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────


def test_browsers_get_the_page_and_others_what_ollamas_clients_look_for(server: RunningServer) -> None:
    page = server.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html") and "/ui/app.js" in page.text
    assert server.get("/", headers={"accept": "*/*"}).text == "Ollama is running"
    head = httpx.head(f"{server.url}/", headers=HTML)
    assert (head.status_code, head.text) == (200, "") and head.headers["etag"] == page.headers["etag"]


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_files_are_tagged_and_may_load_nothing_from_elsewhere(server: RunningServer, path: str) -> None:
    reply = server.get(path, headers=HTML)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "http" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = server.get(path, headers={**HTML, "if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.text) == (304, "")
    assert "innerHTML" not in reply.text and "://cdn" not in reply.text


def test_every_file_is_served_and_all_that_is_served_is_there() -> None:
    assert sorted([*PARTS, *PAGES.values()]) == sorted(path.name for path in ASSETS.iterdir())
    for page in PAGES.values():
        text = (ASSETS / page).read_text(encoding="utf-8")
        assert "onclick" not in text and "<style" not in text
        assert len(re.findall(r'<script( type="module")? src="/ui/', text)) == text.count("<script")


def test_files_are_public_and_data_needs_the_key(serving: Serving) -> None:
    keyed = serving(ServerConfig(api_key=(FIRST,)))
    for path in PAGE_PATHS:
        assert keyed.get(path, headers=HTML).status_code == 200, path
    for path in ("/ui/events", "/ui/models", "/openapi.json"):
        assert keyed.get(path).status_code == 401, path
    assert keyed.post("/ui/abort", {"id": "x"}).status_code == 401
    assert reading(keyed, **bearer(FIRST))["state"] == "ready"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"sec-fetch-site": "cross-site"}, "foreign_page"),
        ({"sec-fetch-site": "same-site"}, "foreign_page"),
        ({"origin": "http://evil.example"}, "foreign_page"),
        ({"origin": "null"}, "foreign_page"),
        ({"host": "evil.example:8000"}, "unknown_host"),
    ],
    ids=str,
)
def test_pages_of_others_are_refused(server: RunningServer, headers: dict[str, str], code: str) -> None:
    for reply in (
        server.get("/ui/events", headers=headers),
        server.get("/ui/models", headers=headers),
        server.post("/ui/abort", {"id": "x"}, headers=headers),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, code)
    assert server.http.post(f"{server.url}/ui/abort", content=b'{"id": "x"}').status_code == 415, "no form reaches it"
    own = {"origin": server.url, "sec-fetch-site": "same-origin"}
    for told in (own, {"origin": server.url}, {**own, "origin": "https://behind.a.proxy.example"}):
        assert server.get("/ui/models", headers=told).status_code == 200


def test_models_to_choose_from(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    found = server.get("/ui/models").json()
    assert found["can_manage"] and found["stored"] == []
    default = next(one for one in found["catalog"] if one["name"] == "smollm2:135m")
    assert default["size_bytes"] == 98362432 and not default["is_stored"]


# ── the load ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_feed_says_what_metrics_say() -> None:
    with scripted_server(ENDLESS) as server:
        for _ in range(3):
            assert server.post("/v1/chat/completions", {**CHAT, "model": "scripted"}).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            pool.submit(server.post, "/v1/chat/completions", forever())
            assert eventually(lambda: reading(server)["series"]["tokenmill_requests_running"] == 1)
            assert metric_values(server.get("/metrics").text)["tokenmill_requests_running"] == 1
            abort_all(server)
        assert eventually(lambda: reading(server)["series"]["tokenmill_requests_running"] == 0)
        time.sleep(0.6)  # the next event is a reading of its own
        series, shown = reading(server)["series"], metric_values(server.get("/metrics").text)
        assert series["tokenmill_requests_total"] == {"stop": 3, "abort": 1, "length": 0, "error": 0, "rejected": 0}
        for name, value in series.items():
            for label, one in value.items() if isinstance(value, dict) else [(None, value)]:
                full = name if label is None else f"{name}{{{label}}}"
                assert shown.pop(full) == one, full
        prefixes = tuple(f"tokenmill_{family}" for family in SHOWN_SERIES)
        assert [name for name in shown if name.startswith(prefixes) and "_created" not in name] == []


def forever() -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": "forever"}], "max_tokens": 100_000}


def abort_all(server: ScriptedServer, key: str | None = None) -> None:
    headers = {} if key is None else bearer(key)
    for row in reading(server, **headers)["requests"]:
        assert server.post("/ui/abort", {"id": row["id"]}, headers=headers).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_ends_with_an_error_that_is_not_repeated(stream: bool) -> None:
    with scripted_server(ENDLESS) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/chat/completions", {**forever(), "stream": stream})
        assert eventually(lambda: any(row["generated_tokens"] > 3 for row in reading(server)["requests"]))
        (row,) = reading(server)["requests"]
        assert row["state"] == "answering" and row["prompt_tokens"] > 0 and row["model"] == "scripted"
        abort_all(server)
        reply = asked.result(60)
        last = [line for line in reply.text.splitlines() if line.startswith("data: ")][-1:] or [reply.text]
        assert '"code":"aborted"' in last[0] and reply.status_code == (200 if stream else 499)
        assert reading(server)["num_requests"] == 0
        assert metric_values(server.get("/metrics").text)["tokenmill_requests_total{abort}"] == 1
        assert server.post("/ui/abort", {"id": row["id"]}).status_code == 404


def test_work_in_the_background_is_listed_too() -> None:
    with scripted_server(ENDLESS) as server:
        body = {"model": "scripted", "input": "forever", "background": True, "max_output_tokens": 100_000}
        response = server.post("/v1/responses", body).json()
        assert eventually(lambda: len(reading(server)["requests"]) == 1)
        assert reading(server)["requests"][0]["path"] == "/v1/responses"
        abort_all(server)
        assert eventually(lambda: server.get(f"/v1/responses/{response['id']}").json()["status"] == "failed")


def test_the_feed_ends_when_the_server_stops(serving: Serving) -> None:
    gate = EngineGate(FakeEngine())
    stopping = serving(gate=gate)
    with stopping.http.stream("GET", f"{stopping.url}/ui/events") as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        gate.close()
        assert sum(line.startswith("data: ") for line in lines) <= 1


def test_an_operators_key_sees_and_aborts_the_requests_of_all(tmp_path: Path) -> None:
    operator, records = new_key([], KeyRecord(id="ops", sha256="", sees_all=True))
    write_keys(tmp_path / "keys.toml", records)
    keys = KeyRing([FIRST.encode()], tmp_path / "keys.toml")
    with scripted_server(ENDLESS, keys=keys) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/chat/completions", forever(), headers=bearer(FIRST))
        assert eventually(lambda: reading(server, **bearer(operator))["num_requests"] == 1)
        (row,) = reading(server, **bearer(operator))["requests"]
        assert row["key"] == hashlib.sha256(FIRST.encode()).hexdigest()
        assert "key" not in reading(server, **bearer(FIRST))["requests"][0]
        assert reading(server, **bearer(operator))["series"] and not reading(server, **bearer(FIRST))["series"]
        assert server.post("/ui/abort", {"id": row["id"]}, headers=bearer(operator)).status_code == 200
        assert asked.result(60).status_code == 499


def test_a_key_sees_and_aborts_its_own_requests_only() -> None:
    with (
        scripted_server(ENDLESS, config=ServerConfig(api_key=(FIRST, SECOND))) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(server.post, "/v1/chat/completions", forever(), headers=bearer(FIRST))
        assert eventually(lambda: len(reading(server, **bearer(FIRST))["requests"]) == 1)
        (row,) = reading(server, **bearer(FIRST))["requests"]
        others = reading(server, **bearer(SECOND))
        assert others["requests"] == [] and others["num_requests"] == 0
        assert others["series"] == {} and others["num_generated"] == others["num_read"] == 0
        assert server.post("/ui/abort", {"id": row["id"]}, headers=bearer(SECOND)).status_code == 404
        assert not asked.done()
        abort_all(server, FIRST)
        assert asked.result(60).status_code == 499
