"""A dialect: one protocol that clients speak, such as OpenAI's.

The outer layers (connection, key, routing, errors) know no dialect. They ask the table below, by the path of a request,
how an error looks and where the key is: also for errors that occur before routing, when a path is all that is known.

    path ──► Dialects.of ──► Dialect: error body, key headers, endpoints
    generation ──► Rendering (see generation.py): the bytes of a reply, framing (SSE, pings, last line) included

To add a dialect: a package with its endpoints, its parser and its renderings, and one `Dialect` in `app.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response

from tokenmill.errors import TokenmillError
from tokenmill.server.errors import error_headers


@dataclass(frozen=True)
class Dialect:
    """What the outer layers need to know of a protocol."""

    name: str
    prefixes: tuple[str, ...]  # of its paths; "" is all paths that no other dialect has
    error_content: Callable[[TokenmillError], dict[str, Any]]  # the JSON object that its clients read
    error_schema: dict[str, Any]  # of that object
    key_headers: tuple[str, ...]  # in which its clients send their key; `authorization` as `Bearer KEY`
    key_hint: str  # for a client that sent none

    def error_body(self, error: TokenmillError) -> bytes:
        return orjson.dumps(self.error_content(error))

    def error_response(self, error: TokenmillError, headers: dict[str, str] | None = None) -> Response:
        return Response(
            self.error_body(error),
            status_code=error.http_status,
            headers={**error_headers(error), **(headers or {})},
            media_type="application/json",
        )

    def keys_in(self, headers: Headers) -> list[bytes]:
        """All keys that a request offers."""
        return [_key(name, headers[name]) for name in self.key_headers if name in headers]


def _key(name: str, value: str) -> bytes:
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        value = value if scheme.lower() == "bearer" else ""
    return value.strip().encode("latin-1", "replace")


class Dialects:
    """All dialects of a server, found by path."""

    def __init__(self, *dialects: Dialect) -> None:
        by_prefix = [(prefix, dialect) for dialect in dialects for prefix in dialect.prefixes]
        self._by_prefix = sorted(by_prefix, key=lambda entry: -len(entry[0]))  # the longest prefix decides
        if not by_prefix or self._by_prefix[-1][0]:
            raise ValueError("one dialect must have the prefix '' for all other paths")

    def of(self, path: str) -> Dialect:
        return next(dialect for prefix, dialect in self._by_prefix if path.startswith(prefix))


# ── server-sent events, for dialects that use them ─────────────────────────────────────────────────────

SSE_HEADERS: Sequence[tuple[bytes, bytes]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps proxies from collecting the stream
)
SSE_PING = b": ping\n\n"  # a comment: every client skips it


def sse_frame(payload: bytes) -> bytes:
    """One event; `payload` is JSON and so has no line break inside."""
    return b"data: " + payload + b"\n\n"
