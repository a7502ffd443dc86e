"""The application: layers from the outside in, and the routes.

reception (id, record, log line) ─► CORS, if asked for ─► key, if there are any ─► routes ─► error bodies
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import tokenmill
from tokenmill.config.server import ServerConfig
from tokenmill.errors import TokenmillError
from tokenmill.observe.metrics import Metrics
from tokenmill.server.accounting import Accounting
from tokenmill.server.admin import admin_router
from tokenmill.server.auth import PUBLIC_PATHS, RequireKey
from tokenmill.server.bodies import BodyReader
from tokenmill.server.errors import RefusedByRouting
from tokenmill.server.gate import EngineGate, ServedEngine
from tokenmill.server.middleware import RequestMiddleware
from tokenmill.server.openai.errors import error_response
from tokenmill.server.openai.routes import openai_router
from tokenmill.server.route_context import RouteContext
from tokenmill.server.tokens import tokens_router


def create_app(
    engine: ServedEngine | EngineGate, config: ServerConfig, metrics: Metrics, *, keys: tuple[bytes, ...] | None = None
) -> FastAPI:
    """`engine` may be a `Door` that opens later, once the model is loaded. `keys`: by default those in `config`."""
    door = engine if isinstance(engine, EngineGate) else EngineGate(engine)
    accounting = Accounting(metrics, door)
    desk = RouteContext(door, config, BodyReader(config))
    known_keys = tuple(key.encode() for key in config.api_key) if keys is None else keys
    app = FastAPI(
        title="Tokenmill",
        version=tokenmill.__version__,
        description="OpenAI-compatible inference.",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        middleware=_layers(config, known_keys, accounting),
    )
    app.include_router(openai_router(desk))
    app.include_router(tokens_router(desk))
    app.include_router(admin_router(desk, accounting.render))
    _show_errors(app)
    return app


def _layers(config: ServerConfig, keys: tuple[bytes, ...], accounting: Accounting) -> list[Middleware]:
    layers = [Middleware(RequestMiddleware, on_done=accounting.finish)]
    if config.cors_origin:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origin),
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if keys:
        public = PUBLIC_PATHS | {"/metrics"} if config.public_metrics else PUBLIC_PATHS
        layers.append(Middleware(RequireKey, keys=keys, public_paths=public))
    return layers


# ── every error has OpenAI's body ──────────────────────────────────────────────────────────────────────


def _show_errors(app: FastAPI) -> None:
    app.add_exception_handler(TokenmillError, _show_ours)
    app.add_exception_handler(HTTPException, _show_routing)
    app.add_exception_handler(RequestValidationError, _show_routing)
    app.add_exception_handler(ClientDisconnect, _show_departure)


async def _show_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenmillError)
    request.state.record.note_failure(error)
    return error_response(error)


async def _show_routing(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(RefusedByRouting(400, "the request cannot be read"))
    headers = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(RefusedByRouting(error.status_code, message), headers)


async def _show_departure(request: Request, error: Exception) -> Response:
    """The client left while it was sending; nobody reads this."""
    request.state.record.note_departure()
    return Response(status_code=400)
