"""A real uvicorn on a free loopback port, in a thread, in front of a scripted engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
import uvicorn

from tests.support.browser import open_chromium
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import RunningServer, Serving
from tests.support.page_script import SCRIPT, TEMPLATE
from tests.support.scripted_server import ScriptedServer, scripted_server, without_files
from tokenmill.config.server import ServerConfig
from tokenmill.observe.metrics import Metrics
from tokenmill.server import signatures
from tokenmill.server.app import DIALECTS, create_app
from tokenmill.server.dialect import Dialects
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRing
from tokenmill.server.listen import bind
from tokenmill.server.loader import ModelLoader
from tokenmill.server.run import uvicorn_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for what servers keep between starts, instead of the user's."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "store_root", lambda: home)
        yield home


@pytest.fixture(scope="session")
def serving(own_home: Path) -> Iterator[Serving]:
    """Starts servers; all of them are stopped at the end."""
    fronts: list[tuple[uvicorn.Server, threading.Thread, RunningServer]] = []

    def start(
        config: ServerConfig | None = None,
        gate: EngineGate | list[EngineGate] | None = None,
        dialects: Dialects = DIALECTS,
        loader: ModelLoader | None = None,
        keys: KeyRing | None = None,
    ) -> RunningServer:
        engine = FakeEngine()
        metrics = Metrics(model=engine.info.name)
        app = create_app(gate or engine, without_files(config), metrics, dialects=dialects, loader=loader, keys=keys)
        listener = bind("127.0.0.1", 0)
        front = uvicorn.Server(uvicorn_config(app, flush_s=1))
        thread = threading.Thread(target=front.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not front.started:
            time.sleep(0.005)
        running = RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", app, engine)
        fronts.append((front, thread, running))
        return running

    yield start
    for front, _, running in fronts:
        running.http.close()
        front.should_exit = True
    for _, thread, _ in fronts:
        thread.join(5)


@pytest.fixture(scope="session")
def shared_server(serving: Serving) -> RunningServer:
    return serving(ServerConfig(keep_alive_s=0.3))


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """The shared server with an engine as if new."""
    shared_server.engine.__init__()  # type: ignore[misc]
    return shared_server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


# ── the page ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for the tests of one file: while it is open, nothing else in this process may run an event loop."""
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model store of the tests' own: what the machine has is not their concern."""
    home = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def page_server(empty_store: Path) -> Iterator[ScriptedServer]:
    with scripted_server(SCRIPT, template=TEMPLATE) as server:
        yield server
