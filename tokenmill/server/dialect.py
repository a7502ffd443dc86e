"""A dialect: one API protocol, such as OpenAI's.

The outer layers (connection, authentication, routing, errors) know no specific dialect. They look it up by the head of
a request to render an error, also for errors before routing, when only the path is known.

    method, path, headers ──► Dialects.of ──► Dialect: error body and status, endpoints
    generation ──► Rendering (see generation.py): the bytes of a reply, framing (SSE, pings, last line) included

A path belongs to the dialect with the longest matching prefix. A path of two dialects, such as /v1/models, goes to the
one that recognises the request by its method or headers (`shared`). API keys are accepted in any of `auth.KEY_HEADERS`,
and request ids and retry headers are the same in all dialects, because clients mix them.

To add a dialect: a package with its endpoints, its parser and its renderings, and two lines in `app.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from tokenmill.errors import TokenmillError
from tokenmill.server.errors import error_headers
from tokenmill.server.quotas import LimitHeaders, openai_limit_headers


class RequestHead(NamedTuple):
    """The parts of a request that are known before its body is read."""

    method: str
    path: str
    headers: Headers


Recognises = Callable[[RequestHead], bool]


def head_of(scope: Scope) -> RequestHead:
    return RequestHead(scope["method"], scope["path"], Headers(scope=scope))


def path_only(path: str) -> RequestHead:
    """Return a request head for a path alone."""
    return RequestHead("", path, Headers())


@dataclass(frozen=True)
class Dialect:
    """A protocol as the outer layers see it."""

    name: str
    prefixes: tuple[str, ...]  # of its paths; "" matches all paths that no other dialect has
    error_content: Callable[[TokenmillError, str], dict[str, Any]]  # error, request id ─► error object
    error_schema: dict[str, Any]  # of the error object
    key_hint: str  # hint for a client that sent no key
    statuses: Mapping[int, int] = field(default_factory=dict)  # HTTP statuses that this dialect replaces by others
    shared: Mapping[str, Recognises] = field(
        default_factory=dict
    )  # shared path prefix ─► is the request this dialect's?
    takes_any_content_type: bool = False  # accept JSON bodies that are not declared as JSON
    limit_headers: LimitHeaders = openai_limit_headers  # headers with the remaining limits of a key

    def error_status(self, error: TokenmillError) -> int:
        return self.statuses.get(error.http_status, error.http_status)

    def error_body(self, error: TokenmillError, request_id: str) -> bytes:
        return orjson.dumps(self.error_content(error, request_id))

    def error_response(
        self, error: TokenmillError, request_id: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        every_header = {**error_headers(error), **(headers or {})}
        return json_bytes(self.error_body(error, request_id), self.error_status(error), every_header)


class Dialects:
    """All dialects of a server, found by the head of a request."""

    def __init__(self, *dialects: Dialect) -> None:
        by_prefix = [(prefix, dialect) for dialect in dialects for prefix in dialect.prefixes]
        self._by_prefix = sorted(by_prefix, key=lambda entry: -len(entry[0]))  # the longest prefix decides
        self._shared = [(*entry, dialect) for dialect in dialects for entry in dialect.shared.items()]
        if not by_prefix or self._by_prefix[-1][0]:
            raise ValueError("one dialect must have the prefix '' for all other paths")

    def of(self, head: RequestHead) -> Dialect:
        for prefix, recognises, dialect in self._shared:
            if head.path.startswith(prefix) and recognises(head):
                return dialect
        return next(dialect for prefix, dialect in self._by_prefix if head.path.startswith(prefix))


def json_bytes(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply of encoded JSON."""
    return Response(body, status, headers, "application/json")


# ── framing: server-sent events and JSON lines ─────────────────────────────────────────────────────────

STREAM_HEADERS: Sequence[tuple[bytes, bytes]] = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx not to buffer the stream
)
SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), *STREAM_HEADERS)
SSE_PING = b": ping\n\n"  # a comment, which every client skips
NDJSON_HEADERS = ((b"content-type", b"application/x-ndjson"), *STREAM_HEADERS)


def sse_frame(payload: bytes) -> bytes:
    """Return one server-sent event. `payload`: JSON, so it contains no line break."""
    return b"data: " + payload + b"\n\n"


def named_sse_frame(name: str, payload: bytes) -> bytes:
    """Return one server-sent event with a name, for clients that ignore unnamed events."""
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


def ndjson_line(payload: bytes) -> bytes:
    """Return one object of a stream of JSON lines, without an empty line after it, which clients would fail to
    parse."""
    return payload + b"\n"
