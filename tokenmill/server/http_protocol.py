"""What uvicorn leaves open between a socket and a request: heads of bounded size and time, and clients that break off,
talk on, or offer other protocols.

Nothing is known of a client before its head is complete, not even its key, and the HTTP library would collect one
without end. While nothing is being answered a clock always runs; while something is, no clock does.
"""

from __future__ import annotations

import asyncio
from collections import deque

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenmill.errors import TokenmillError
from tokenmill.observe.log import event, get_log
from tokenmill.server.errors import HeadTooLarge, Unreadable
from tokenmill.server.openai.errors import error_body

log = get_log("server")
MAX_HEAD_BYTES = 64 << 10  # a piece that arrived together is looked at as a whole, so a little more may come
HEAD_TIMEOUT_S = 60.0
STATUS_LINES = {400: "400 Bad Request", 431: "431 Request Header Fields Too Large"}
TLS_HELLO = b"\x16\x03"


class LimitedHttpProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._in_head, self._head_bytes = True, 0
        self._has_begun = False  # a head, or the next one behind a request that is being answered
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first one is being answered
        self._patience: asyncio.TimerHandle | None = None
        self._limit_waiting()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            self._read(data)
        except httptools.HttpParserError:
            self._refuse(_unreadable(data))
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"the request's head is larger than {MAX_HEAD_BYTES} bytes"))
        self._limit_waiting()

    def _read(self, data: bytes) -> None:
        """An offer to change the protocol is declined as HTTP wants it: the request is read as if it came without.
        (Java's own client offers HTTP/2 with every first request, and the parser would skip the body of such a one.)"""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":  # asks for a tunnel; there is nothing else in it
            raise httptools.HttpParserError("not a proxy")
        kept = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        return b"".join([method, b" ", self.url, b" HTTP/", version, b"\r\n", *kept, b"\r\n"])

    def _limit_waiting(self) -> None:
        """For the rest of a head, or of a body whose request was answered early; idle connections have uvicorn's."""
        is_idle = self.timeout_keep_alive_task is not None
        if self._patience is None and not self._unanswered and not is_idle:
            self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def on_message_begin(self) -> None:
        self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = self._has_begun = False
        self._stop_clock()
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = UntilClosed(self.cycle).send  # type: ignore[method-assign]  # uvicorn makes the cycle

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._has_begun:  # not idle: the beginning came while the answer was under way
            self._unset_keepalive_if_required()
            self._limit_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        for cycle in self._unanswered:  # uvicorn tells the last one only, which may be one that waits for its turn
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _refuse(self, error: TokenmillError) -> None:
        if self.transport.is_closing():
            return
        if self._unanswered and not self._unanswered[0].more_body:  # an answer is on its way: nothing may come into it
            for cycle in self._unanswered:
                cycle.keep_alive = False
            return
        event(log, "unreadable", client=self.client[0] if self.client else None, error=error.code, why=error.message)
        body = error_body(error)
        head = (
            f"HTTP/1.1 {STATUS_LINES[error.http_status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _unreadable(data: bytes) -> Unreadable:
    if data.startswith(TLS_HELLO):
        return Unreadable("a client speaks TLS to a port that does not", hint="the URL begins with http://")
    return Unreadable("the request is not valid HTTP/1.1")


class UntilClosed:
    """HTTP/1.0 knows no chunks: an answer without a length is sent as it is and ends with its connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_open_ended = False

    async def send(self, message: ASGISendEvent) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._is_open_ended = all(name != b"content-length" for name, _ in message.get("headers", []))
            cycle.chunked_encoding = False if self._is_open_ended else None
        elif self._is_open_ended and message["type"] == "http.response.body":
            while cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            cycle.expected_content_length = len(message.get("body", b""))  # each piece keeps its promise
        await self._send(message)
