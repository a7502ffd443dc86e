"""A server with several engine processes: one is killed in the middle of its answers, and no client notices more than a
pause."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.metric_values import metric_values
from tests.support.server_process import ServerProcess, free_port, is_alive, running
from tests.support.timing import SOON_S

SAID = " ".join(str(number) for number in range(120))
SCRIPT = [{"match": "slow", "say": SAID, "token_delay_s": 0.01}, {"say": "Hello."}]
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = tmp_path_factory.mktemp("replicas") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    port = free_port()
    command = ["-m", "tokenmill", "serve", f"scripted:{script}", "--replicas", "2", "--port", str(port), "--no-state"]
    with running(command, port) as server:
        server.wait_for("ready")
        yield server


def replicas(process: ServerProcess) -> list[dict[str, Any]]:
    return list(process.http.get("/replicas").json()["data"])


def until(holds: Any) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def streamed(process: ServerProcess, number: int) -> str:
    body = {"model": "script", "prompt": f"{number}: count, slow", "max_tokens": 2000, "stream": True}
    text = ""
    with process.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        assert reply.headers["x-tokenmill-replica"].split()[0] in ("0", "1")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
    return text


def test_streams_of_a_killed_engine_go_on_in_the_other(process: ServerProcess) -> None:
    assert [one["state"] for one in replicas(process)] == ["ready", "ready"]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = [pool.submit(streamed, process, number) for number in range(NUM_STREAMS)]
        until(lambda: sum(one["requests"] for one in replicas(process)) == NUM_STREAMS)
        before = replicas(process)
        assert all(one["requests"] for one in before), "the load is on both"
        os.kill(before[0]["engine_pid"], signal.SIGKILL)
        assert {one.result(timeout=60) for one in texts} == {SAID}
    until(lambda: all(one["state"] == "ready" for one in replicas(process)))
    after = replicas(process)
    assert after[0]["restarts"] == 1 and after[1]["restarts"] == 0
    assert after[1]["engine_pid"] == before[1]["engine_pid"]
    values = metric_values(process.http.get("/metrics").text)
    assert values["tokenmill_resumed_requests_total"] >= 1
    assert values["tokenmill_engine_restarts_total"] == 1
    assert "replica 0: the engine process ended with signal SIGKILL; restarting it" in process.output()


def test_streams_of_a_stopped_engine_go_on_in_the_other(process: ServerProcess) -> None:
    """Long before it is given up; and it works again when it comes back."""
    until(lambda: all(one["state"] == "ready" for one in replicas(process)))
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = [pool.submit(streamed, process, number) for number in range(NUM_STREAMS)]
        until(lambda: sum(one["requests"] for one in replicas(process)) == NUM_STREAMS)
        busiest = max(replicas(process), key=lambda one: int(one["requests"]))
        number = busiest["replica"]
        os.kill(busiest["engine_pid"], signal.SIGSTOP)
        try:
            assert {one.result(timeout=60) for one in texts} == {SAID}
            assert replicas(process)[number]["state"] == "stalled" and not replicas(process)[number]["requests"]
        finally:
            os.kill(busiest["engine_pid"], signal.SIGCONT)
    until(lambda: replicas(process)[number]["state"] == "ready")
    assert replicas(process)[number]["engine_pid"] == busiest["engine_pid"]
    assert streamed(process, 0) == SAID


def test_all_engines_are_started_anew_while_streams_go_on(process: ServerProcess) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = [pool.submit(streamed, process, number) for number in range(NUM_STREAMS)]
        until(lambda: sum(one["requests"] for one in replicas(process)) == NUM_STREAMS)
        before = [one["engine_pid"] for one in replicas(process)]
        restarted = process.http.post("/replicas/restart", json={})
        assert restarted.json() == {"success": True, "restarted": [0, 1]}
        assert {one.result(timeout=60) for one in texts} == {SAID}
    assert not {one["engine_pid"] for one in replicas(process)} & set(before)
    wrong = process.http.post("/replicas/drain", json={"replica": 7})
    assert wrong.status_code == 400 and "counted from 0" in wrong.text


def test_a_server_of_several_engines_ends_them_all(process: ServerProcess) -> None:
    pids = [one["engine_pid"] for one in replicas(process)]
    process.terminate()
    assert process.wait() == 0
    assert not any(is_alive(pid) for pid in pids)
