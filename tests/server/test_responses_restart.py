"""What of the Responses API outlives its server: chains, conversations, responses in the background."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client_scripts import script
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import Serving
from tests.support.scripted_server import scripted_server
from tests.support.server_process import ServerProcess, free_port, is_alive, running
from tests.support.timing import SOON_S, eventually
from tokenmill.config.server import ServerConfig
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRecord, KeyRing, new_key, write_keys
from tokenmill.server.openai.responses import background, routes
from tokenmill.server.openai.responses.generate import ResponseGenerator, ResponseJob
from tokenmill.server.state.database import StateFailed
from tokenmill.server.state.responses import ResponseRow

SCRIPT = script(
    {"match": "forever", "say": "ha ", "repeat": True, "token_delay_s": 0.01},
    {"match": "my name is Ada[\\s\\S]*what is my name", "say": "You are Ada."},
    {"say": "Hello there!"},
)
Ask = Callable[..., dict[str, Any]]


def asking(http: httpx.Client, url: str = "") -> Ask:
    def ask(**body: Any) -> dict[str, Any]:
        reply = http.post(f"{url}/v1/responses", json={"model": "scripted", **body})
        assert reply.status_code == 200, reply.text
        response: dict[str, Any] = reply.json()
        return response

    return ask


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][-1]["content"][0]["text"])


def begin(http: httpx.Client, url: str = "") -> dict[str, str]:
    """Leave a chain, a conversation, a response that runs in the background and one that waits for its turn."""
    ask = asking(http, url)
    first = ask(input="my name is Ada")
    middle = ask(input="and that is that", previous_response_id=first["id"])
    talk = http.post(f"{url}/v1/conversations", json={}).json()["id"]
    ask(input="my name is Ada", conversation=talk)
    runs = [ask(input="forever", background=True)["id"] for _ in range(2)]  # as many as the engine takes
    for name in runs:
        wait_for(http, f"{url}/v1/responses/{name}", "in_progress")
    waits = ask(input="Hi", background=True)
    assert waits["status"] == "queued"
    return {"chain": middle["id"], "talk": talk, "runs": runs[0], "waits": waits["id"]}


def wait_for(http: httpx.Client, path: str, *states: str) -> dict[str, Any]:
    deadline = time.monotonic() + SOON_S
    while (seen := http.get(path).json())["status"] not in states:
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
    found: dict[str, Any] = seen
    return found


def require_all(http: httpx.Client, left: dict[str, str], url: str = "") -> None:
    ask = asking(http, url)
    assert text_of(ask(input="what is my name", previous_response_id=left["chain"])) == "You are Ada."
    assert text_of(ask(input="what is my name", conversation=left["talk"])) == "You are Ada."
    waited = wait_for(http, f"{url}/v1/responses/{left['waits']}", "completed")
    assert text_of(waited) == "Hello there!" and waited["background"]
    failed = http.get(f"{url}/v1/responses/{left['runs']}").json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    replayed = http.get(f"{url}/v1/responses/{left['runs']}?stream=true").text
    assert "event: response.failed" in replayed


def test_another_server_takes_over_what_one_left(tmp_path: Path) -> None:
    config = ServerConfig(state_dir=tmp_path)
    with scripted_server(SCRIPT, config=config, max_running=1, max_waiting=1) as first:
        left = begin(first.http, first.url)
    with scripted_server(SCRIPT, config=config) as second:
        require_all(second.http, left, second.url)
        ran = asking(second.http, second.url)(input="forever", background=True)["id"]
        wait_for(second.http, f"{second.url}/v1/responses/{ran}", "in_progress")
        with scripted_server(SCRIPT, config=config) as third:  # beside it, on the same file: its work is left alone
            assert third.get(f"/v1/responses/{ran}").json()["status"] == "in_progress"
            assert third.post(f"/v1/responses/{ran}/cancel").json()["status"] == "cancelled"


def test_servers_with_the_same_state_see_what_is_done_to_a_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "POLL_S", 0.05)
    monkeypatch.setattr(routes, "POLL_S", 0.05)
    config = ServerConfig(state_dir=tmp_path, keep_alive_s=0.1)
    with scripted_server(SCRIPT, config=config) as first, scripted_server(SCRIPT, config=config) as second:
        runs = [asking(first.http, first.url)(input="forever", background=True)["id"] for _ in range(3)]
        cancelled, deleted, followed = (f"/v1/responses/{name}" for name in runs)
        for path in (cancelled, deleted, followed):
            wait_for(first.http, first.url + path, "in_progress")
        assert second.post(f"{cancelled}/cancel").json()["status"] == "cancelled"
        assert wait_for(first.http, first.url + cancelled, "cancelled")["background"]
        assert second.http.delete(second.url + deleted).status_code == 200
        assert eventually(lambda: first.get(deleted).status_code == 404)
        assert eventually(lambda: first.engine.stats().running == 1), "what nobody wants is not generated"
        with second.http.stream("GET", f"{second.url}{followed}?stream=true&starting_after=1") as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": ping"
            first.post(f"{followed}/cancel")
            events = [line for line in lines if line.startswith("event: ")]
        assert (events[0], events[-1]) == ("event: response.in_progress", "event: response.failed")
        assert "event: response.output_text.delta" in events


def test_a_server_that_runs_takes_over_what_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "POLL_S", 0.05)
    monkeypatch.setattr(background, "SWEEP_S", 0.1)
    config = ServerConfig(state_dir=tmp_path)
    with (
        scripted_server(SCRIPT, config=config, served_name="another") as stranger,
        scripted_server(SCRIPT, config=config) as stays,
    ):
        with scripted_server(SCRIPT, config=config, max_running=1, max_waiting=1) as ends:
            left = begin(ends.http, ends.url)
        require_all(stays.http, left, stays.url)
        assert stranger.get(f"/v1/responses/{left['waits']}").json()["status"] == "completed"


def test_what_could_not_be_kept_is_kept_when_that_is_possible_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.05)
    is_full = False
    save = ResponseGenerator.save

    async def save_or_fail(self: ResponseGenerator, made: ResponseJob, row: ResponseRow) -> None:
        if is_full:
            raise StateFailed("the disk is full")
        await save(self, made, row)

    monkeypatch.setattr(ResponseGenerator, "save", save_or_fail)
    config = ServerConfig(state_dir=tmp_path)
    with scripted_server(SCRIPT, config=config) as server, scripted_server(SCRIPT, config=config) as other:
        made = asking(server.http, server.url)(input="forever", background=True, max_output_tokens=100)
        path = f"/v1/responses/{made['id']}"
        wait_for(server.http, server.url + path, "in_progress")
        is_full = True
        assert wait_for(server.http, server.url + path, "incomplete")["output"], "it is here"
        assert other.get(path).json()["status"] == "in_progress", "and not there"
        is_full = False
        assert wait_for(other.http, other.url + path, "incomplete")["output"]


def test_a_server_that_ends_keeps_what_it_finishes(serving: Serving) -> None:
    gate = EngineGate(FakeEngine(delay_s=0.02))
    server = serving(gate=gate)
    body = {"model": "fake/tiny", "input": "Hi", "stream": True}
    with server.http.stream("POST", f"{server.url}/v1/responses", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: response.created"
        first = json.loads(next(lines).removeprefix("data: "))["response"]
        gate.close()  # as on SIGTERM: new requests are refused, running ones finish
        assert "event: response.completed" in list(lines)
    assert server.post("/v1/responses", {**body, "stream": False}).status_code == 503
    assert server.get(f"/v1/responses/{first['id']}").json()["status"] == "completed"


def test_a_key_has_its_limits_in_the_background_too(serving: Serving, tmp_path: Path) -> None:
    secret, records = new_key([], KeyRecord(id="limited", sha256="", models=["fake/*"], max_running=1))
    other_secret, records = new_key(records, KeyRecord(id="barred", sha256="", models=["other"]))
    write_keys(tmp_path / "keys.toml", records)
    engine = FakeEngine(delay_s=0.01)
    server = serving(ServerConfig(), gate=EngineGate(engine), keys=KeyRing(path=tmp_path / "keys.toml"))
    body = {"model": "fake/tiny", "input": "Hi", "background": True}
    mine = {"authorization": f"Bearer {secret}"}
    refused = server.post("/v1/responses", body, headers={"authorization": f"Bearer {other_secret}"})
    assert refused.status_code == 403, refused.text
    names = [server.post("/v1/responses", body, headers=mine).json()["id"] for _ in range(3)]

    def statuses() -> set[str]:
        return {server.get(f"/v1/responses/{name}", headers=mine).json()["status"] for name in names}

    assert eventually(lambda: statuses() == {"completed"})
    assert engine.most_running == 1, "one after the other"


@pytest.mark.slow
def test_what_was_kept_survives_kill_9(tmp_path: Path) -> None:
    file = tmp_path / "scripted.json"
    file.write_text(json.dumps(SCRIPT))

    def serve(*options: str) -> tuple[list[str], int]:
        port = free_port()
        return ["-m", "tokenmill", "serve", f"scripted:{file}", "--port", str(port), *options], port

    home = {"TOKENMILL_HOME": str(tmp_path / "home")}
    command, port = serve("--max-running", "1", "--max-waiting", "1")
    with running(command, port, **home) as first:
        first.wait_for("ready")
        left = begin(first.http)
        end_hard(first)
    command, port = serve()
    with running(command, port, **home) as second:
        second.wait_for("ready")
        require_all(second.http, left)
        second.terminate()
        assert second.wait() == 0, second.output()
    assert (tmp_path / "home" / "state" / "tokenmill.db").stat().st_mode & 0o777 == 0o600


def end_hard(server: ServerProcess) -> None:
    """Kill a server, and see its engine end by itself."""
    children = server.children()
    server.child.send_signal(signal.SIGKILL)
    server.child.wait(SOON_S)
    assert eventually(lambda: not any(is_alive(pid) for pid in children))
