"""Endpoints for operators: health and readiness probes, version, metrics and usage."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

import tokenmill
from tokenmill.server.auth import require_operator
from tokenmill.server.dialect import head_of
from tokenmill.server.errors import NotReady, error_headers
from tokenmill.server.ledger import Ledger, groups_of, moment_of
from tokenmill.server.routing import COUNT, TEXT, Endpoint, RouteContext, json_response, list_of, object_of

TAG = "Operation"


def admin_endpoints(context: RouteContext, render_metrics: Callable[[], tuple[bytes, str]]) -> list[Endpoint]:
    async def health(request: Request) -> Response:
        health = context.registry.health()
        content = {"status": health.state, "detail": health.detail}
        if health.state == "ready":
            return json_response(content)
        error = NotReady(health.state, health.detail)
        request.state.record.error_code = error.code
        error_content = context.dialects.of(head_of(request.scope)).error_content(
            error, request.state.record.request_id
        )
        return json_response({**content, **error_content}, error.http_status, error_headers(error))

    async def ping(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def livez(request: Request) -> Response:
        return probe_reply(request, context.registry.is_live(), "the engine died too often: restart the server")

    async def startupz(request: Request) -> Response:
        return probe_reply(request, context.registry.has_started(), "the model is still loading")

    def probe_reply(request: Request, is_ok: bool, detail: str) -> Response:
        if is_ok:
            return json_response({"status": "ok"})
        request.state.record.error_code = "not_well"
        return json_response({"status": "failed", "detail": detail}, 503)

    async def version(request: Request) -> Response:
        return json_response({"version": tokenmill.__version__})

    async def metrics(request: Request) -> Response:
        if not context.config.public_metrics:
            require_operator(request)
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
        Endpoint("GET", "/ping", ping, TAG, object_of(status=TEXT), description="200 while the HTTP server runs."),
        Endpoint(
            "GET",
            "/livez",
            livez,
            TAG,
            object_of(status=TEXT),
            (503,),
            description="503 once the engine has died too often to be restarted: the server must be restarted.",
        ),
        Endpoint(
            "GET",
            "/readyz",
            health,
            TAG,
            object_of(status=TEXT, detail=TEXT),
            (503,),
            description="The same as /health: 200 while requests are accepted.",
        ),
        Endpoint(
            "GET",
            "/startupz",
            startupz,
            TAG,
            object_of(status=TEXT),
            (503,),
            description="200 from the first successful load of the model on.",
        ),
        Endpoint("GET", "/version", version, TAG, object_of(version=TEXT)),
        Endpoint(
            "GET",
            "/metrics",
            metrics,
            TAG,
            TEXT,
            (403,),
            description="Prometheus metrics of the whole server. With several API keys, it needs one with `sees_all`.",
            media_type="text/plain",
        ),
    ]


def usage_endpoints(ledger: Ledger) -> list[Endpoint]:
    async def usage(request: Request) -> Response:
        """Report the usage of the client's own key."""
        groups = groups_of(request.query_params.get("group_by", "model"))
        since_s = moment_of(request.query_params.get("since", "30d"), time.time())
        rows = await ledger.usage(groups, since_s, request.state.record.key_id)
        return json_response({"object": "list", "since": int(since_s), "data": rows})

    return [
        Endpoint(
            "GET",
            "/v1/usage",
            usage,
            TAG,
            object_of(object=TEXT, since={"type": "integer"}, data=list_of(object_of(requests=COUNT))),
            (400,),
            description="Requests and tokens of the request's key; ?group_by=model,user,outcome,day,month&since=7d.",
        )
    ]
