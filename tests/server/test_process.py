"""The life of a server process, with a scripted engine: loading, serving, draining, ending."""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import server_process
from tests.support.fake_engine import STORY
from tests.support.metric_values import metric_values
from tests.support.server_process import ServerProcess, free_port, running
from tests.support.timing import SOON_S, eventually
from tokenmill.cli.serve import planned_memory
from tokenmill.config import EngineConfig
from tokenmill.config.served_models import ServedModelConfig
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig
from tokenmill.server.keys import KeyRecord, new_key, write_keys
from tokenmill.server.listen import bind_all

ONE_MODEL = [ServedModelConfig(EngineConfig())]
CHAT = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]}


@contextmanager
def fake_server(*words: str) -> Iterator[ServerProcess]:
    port = free_port()
    with running(["-m", server_process.__name__, str(port), *words], port) as process:
        yield process


def ask(process: ServerProcess, stream: bool = False) -> httpx.Response:
    return process.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})


def wait_until_running(process: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + SOON_S
    while metric_values(process.http.get("/metrics").text)["tokenmill_requests_running"] != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_loading_then_ready_then_sigterm_under_load() -> None:
    with fake_server("unready", "held") as process, ThreadPoolExecutor(6) as pool:
        process.wait_for("loading")
        assert ask(process).json()["error"]["code"] == "loading"
        process.make_ready()
        process.wait_for("ready")
        replies: list[Future[httpx.Response]] = [pool.submit(ask, process) for _ in range(5)]
        wait_until_running(process, 5)
        process.terminate()
        process.wait_for("draining")
        refused = ask(process)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert [reply.result().json()["choices"][0]["message"]["content"] for reply in replies] == [STORY] * 5
        assert process.wait() == 0
        output = process.output()
        assert "curl http://127.0.0.1" in output and "Traceback" not in output


def test_draining_is_bounded() -> None:
    with fake_server("slow", "impatient") as process, ThreadPoolExecutor(1) as pool:
        process.wait_for("ready")
        reply = pool.submit(ask, process)
        wait_until_running(process, 1)
        process.terminate()
        assert process.wait() == 0
        assert (reply.result().status_code, reply.result().json()["error"]["code"]) == (503, "engine_dead")


def test_second_sigterm_ends_at_once() -> None:
    with fake_server("slow") as process, ThreadPoolExecutor(1) as pool:
        process.wait_for("ready")
        reply = pool.submit(ask, process)
        wait_until_running(process, 1)
        process.terminate()
        process.wait_for("draining")
        process.terminate()
        assert process.wait() == 1
        assert isinstance(reply.exception(), httpx.TransportError)


def test_clients_that_do_not_read_are_hung_up_on() -> None:
    with fake_server("talkative", "impatient") as process, ExitStack() as clients:
        process.wait_for("ready")
        for _ in range(3):
            reply = process.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, "n": 64})
            clients.enter_context(reply)  # its head is read, the other 15 MB are not
        process.terminate()
        assert process.wait() == 0
        output = process.output()
        assert (
            "disconnecting 3 clients that did not read" in output and output.count(" path=/v1/chat/completions ") == 3
        )
        assert "Traceback" not in output and " error " not in output


def test_sigterm_while_loading() -> None:
    with fake_server("unready") as process:
        process.wait_for("loading")
        process.terminate()
        assert process.wait() == 0


def test_a_model_that_cannot_be_loaded_is_one_line() -> None:
    with fake_server("damaged") as process:
        assert process.wait() == 1
        lines = process.output().split("\n")
        assert [line for line in lines if line] == ["tokenmill: model.gguf is truncated (pull it again)"]


def test_a_busy_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenmill.server.run import run_server

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run_server(ONE_MODEL, ServerConfig(port=(taken.getsockname()[1],)), planned_memory) == 1
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and "cannot listen" in shown[0] and "--port" in shown[0]


def test_one_process_answers_on_several_ports() -> None:
    first, second = free_port(), free_port()
    with running(["-m", server_process.__name__, str(first), str(second)], first) as process:
        process.wait_for("ready")
        replies = [httpx.get(f"http://127.0.0.1:{port}/v1/models") for port in (first, second)]
        assert [reply.json()["data"][0]["id"] for reply in replies] == ["fake/tiny"] * 2
        assert f":{first} and http://127.0.0.1:{second}" in process.output()
        process.terminate()
        assert process.wait() == 0


def test_a_busy_second_port_leaves_none_open() -> None:
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(2):
            with pytest.raises(InvalidConfig, match="cannot listen"):
                bind_all(ServerConfig(port=(free, taken.getsockname()[1])))


def test_replies_do_not_wait_for_the_clients_kernel_on_any_event_loop() -> None:
    (listener,) = bind_all(ServerConfig(port=(0,)))
    with listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("ports", [(), (8000, 8000), (70_000,), (0, -1)])
def test_ports_that_cannot_be(ports: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="port"):
        ServerConfig(port=ports)


def test_a_server_takes_more_connections_than_a_shell_s_limit() -> None:
    from tokenmill.server.run import MAX_DESCRIPTORS, allow_many_connections

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > 256
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_many_connections()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised[0] == (MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))
    assert raised[1] == hard


def test_an_open_address_without_key_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.server.run import run_server

    monkeypatch.delenv("TOKENMILL_API_KEY", raising=False)
    assert run_server(ONE_MODEL, ServerConfig(host="0.0.0.0", port=(0,)), planned_memory) == 2
    assert "--allow-open" in capsys.readouterr().err


def test_keys_are_read_again_on_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, records = new_key([], KeyRecord(id="alice", sha256=""))
    write_keys(path, records)
    with fake_server(f"keys:{path}") as process:
        process.wait_for("ready")
        headers = {"authorization": f"Bearer {key}"}
        assert process.http.get("/v1/models", headers=headers).status_code == 200
        write_keys(path, [])
        process.child.send_signal(signal.SIGHUP)
        assert eventually(lambda: process.http.get("/v1/models", headers=headers).status_code == 401, 1.5 + SOON_S)
        path.write_text("nonsense")
        process.child.send_signal(signal.SIGHUP)
        assert eventually(lambda: "previous keys stay in use" in process.output())
        assert process.http.get("/v1/models", headers=headers).status_code == 401


def test_reading_what_a_process_prints_loses_none_of_it() -> None:
    script = "for number in range(20_000): print(number, flush=True)"
    with running(["-c", script], free_port()) as process:
        while process.child.poll() is None:
            process.output()
        assert process.output().split() == [str(number) for number in range(20_000)]
