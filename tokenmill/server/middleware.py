"""The outermost middleware: gives every request an id and a record, normalises its path and writes its log line.

HEAD is handled as GET (the HTTP layer drops the body) and a trailing slash is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.observe.log import event, get_log
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.dialect import Dialects, head_of
from tokenmill.server.errors import InternalError
from tokenmill.server.request_ids import call_id

log = get_log("server")
PROBES = frozenset({"/health", "/ping", "/livez", "/readyz", "/startupz"})
POLLED_PATHS = PROBES | {"/metrics"}  # requested by machines every few seconds: logged at DEBUG
PAGE_PREFIX = "/ui/"  # the files and the feed of the server's own page: a dozen requests for each visit


class RequestMiddleware:
    """Wraps the whole application. An exception that escapes from it becomes an internal error of that request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_begin: Callable[[RequestRecord, Headers], None] | None,
        on_done: Callable[[RequestRecord], None],
        dialects: Dialects,
    ) -> None:
        self._app = app
        self._on_begin = on_begin
        self._on_done = on_done
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(call_id(headers.get("x-request-id", "")), scope["method"], scope["path"])
        if self._on_begin is not None:
            self._on_begin(record, headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                request_id = record.request_id.encode()
                ids = ((b"x-request-id", request_id), (b"request-id", request_id))  # OpenAI's clients and Anthropic's
                message["headers"] = [*message.get("headers", []), *ids, *self._limits(record, scope)]
                if record.route is not None:
                    message["headers"].append((b"x-tokenmill-replica", record.route.encode()))
                if record.cache is not None:
                    message["headers"].append((b"x-cache", record.cache.encode()))
                if record.trace is not None:
                    message["headers"].append((b"traceparent", record.trace.header))
            elif not message.get("more_body", False):
                self._finish(record)  # before the last byte: once a client has its reply, the metrics include it
            await send(message)

        try:
            await self._app(_normalised(scope, record), receive, send_with_id)
        except Exception:
            log.exception("request %s failed", record.request_id)
            if record.status == 0:  # no response was started
                error = InternalError()
                record.error_code = error.code
                failed = self._dialects.of(head_of(scope)).error_response(error, record.request_id)
                await failed(scope, receive, send_with_id)
        finally:
            self._finish(record)

    def _limits(self, record: RequestRecord, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers with the remaining limits of the request's key."""
        if record.limits is None:
            return []
        return record.limits.headers(self._dialects.of(head_of(scope)).limit_headers)

    def _finish(self, record: RequestRecord) -> None:
        if record.is_finished:
            return
        record.is_finished = True
        record.status = record.status or 500
        self._on_done(record)
        is_expected = record.status < 400 or record.status == 503  # 503: loading or draining
        is_unremarkable = record.path in POLLED_PATHS or record.path.startswith(PAGE_PREFIX)
        level = logging.DEBUG if is_unremarkable and is_expected else logging.INFO
        if log.isEnabledFor(level):
            event(log, "request", level=level, **record.log_fields())


def _normalised(scope: Scope, record: RequestRecord) -> Scope:
    path = scope["path"].rstrip("/") or "/"
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method, "state": {**scope.get("state", {}), "record": record}}
