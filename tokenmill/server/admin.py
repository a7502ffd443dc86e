"""What operators ask: is it up, is it ready, which version, how busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

import tokenmill
from tokenmill.engine.status import Health
from tokenmill.server.openai import response_schemas
from tokenmill.server.openai.errors import error_type
from tokenmill.server.route_context import RouteContext, json_response

RETRY_AFTER_S = 2


def admin_router(desk: RouteContext, render_metrics: Callable[[], tuple[bytes, str]]) -> APIRouter:
    router = APIRouter(tags=["Operation"])

    @router.get(
        "/health",
        response_model=None,
        responses=response_schemas.HEALTH,
        description="Ready: 200. Loading, draining or dead: 503.",
    )
    async def health(request: Request) -> Response:
        return health_response(desk.door.health())

    @router.get(
        "/ping", response_model=None, responses=response_schemas.PING, description="The front process is alive."
    )
    async def ping(request: Request) -> Response:
        return json_response({"status": "ok"})

    @router.get("/version", response_model=None, responses=response_schemas.VERSION)
    async def show_version(request: Request) -> Response:
        return json_response({"version": tokenmill.__version__})

    @router.get("/", response_model=None, responses=response_schemas.ROOT)
    async def root(request: Request) -> Response:
        return json_response({"name": "tokenmill", "version": tokenmill.__version__, "docs": "/docs"})

    @router.get("/metrics", response_model=None, response_class=PlainTextResponse, responses=response_schemas.METRICS)
    async def metrics(request: Request) -> Response:
        content, content_type = render_metrics()
        return Response(content, headers={"content-type": content_type})

    return router


def health_response(health: Health) -> Response:
    content: dict[str, Any] = {"status": health.state, "detail": health.detail}
    if health.state == "ready":
        return json_response(content)
    message = f"not ready: {health.detail or health.state}"
    error = {"message": message, "type": error_type(503), "param": None, "code": health.state}
    return json_response({**content, "error": error}, 503, {"retry-after": str(RETRY_AFTER_S)})
