"""A complete server over a scripted model, in this process: real engine, scheduler, sampler, grammars, tokenizer and
HTTP.

    with scripted_server([{"say": "Hello."}], template="Qwen-Qwen2.5-7B-Instruct.jinja") as server:
        server.post("/v1/chat/completions", {...})

The script is what `docs/scripted-model.md` describes. The core runs in a thread, so that a server starts in tens of
milliseconds; `tokenmill serve scripted:FILE` is the same with a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tokenmill.config.server import ServerConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import VirtualDevice, virtual_engine
from tokenmill.observe.metrics import Metrics
from tokenmill.server.app import create_app
from tokenmill.server.keys import KeyRing
from tokenmill.server.listen import bind
from tokenmill.server.run import uvicorn_config

NAME = "scripted"


def without_files(config: ServerConfig | None) -> ServerConfig:
    """The settings of a server that writes no files: its state is in memory unless a folder for it is configured."""
    config = config or ServerConfig()
    return config if config.state_dir else replace(config, state=False)


@dataclass
class ScriptedServer:
    """A running server; `engine` is the engine behind it, in the server's own event loop."""

    url: str
    engine: AsyncEngine
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, verify=False))

    def post(self, path: str, body: object = None, **extra: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **extra)

    def get(self, path: str, **extra: Any) -> httpx.Response:
        return self.http.get(self.url + path, **extra)


@contextmanager
def scripted_server(
    script: dict[str, Any] | list[Any],
    template: str | Path | None = None,
    config: ServerConfig | None = None,
    keys: KeyRing | None = None,
    **settings: Any,
) -> Iterator[ScriptedServer]:
    """Start a server. `template`: a file, or the text of a template. `settings`: those of an engine
    (`max_context=512`)."""
    with tempfile.TemporaryDirectory(prefix="scripted-") as folder:
        file = Path(folder) / f"{NAME}.json"
        file.write_text(json.dumps(script))
        if template is not None:
            settings["chat_template"] = str(_template_file(template, Path(folder)))

        async def start() -> AsyncEngine:
            return await AsyncEngine.start(f"scripted:{file}", in_process=True, **settings)

        with _running(start, without_files(config), keys) as server:
            yield server


@contextmanager
def virtual_server(num_replicas: int) -> Iterator[ScriptedServer]:
    """Start a server with several cores over a virtual device, without a model."""

    async def start() -> AsyncEngine:
        engine = virtual_engine(VirtualDevice(), num_replicas, PrefixRouter(num_replicas))
        await engine.open()
        return engine

    with _running(start, without_files(None), None) as server:
        yield server


def _template_file(template: str | Path, folder: Path) -> Path:
    if isinstance(template, Path):
        return template
    file = folder / "template.jinja"
    file.write_text(template)
    return file


@contextmanager
def _running(
    start: Callable[[], Awaitable[AsyncEngine]], config: ServerConfig, keys: KeyRing | None
) -> Iterator[ScriptedServer]:
    listener = bind("127.0.0.1", 0)
    started = threading.Event()
    made: list[tuple[AsyncEngine, uvicorn.Server]] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        engine = await start()
        try:
            app = create_app(engine, config, Metrics(model=NAME), keys=keys)
            front = uvicorn.Server(uvicorn_config(app, flush_s=1))
            made.append((engine, front))
            for service in app.state.context.services:
                await service.start()
            asyncio.get_running_loop().call_soon(started.set)
            await front.serve(sockets=[listener])
            for service in app.state.context.services:
                await service.close()
            await app.state.context.state.close()
        finally:
            await engine.close()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    started.wait(60)
    if failures:
        listener.close()
        raise failures[0]
    engine, front = made[0]
    server = ScriptedServer(f"http://127.0.0.1:{listener.getsockname()[1]}", engine)
    try:
        yield server
    finally:
        server.http.close()
        front.should_exit = True
        thread.join(20)
        listener.close()
