"""Endpoints for operators: is it up, is it ready, which version, how busy."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

import tokenmill
from tokenmill.server.dialect import head_of
from tokenmill.server.errors import NotReady, error_headers
from tokenmill.server.routing import TEXT, Endpoint, RouteContext, json_response, object_of

TAG = "Operation"


def admin_endpoints(context: RouteContext, render_metrics: Callable[[], tuple[bytes, str]]) -> list[Endpoint]:
    async def health(request: Request) -> Response:
        found = context.registry.health()
        content = {"status": found.state, "detail": found.detail}
        if found.state == "ready":
            return json_response(content)
        error = NotReady(found.state, found.detail)
        request.state.record.error_code = error.code
        shown = context.dialects.of(head_of(request.scope)).error_content(error, request.state.record.request_id)
        return json_response({**content, **shown}, error.http_status, error_headers(error))

    async def ping(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def version(request: Request) -> Response:
        return json_response({"version": tokenmill.__version__})

    async def metrics(request: Request) -> Response:
        content, content_type = render_metrics()
        return Response(content, headers={"content-type": content_type})

    return [
        Endpoint(
            "GET",
            "/health",
            health,
            TAG,
            object_of(status=TEXT, detail=TEXT),
            (503,),
            description="Ready: 200. Loading, draining or dead: 503.",
        ),
        Endpoint("GET", "/ping", ping, TAG, object_of(status=TEXT), description="The front process is alive."),
        Endpoint("GET", "/version", version, TAG, object_of(version=TEXT)),
        Endpoint("GET", "/metrics", metrics, TAG, TEXT, description="Prometheus metrics.", media_type="text/plain"),
    ]
