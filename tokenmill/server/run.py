"""The lifecycle of a server process, from binding the socket to the exit code.

    bind ─► answer 503 "loading" ─► engine ready ─► SIGTERM ─► drain: refuse new, finish running ─► exit 0
                     └── failed: one line, exit 1                └── a second SIGTERM exits immediately

The socket is bound before anything is loaded, so a busy port is reported immediately and health checks are always
answered.
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
from collections.abc import Iterator, Sequence
from functools import partial

import uvicorn
import uvloop
from starlette.applications import Starlette

from tokenmill.config import EngineConfig
from tokenmill.config.by_name import engine_config
from tokenmill.config.served_models import ServedModelConfig
from tokenmill.config.server import ServerConfig
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.roles import read_roles
from tokenmill.engine.startup.garbage_collection import relaxed_gc
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.errors import InvalidConfig, TokenmillError, UnknownModel
from tokenmill.observe.log import configure_logging, get_log
from tokenmill.observe.metrics import Metrics
from tokenmill.server.app import create_app
from tokenmill.server.audit_trail import AuditTrail
from tokenmill.server.auth import require_safe_exposure
from tokenmill.server.body import shown
from tokenmill.server.early_stop import EARLY_STOP
from tokenmill.server.engine_source import Announce, EngineSource, PlanMemory, StartedSource, StartEngine
from tokenmill.server.errors import LoadFailed
from tokenmill.server.gate import EngineGate
from tokenmill.server.http_protocol import limited_protocol
from tokenmill.server.keys import key_ring
from tokenmill.server.listen import bind_all, require_free_ports
from tokenmill.server.loader import ModelLoader
from tokenmill.server.registry import require_distinct
from tokenmill.server.routing import RouteContext
from tokenmill.server.service_notify import ServiceNotifier
from tokenmill.server.tls import TlsFiles, tls_files
from tokenmill.server.ui.model_lists import MakeFinder
from tokenmill.store import LocalModel, parse_name, plain_name, resolve_model

log = get_log("server")
FLUSH_S = 5  # how long clients may take to read replies that are already computed
DISCONNECT_S = 2  # how long the tasks of aborted connections may take to end
FORCED_CLOSE_S = 1.0
KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections, so that they close them and not we
EXIT_FORCED = 1
SWITCH_INTERVAL_S = 0.0005  # longest wait of the event loop for the GIL while a thread renders a long chat template
MAX_DESCRIPTORS = 65_536


def run_server(
    models: Sequence[ServedModelConfig],
    config: ServerConfig,
    plan: PlanMemory,
    *,
    child: CoreProcess | None = None,
    announce: Announce | None = None,
    base: EngineConfig | None = None,
    fits: MakeFinder | None = None,
) -> int:
    """Serve models until a signal arrives; return the process's exit code.

    `plan`: computes the memory of each model, where there are several. `child`: the first model's core, if its process
    was started already. `announce`: returns log lines with the expected memory of the first model. `base`: the settings
    of models that clients add. `fits`: makes the function that decides which models fit this machine.
    """
    configure_logging(config.log_level)
    starts_fast = (base or models[0].engine).ops.fast_start is not False
    spare = SpareCore(child, is_refilled=len(models) > 1 and starts_fast)
    try:
        loader = loader_of(config)
        gates = [gate_of_config(model) for model in models]
        for gate, model in zip(gates, models, strict=True):
            announced = announce if gate is gates[0] else None
            source = EngineSource(
                model.engine, plan, spare, announce=announced, num_replicas=config.replicas, roles=config.roles
            )
            loader.add(gate, source, waits=len(gates) > 1)
        if len(gates) > 1:
            require_distinct(gates)
        loader.make_model = partial(stored_model, base or models[0].engine, plan, spare)
        return serve_models(gates, loader, config, Metrics(names=config.metrics_names), fits)
    except TokenmillError as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        spare.discard()


def loader_of(config: ServerConfig) -> ModelLoader:
    num_bytes = None if config.model_memory_gb is None else int(config.model_memory_gb * 1e9)
    return ModelLoader(max_loaded=config.max_loaded_models, memory_bytes=num_bytes)


def gate_of_config(model: ServedModelConfig) -> EngineGate:
    return EngineGate(
        name=model.name or model.engine.model.served_name,
        aliases=model.aliases,
        is_pinned=model.is_pinned,
        keep_alive_s=model.keep_alive_s,
    )


def stored_model(base: EngineConfig, plan: PlanMemory, spare: SpareCore, name: str) -> tuple[EngineGate, EngineSource]:
    """Make the gate and the source of a model in the store that a client adds to the running server. Paths are
    refused."""
    if isinstance(parse_name(plain_name(name)), LocalModel):
        raise UnknownModel(f"the store has no model called {shown(name)}", param="model")
    found = resolve_model(plain_name(name), allow_pull=False)
    engine = engine_config(base, {"model": plain_name(name), "served_name": found.name})
    return EngineGate(name=found.name, is_added=True), EngineSource(engine, plan, spare)


def require_servable(config: ServerConfig) -> None:
    """Check keys, roles, certificate and ports before a model is downloaded, which may take long."""
    require_safe_exposure(config, key_ring(config, os.environ))
    if config.roles:
        read_roles(config.roles, config.replicas)
    if (tls := tls_files(config)) is not None:
        tls.require_usable()
    require_free_ports(config)


def serve(start_engine: StartEngine, config: ServerConfig, metrics: Metrics) -> int:
    """Serve the one engine that `start_engine` starts; return the exit code."""
    loader, gate = loader_of(config), EngineGate(is_pinned=True, aliases=config.alias)
    loader.add(gate, StartedSource(start_engine), waits=False)
    return serve_models([gate], loader, config, metrics)


def serve_models(
    gates: list[EngineGate],
    loader: ModelLoader,
    config: ServerConfig,
    metrics: Metrics,
    fits: MakeFinder | None = None,
) -> int:
    """Listen on the configured address, load the first model and serve until a signal arrives; return the exit
    code."""
    keys = key_ring(config, os.environ)
    require_safe_exposure(config, keys)
    listeners = bind_all(config)
    app = create_app(gates, config, metrics, keys=keys, loader=loader, fits=fits)
    context: RouteContext = app.state.context
    context.services.append(ServiceNotifier(os.environ, context.registry.is_live))
    http_server = HttpServer(uvicorn_config(app, FLUSH_S, tls_files(config)))
    allow_many_connections()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServerLifecycle(http_server, listeners, context, app.state.audit).run())


def allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows. Each client takes a descriptor, and the usual limit is
    1,024; clients beyond it would be disconnected instead of getting a 429."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # the system may have a lower limit that it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def uvicorn_config(app: Starlette, flush_s: int, tls: TlsFiles | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=None if tls is None else tls.cert,
        ssl_keyfile=None if tls is None else tls.key,
        http=limited_protocol(app.state.dialects),
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=flush_s + DISCONNECT_S,
    )


class HttpServer(uvicorn.Server):
    """uvicorn's server, but `ServerLifecycle` handles signals, and at shutdown the connections of clients that do not
    read their replies are aborted: uvicorn would cancel their tasks, with a traceback for each."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        flush_s = (self.config.timeout_graceful_shutdown or 0) - DISCONNECT_S
        abort_timer = asyncio.get_running_loop().call_later(flush_s, self._abort_connections)
        await super().shutdown(sockets)
        abort_timer.cancel()

    def _abort_connections(self) -> None:
        late = list(self.server_state.connections)
        if late:
            log.warning("disconnecting %d clients that did not read their replies within %d s", len(late), FLUSH_S)
        for connection in late:
            connection.transport.abort()


