"""The ASGI application: its middleware layers from the outside in, and its routes.

request id, record, log line ─► CORS (if configured) ─► API key (if any) ─► routes ─► errors in the path's dialect
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tokenmill.config.server import ServerConfig
from tokenmill.engine.status import EngineStats
from tokenmill.engine.text_workers import TextWorkers
from tokenmill.errors import TokenmillError
from tokenmill.observe.metrics import Metrics
from tokenmill.server.accounting import Accounting, RequestRecord
from tokenmill.server.adapter_admin import adapter_endpoints
from tokenmill.server.admin import admin_endpoints, usage_endpoints
from tokenmill.server.anthropic.batches import message_batch_endpoints
from tokenmill.server.anthropic.render import ANTHROPIC
from tokenmill.server.anthropic.routes import anthropic_endpoints
from tokenmill.server.audit_trail import AuditTrail, audit_file
from tokenmill.server.auth import PUBLIC_PATHS, RequireKey, RequireLocalHost, is_loopback
from tokenmill.server.batches.runner import BatchRunner
from tokenmill.server.body import BodyReader
from tokenmill.server.dialect import Dialects, head_of
from tokenmill.server.errors import RoutingError
from tokenmill.server.gate import EngineGate, ServedEngine
from tokenmill.server.keys import KeyRing
from tokenmill.server.ledger import Ledger
from tokenmill.server.live import LiveRequests
from tokenmill.server.llamacpp.render import LLAMACPP
from tokenmill.server.llamacpp.routes import llamacpp_endpoints
from tokenmill.server.loader import ModelLoader
from tokenmill.server.loop_lag import LoopLag
from tokenmill.server.middleware import RequestMiddleware
from tokenmill.server.model_admin import model_endpoints
from tokenmill.server.ollama.render import OLLAMA
from tokenmill.server.ollama.routes import ollama_endpoints
from tokenmill.server.openai.batches import batch_endpoints
from tokenmill.server.openai.files import file_endpoints
from tokenmill.server.openai.render import OPENAI
from tokenmill.server.openai.responses.routes import response_endpoints
from tokenmill.server.openai.routes import openai_endpoints
from tokenmill.server.registry import ModelRegistry
from tokenmill.server.replica_admin import replica_endpoints
from tokenmill.server.request_log import RequestLog
from tokenmill.server.response_cache import ResponseCache
from tokenmill.server.routing import Endpoint, MakeJob, RouteContext, routes_of
from tokenmill.server.state.files import StoredFiles
from tokenmill.server.state.server_state import ServerState
from tokenmill.server.tgi.render import TGI
from tokenmill.server.tgi.routes import tgi_endpoints
from tokenmill.server.tokens import token_endpoints
from tokenmill.server.tracing import RequestTracing, tracing_of
from tokenmill.server.ui.feed import feed_endpoints
from tokenmill.server.ui.model_lists import MakeFinder, model_list_endpoints
from tokenmill.server.ui.pages import PAGE_PATHS, page_endpoints, page_routes

EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "traceparent", "x-cache", "retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset") for what in ("requests", "tokens")),
)

DIALECTS = Dialects(ANTHROPIC, LLAMACPP, OLLAMA, TGI, OPENAI)
ENDPOINTS: tuple[Callable[[RouteContext], list[Endpoint]], ...] = (
    openai_endpoints,  # first: Starlette tries routes in order, and these are requested most
    response_endpoints,
    anthropic_endpoints,
    llamacpp_endpoints,
    ollama_endpoints,
    tgi_endpoints,
    token_endpoints,
    model_endpoints,
    replica_endpoints,
    adapter_endpoints,
)


def create_app(
    models: ServedEngine | EngineGate | Sequence[EngineGate],
    config: ServerConfig,
    metrics: Metrics,
    *,
    keys: KeyRing | None = None,
    dialects: Dialects = DIALECTS,
    fits: MakeFinder | None = None,
    loader: ModelLoader | None = None,
) -> Starlette:
    """Create the application for one engine, or for models behind gates, which open once their models are loaded.

    `keys`: the API keys; by default those in `config`. `fits`: makes the function that decides which models fit this
    machine. `loader`: loads and unloads the models."""
    known_keys = KeyRing([key.encode() for key in config.api_key]) if keys is None else keys
    config = with_priorities(config, has_keys=bool(known_keys))
    loader = loader or ModelLoader()
    registry = ModelRegistry(*_gates(models), any_name=config.any_model_name)
    accounting = Accounting(metrics, registry)
    state = ServerState.of(config)
    ledger = Ledger(state.database)
    tracing = tracing_of(config)
    request_log = RequestLog(config)
    audit = AuditTrail(audit_file(config, known_keys, state.folder), registry, known_keys)

    def unloaded(name: str, last: EngineStats) -> None:
        accounting.unloaded(name, last)
        audit.note_unload(name)

    loader.on_load, loader.on_failure, loader.on_unload = audit.note_load, audit.note_failed_load, unloaded

    finishers = [accounting.finish]  # what is done with the record of a request that has ended
    if tracing is not None:
        finishers.append(tracing.finish)
    if config.request_log is not None:
        finishers.append(request_log.finish)
    if config.ledger if config.ledger is not None else known_keys:
        finishers.append(ledger.add)

    def count(record: RequestRecord) -> None:
        for finish in finishers:
            finish(record)

    bodies, live, workers = BodyReader(config), LiveRequests(), TextWorkers()
    context = RouteContext(
        registry,
        config,
        dialects,
        bodies,
        workers,
        live,
        accounting.gaps_of,
        None if config.request_log is None else request_log.begin,
        count,
        state,
        loader,
        known_keys,
        response_cache(config),
    )
    endpoints = [endpoint for endpoints_of in ENDPOINTS for endpoint in endpoints_of(context)]
    context.services.extend([ledger, audit, request_log, LoopLag(metrics.process.note_lag)])
    if tracing is not None:
        context.services.append(tracing)
    endpoints += [*admin_endpoints(context, accounting.render), *usage_endpoints(ledger)]
    endpoints += [*page_endpoints(), *feed_endpoints(context, accounting.values), *model_list_endpoints(context, fits)]
    jobs = {endpoint.path: endpoint.job for endpoint in endpoints if endpoint.job is not None}
    endpoints += _batch_endpoints(context, jobs)
    app = Starlette(
        routes=[*routes_of(endpoints, dialects), *page_routes()],
        middleware=_layers(config, known_keys, count, dialects, audit, tracing),
        exception_handlers={
            TokenmillError: _show_error,
            HTTPException: _show_routing_error,
            ClientDisconnect: _note_disconnect,
        },
    )
    app.router.redirect_slashes = False
    app.state.dialects = dialects
    app.state.context = context
    app.state.batch_jobs = jobs
    app.state.audit = audit
    return app


def with_priorities(config: ServerConfig, *, has_keys: bool) -> ServerConfig:
    """Return the settings with `min_priority` filled in: where untrusted clients may connect, none may raise its own
    priority above the default."""
    if config.min_priority is None and (has_keys or config.allow_open):
        return replace(config, min_priority=0)
    return config


def response_cache(config: ServerConfig) -> ResponseCache | None:
    num_bytes = int(config.response_cache_mb * 1e6)
    return ResponseCache(num_bytes, config.response_cache_s) if num_bytes else None


def _batch_endpoints(context: RouteContext, jobs: dict[str, MakeJob]) -> list[Endpoint]:
    """Return the endpoints of files and batches. `jobs`: the job makers that batch lines may use, by URL path."""
    files = StoredFiles(context.state, context.config.max_files_bytes)
    runner = BatchRunner(context, files, jobs, context.config.max_state_bytes)
    context.services.append(runner)
    return [
        *file_endpoints(context, files),
        *batch_endpoints(context, runner),
        *message_batch_endpoints(context, runner),
    ]


def _gates(models: ServedEngine | EngineGate | Sequence[EngineGate]) -> Sequence[EngineGate]:
    if isinstance(models, Sequence):
        return models
    return [models if isinstance(models, EngineGate) else EngineGate(models)]


def _layers(
    config: ServerConfig,
    keys: KeyRing,
    count: Callable[[RequestRecord], None],
    dialects: Dialects,
    audit: AuditTrail,
    tracing: RequestTracing | None,
) -> list[Middleware]:
    on_begin = None if tracing is None else tracing.begin
    layers = [Middleware(RequestMiddleware, on_begin=on_begin, on_done=count, dialects=dialects)]
    if config.cors_origin:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origin),
                allow_methods=["GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if keys:
        public = PUBLIC_PATHS | {"/metrics"} if config.public_metrics else PUBLIC_PATHS
        layers.append(
            Middleware(RequireKey, keys=keys, public_paths=public, dialects=dialects, on_refusal=audit.note_refusal)
        )
    elif is_loopback(config.host):
        layers.append(Middleware(RequireLocalHost, allowed=config.allowed_host, dialects=dialects))
    return layers


# ── errors, rendered in the dialect of the request's path ──────────────────────────────────────────────


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenmillError)
    request.state.record.error_code = error.code
    return _error_response(request, error)


async def _show_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    path = str(request.scope["path"])[:200]  # not `request.url.path`, which a Host header can change
    hint = _near_paths(request.app, path) if error.status_code == 404 else None
    problem = RoutingError(error.status_code, f"{request.method} {path}: {error.detail}", hint)
    request.state.record.error_code = problem.code
    return _error_response(request, problem, headers)


def _near_paths(app: Starlette, path: str) -> str:
    """Return a hint with paths that resemble an unknown one: first those below it, then those spelled alike."""
    paths = {str(route.path) for route in app.routes if isinstance(route, Route) and "{" not in route.path}
    known = sorted(paths - PAGE_PATHS)
    below = [one for one in known if one.startswith(path.rstrip("/") + "/")]
    similar = difflib.get_close_matches(path, known, n=3, cutoff=0.6)
    near = list(dict.fromkeys([*below, *similar]))[:3]
    return f"there is {', '.join(near)}; /docs lists all paths" if near else "/docs lists all paths"


def _error_response(request: Request, error: TokenmillError, headers: dict[str, str] | None = None) -> Response:
    dialects: Dialects = request.app.state.dialects
    return dialects.of(head_of(request.scope)).error_response(error, request.state.record.request_id, headers)


async def _note_disconnect(request: Request, error: Exception) -> Response:
    """Record that the client disconnected while it was sending its body; the response reaches no one."""
    request.state.record.note_disconnect()
    return Response(status_code=400)
