"""The outermost layer: gives every request an id and a record, smooths paths, and writes one log line at the end.

HEAD is answered as GET (the HTTP layer drops the body) and a trailing slash is ignored.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.observe.log import event, get_log
from tokenmill.server.errors import InternalError
from tokenmill.server.openai.errors import error_response
from tokenmill.server.request_record import RequestRecord

log = get_log("server")
PROBES = frozenset({"/health", "/ping", "/metrics"})  # asked every few seconds by machines: not worth a line
ACCEPTED_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestMiddleware:
    def __init__(self, app: ASGIApp, *, on_done: Callable[[RequestRecord], None]) -> None:
        self.app = app
        self.on_done = on_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(request_id_of(Headers(scope=scope)), scope["method"], scope["path"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", record.request_id.encode())]
            elif not message.get("more_body", False):
                self._finish(record)  # before the last byte: who has read the answer finds it counted
            await send(message)

        try:
            await self.app(_smoothed(scope, record), receive, send_with_id)
        except Exception:
            log.exception("request %s failed", record.request_id)
            if record.status == 0:  # nothing was sent yet
                await error_response(InternalError())(scope, receive, send_with_id)
        finally:
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        if record.is_finished:
            return
        record.is_finished = True
        record.status = record.status or 500
        self.on_done(record)
        is_expected = record.status < 400 or record.status == 503  # loading and draining are answers too
        level = logging.DEBUG if record.path in PROBES and is_expected else logging.INFO
        event(log, "request", level=level, **record.log_fields())


def request_id_of(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if ACCEPTED_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _smoothed(scope: Scope, record: RequestRecord) -> Scope:
    path = scope["path"].rstrip("/") or "/"
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method, "state": {**scope.get("state", {}), "record": record}}