class ServerLifecycle:
    """Loads the first models while the ports are already open, and drains all models on a signal."""

    def __init__(
        self, http_server: HttpServer, listeners: list[socket.socket], context: RouteContext, audit: AuditTrail
    ) -> None:
        self._http_server = http_server
        self._listeners = listeners
        self._context = context
        self._keys = context.keys
        self._audit = audit
        self._stop = asyncio.Event()

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        if EARLY_STOP.is_requested:
            self._on_signal()
        answering = asyncio.create_task(self._http_server.serve(sockets=self._listeners))
        try:
            if await self._load():
                for service in self._context.services:
                    await service.start()
                names = self._context.registry.names()
                print(
                    startup_message(
                        self._listeners,
                        names,
                        needs_key=bool(self._keys),
                        is_tls=tls_files(self._context.config) is not None,
                    ),
                    flush=True,
                )
                gc.freeze()  # collections skip the imported modules, so streams are not held up by them
                with relaxed_gc():
                    await self._stop.wait()
                    await self._drain()
        finally:
            await self._end(answering)
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            asyncio.get_running_loop().create_task(self._force_exit())
        self._stop.set()
        self._context.loader.refuse_all()

    def _reload(self) -> None:
        """Read the keys and the certificate again while requests run. Reading many keys is slow, so a thread does
        it."""
        self._reload_certificate()

        def reload() -> None:
            try:
                self._keys.reload()
            except InvalidConfig as problem:
                log.error("%s; the previous keys stay in use", problem)
            else:
                log.info("read %d API keys", len(self._keys))
                loop.call_soon_threadsafe(self._audit.note_keys)

        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, reload)

    def _reload_certificate(self) -> None:
        tls, context = tls_files(self._context.config), self._http_server.config.ssl
        if tls is None or context is None:
            return
        try:
            tls.require_usable()
        except InvalidConfig as problem:
            log.error("%s; the previous certificate stays in use", problem)
        else:
            context.load_cert_chain(tls.cert, tls.key)  # used by new connections
            log.info("read the certificate again")

    async def _load(self) -> bool:
        """Load the first models; return False if a stop signal arrived first."""
        loading = asyncio.create_task(self._load_first())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            return False
        loading.result()
        return not self._stop.is_set()

    async def _load_first(self) -> None:
        """Load the default model and the pinned ones, and read the files of the others. The server fails to start only
        if no model can be loaded or read."""
        registry, loader = self._context.registry, self._context.loader
        preloaded = [gate for gate in registry.gates if gate.is_pinned or gate is registry.default]
        loads = [loader.load(gate) for gate in preloaded]
        reads = [loader.read(gate) for gate in registry.gates if gate not in preloaded]
        for problem in await asyncio.gather(*loads, *reads, return_exceptions=True):
            if problem is not None and not isinstance(problem, LoadFailed):
                raise problem
        failures = [gate.failure for gate in registry.gates if gate.failure is not None]
        if len(failures) == len(registry.gates):
            raise failures[0]

    async def _drain(self) -> None:
        print("tokenmill: stopping; waiting for running requests", file=sys.stderr, flush=True)
        if not await self._context.loader.drain(self._context.config.drain_timeout_s):
            print("tokenmill: aborting the requests that did not finish in time", file=sys.stderr, flush=True)

    async def _end(self, answering: asyncio.Task[None]) -> None:
        """Close the engines, then the HTTP server, so that requests that still run end with an error that their
        clients can read."""
        for service in self._context.services:
            await service.close()
        await self._context.loader.close()
        self._http_server.should_exit = True
        await answering
        await self._context.state.close()

    async def _force_exit(self) -> None:
        engines = [gate.loaded for gate in self._context.registry.gates if gate.loaded is not None]
        pids = [core["engine_pid"] for engine in engines for core in engine.replicas()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._context.loader.close(), FORCED_CLOSE_S)
        for pid in pids:
            kill_child(pid)
        os._exit(EXIT_FORCED)


def kill_child(pid: int) -> None:
    """Kill a child process. If the id was reused by a process that is not our child, do nothing."""
    if pid in (0, os.getpid()):
        return
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def startup_message(listeners: list[socket.socket], models: list[str], *, needs_key: bool, is_tls: bool = False) -> str:
    url, *others = [_url(listener, "https" if is_tls else "http") for listener in listeners]
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": "{models[0]}", "temperature": 0, "messages": {question}}}'  # small models ramble at 1
    ready = f"{models[0]} is ready" if len(models) == 1 else f"{', '.join(models)} are ready"
    also = "".join(f" and {other}" for other in others)
    return (
        f"{ready} on {url}{also} (documentation: {url}/docs). Try:\n\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
    )


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
