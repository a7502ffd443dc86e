"""The life of a server process, from the socket to the exit code.

    bind ─► answer 503 "loading" ─► engine ready ─► SIGTERM ─► drain: refuse new, finish running ─► exit 0
                     └── failed: one line, exit 1                └── a second SIGTERM ends at once

The socket is bound before anything is loaded, so a busy port is known at once and health checks always have an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from errno import EADDRNOTAVAIL

import uvicorn
import uvloop
from starlette.applications import Starlette

from tokenmill.config import EngineConfig
from tokenmill.config.server import ServerConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.startup.garbage_collection import relaxed_gc
from tokenmill.errors import InvalidConfig, TokenmillError
from tokenmill.observe.log import configure_logging, get_log
from tokenmill.observe.metrics import Metrics
from tokenmill.server.app import create_app
from tokenmill.server.auth import load_keys, require_safe_exposure
from tokenmill.server.gate import EngineGate, ServedEngine
from tokenmill.server.http_protocol import limited_protocol
from tokenmill.server.routing import RouteContext

log = get_log("server")
FLUSH_S = 5  # for replies that are computed but not yet read by their clients
HUNG_UP_S = 2  # for connections that are cut off to notice it
FORCED_CLOSE_S = 1.0
KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections, so that they close first
EXIT_FORCED = 1
SWITCH_INTERVAL_S = 0.0005  # the event loop waits so long for the GIL while a thread renders a long chat template
MAX_DESCRIPTORS = 65_536

StartEngine = Callable[[], Awaitable[ServedEngine]]
MakePlan = Callable[[], list[str]]  # what the settings will take, in lines
PLAN_WARNING = "plan: warning: "  # begins those that are warnings


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    child: CoreProcess | None = None,
    plan: MakePlan | None = None,
) -> int:
    """Serve a model until told to stop; return the process's exit code. `child`: the core's process, if it was started
    already. `plan`: says, in lines for the log, what the settings will take."""
    configure_logging(server_config.log_level)
    unused = [child] if child else []

    async def start_engine() -> ServedEngine:
        planning = asyncio.gather(asyncio.to_thread(plan or list), return_exceptions=True)  # while the model loads
        engine = await AsyncEngine.start(engine_config, child=unused.pop() if unused else None)
        log_plan(*await planning)
        for reason in engine.reasons:
            log.info("chosen: %s", reason)
        log.info("weights loaded in %.2f s", engine.core.load_s)
        return engine

    model = engine_config.model.served_name or engine_config.model.model
    try:
        return serve(start_engine, server_config, Metrics(model=model))
    except TokenmillError as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        for one in unused:  # the port was busy, or a setting wrong
            one.kill()


def log_plan(lines: list[str] | BaseException) -> None:
    """Log the plan; one that could not be made is only a warning."""
    if isinstance(lines, BaseException):
        log.warning("plan: none could be made: %s", lines)
        return
    for line in lines:
        if line.startswith(PLAN_WARNING):
            log.warning("plan: %s", line.removeprefix(PLAN_WARNING))  # the log names the level itself
        else:
            log.info("%s", line)


def require_servable(config: ServerConfig) -> None:
    """Check keys and address, before a model is fetched, which may take long."""
    require_safe_exposure(config, load_keys(config, os.environ))
    for listener in bind_all(config):
        listener.close()


def serve(start_engine: StartEngine, config: ServerConfig, metrics: Metrics) -> int:
    """Answer on the configured address while the engine starts, and from then on until a signal; return the exit
    code."""
    keys = load_keys(config, os.environ)
    require_safe_exposure(config, keys)
    listeners = bind_all(config)
    gate = EngineGate()
    app = create_app(gate, config, metrics, keys=keys)
    http_server = HttpServer(uvicorn_config(app, FLUSH_S))
    allow_many_connections()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        life = ServerLifecycle(http_server, listeners, gate, app.state.context, needs_key=bool(keys))
        return runner.run(life.run(start_engine))


def allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows. Each client takes a descriptor, and shells give a
    process 1,024; later clients would be cut off instead of told to try again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that counts in another way
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def uvicorn_config(app: Starlette, flush_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(app.state.dialects),
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=flush_s + HUNG_UP_S,
    )


def bind_all(config: ServerConfig) -> list[socket.socket]:
    """Open a listening socket for each port; none stays open if one can't be."""
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(bind(config.host, port)) for port in config.port]
        undo.pop_all()
        return listeners


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket; a busy port or an unknown address is one clear error."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (socket.gaierror, UnicodeError):
        raise InvalidConfig(
            f"cannot listen on {host!r}: no such address", param="host", hint="--host 127.0.0.1 is this machine"
        ) from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        hint = "--host must be an address of this machine" if error.errno == EADDRNOTAVAIL else "choose another --port"
        problem = InvalidConfig(f"cannot listen on {host}:{port}: {why}", hint=hint)
        problem.exit_code = 1  # the setting is fine; the machine is not
        raise problem from None


