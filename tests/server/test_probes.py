"""What orchestrators and systemd are told: started, ready, alive, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.loopback import RunningServer, Serving
from tests.support.timing import SOON_S
from tokenmill.config.server import ServerConfig
from tokenmill.engine.status import Health
from tokenmill.server.gate import EngineGate
from tokenmill.server.service_notify import ServiceNotifier


def probed(server: RunningServer) -> tuple[int, int, int]:
    started, ready, live = (server.get(path).status_code for path in ("/startupz", "/readyz", "/livez"))
    return started, ready, live


def test_probes_over_the_life_of_a_server(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = EngineGate()
    server = serving(ServerConfig(api_key=("sesame",)), gate=gate)
    assert probed(server) == (503, 503, 200), "loading, and no key is asked for"
    gate.open(FakeEngine())
    assert probed(server) == (200, 200, 200)
    monkeypatch.setattr(FakeEngine, "health", lambda _: Health("dead", "it is being started again"))
    assert probed(server) == (200, 503, 200), "a restart helps without a new server"
    monkeypatch.setattr(FakeEngine, "health", lambda _: Health("dead", "it died six times", is_given_up=True))
    assert probed(server) == (200, 503, 503)
    assert "died too often" in server.get("/livez").json()["detail"]


def test_one_engine_that_was_given_up_does_not_end_the_others(serving: Serving) -> None:
    first, second = FakeEngine(), FakeEngine()
    first.health = lambda: Health("dead", is_given_up=True)  # type: ignore[method-assign]
    gates = [EngineGate(first, name="first"), EngineGate(second, name="second")]
    assert probed(serving(gate=gates))[2] == 200


@contextlib.contextmanager
def manager_socket() -> Iterator[tuple[str, socket.socket]]:
    with tempfile.TemporaryDirectory(prefix="notify-") as folder:  # a socket's path is short
        path = str(Path(folder) / "notify")
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
            manager.bind(path)
            manager.settimeout(SOON_S)
            yield path, manager


def test_systemd_is_told_of_start_life_and_end() -> None:
    is_live = [True]
    with manager_socket() as (path, manager):

        async def live() -> None:
            environment = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000"}
            notifier = ServiceNotifier(environment, lambda: is_live[0])
            await notifier.start()
            assert await asyncio.to_thread(manager.recv, 100) == b"READY=1\nSTATUS=answering requests"
            assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
            is_live[0] = False
            while await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1":
                pass  # those that were on their way
            assert (await asyncio.to_thread(manager.recv, 100)).startswith(b"STATUS=the engine died too often")
            await notifier.close()
            while (told := await asyncio.to_thread(manager.recv, 100)) != b"STOPPING=1":
                assert told != b"WATCHDOG=1", "a server whose engine was given up gives no sign of life"

        asyncio.run(live())


def test_without_systemd_nothing_is_told() -> None:
    async def live() -> None:
        for environment in ({}, {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "many"}):
            notifier = ServiceNotifier(environment, lambda: True)
            await notifier.start()
            await notifier.close()

    asyncio.run(live())