class HttpServer(uvicorn.Server):
    """uvicorn, except that signals are left to `ServerLifecycle`, and that clients that do not read are cut off at the
    end: uvicorn would cancel their tasks, with a traceback for each of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        flush_s = (self.config.timeout_graceful_shutdown or 0) - HUNG_UP_S
        hanging_up = asyncio.get_running_loop().call_later(flush_s, self._hang_up)
        await super().shutdown(sockets)
        hanging_up.cancel()

    def _hang_up(self) -> None:
        late = list(self.server_state.connections)
        if late:
            log.warning("%d clients did not take their answers within %d s and are hung up on", len(late), FLUSH_S)
        for connection in late:
            connection.transport.abort()


class ServerLifecycle:
    """Loads the engine behind an open port, opens the gate, and drains on a signal."""

    def __init__(
        self,
        http_server: HttpServer,
        listeners: list[socket.socket],
        gate: EngineGate,
        context: RouteContext,
        *,
        needs_key: bool,
    ) -> None:
        self._http_server = http_server
        self._listeners = listeners
        self._gate = gate
        self._context = context
        self._needs_key = needs_key
        self._stop = asyncio.Event()
        self._engine: ServedEngine | None = None

    async def run(self, start_engine: StartEngine) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        answering = asyncio.create_task(self._http_server.serve(sockets=self._listeners))
        try:
            if await self._load(start_engine):
                for service in self._context.services:
                    await service.start()
                print(welcome(self._listeners, self._gate.info.name, needs_key=self._needs_key), flush=True)
                gc.freeze()  # imported modules stay: streams need not wait for collections that look through them
                with relaxed_gc():
                    await self._stop.wait()
                    await self._drain()
        finally:
            await self._end(answering)
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            asyncio.get_running_loop().create_task(self._end_at_once())
        self._stop.set()
        self._gate.close()

    async def _load(self, start_engine: StartEngine) -> bool:
        """Load the model and open the gate; False when told to stop before that was done."""
        loading = asyncio.ensure_future(start_engine())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            return False
        self._engine = loading.result()
        self._gate.open(self._engine)
        return not self._stop.is_set()

    async def _drain(self) -> None:
        assert self._engine is not None
        print("tokenmill: stopping; running requests are being finished", file=sys.stderr, flush=True)
        if not await self._engine.drain(self._context.config.drain_timeout_s):
            print("tokenmill: some requests did not finish in time and are ended", file=sys.stderr, flush=True)

    async def _end(self, answering: asyncio.Task[None]) -> None:
        """Close the engine, then the server: requests that still run end with an error that their clients can read."""
        for service in self._context.services:
            await service.close()
        if self._engine is not None:
            await self._engine.close()
        self._http_server.should_exit = True
        await answering
        await self._context.state.close()

    async def _end_at_once(self) -> None:
        engine = self._engine
        if engine is not None:
            pid = engine.stats().engine_pid
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.close(), FORCED_CLOSE_S)
            kill_child(pid)
        os._exit(EXIT_FORCED)


def kill_child(pid: int) -> None:
    """Kill a child process. A process that is not our child, because the id was reused, is left alone."""
    if pid in (0, os.getpid()):
        return
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def welcome(listeners: list[socket.socket], model: str, *, needs_key: bool) -> str:
    url, *others = [_url(listener) for listener in listeners]
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": "{model}", "temperature": 0, "messages": {question}}}'  # at 1 small models talk nonsense
    also = "".join(f" and {other}" for other in others)
    return (
        f"{model} is ready on {url}{also} (documentation: {url}/docs). Try:\n\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
