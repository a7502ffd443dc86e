"""The HTTP/1.1 connection, on top of uvicorn's: limits on the size and duration of a request's head, and the handling
of clients that disconnect, pipeline requests, do not read their replies, or offer another protocol.

Before its head is complete a request is not authenticated, and the HTTP library would buffer a head without limit. A
timer runs whenever no request of the connection is being processed.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections import deque

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenmill.errors import TokenmillError
from tokenmill.observe.log import event, get_log
from tokenmill.server.dialect import Dialects, path_only
from tokenmill.server.errors import HeadTooLarge, UnreadableRequest
from tokenmill.server.request_ids import call_id

log = get_log("server")
MAX_HEAD_BYTES = 64 << 10  # checked after each piece that arrives, and once the head is complete
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 60.0
HTTP_VERSIONS = ("1.0", "1.1")
WRITE_TIMEOUT_S = 60.0  # a client with unread output must read MIN_PROGRESS_BYTES in this time
MIN_PROGRESS_BYTES = 1024
MAX_UNREAD_BYTES = 64 << 20  # of a body that was refused in advance: read and dropped, so that the client sees why
STATUS_LINES = {400: "400 Bad Request", 431: "431 Request Header Fields Too Large"}
MIN_FREE_DESCRIPTORS = 16  # warn when fewer file descriptors are left
REPEAT_WARNING_S = 60.0
TLS_HELLO = b"\x16\x03"


def limited_protocol(dialects: Dialects) -> type[LimitedHttpProtocol]:
    """Return the connection class for uvicorn, for a server with these dialects."""
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), {"dialects": dialects})


class DescriptorWatch:
    """Logs, at most once a minute, that this process has nearly no file descriptors left. The system refuses further
    connections without any notice to the server."""

    def __init__(self) -> None:
        self._warned_s = -math.inf

    def note(self, transport: asyncio.Transport) -> None:
        connection = transport.get_extra_info("socket")
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if connection is None or limit == resource.RLIM_INFINITY or connection.fileno() < limit - MIN_FREE_DESCRIPTORS:
            return
        now_s = time.monotonic()
        if now_s - self._warned_s > REPEAT_WARNING_S:
            self._warned_s = now_s
            log.error("nearly all %d file descriptors are in use: raise the limit (ulimit -n)", limit)


DESCRIPTOR_WATCH = DescriptorWatch()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Errors before routing are rendered in the dialect of the path, if it was received."""

    dialects: Dialects

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        DESCRIPTOR_WATCH.note(transport)
        self._in_head, self._head_bytes = True, 0
        self._bytes_since_body = 0  # chunk sizes and trailer headers since the last body data
        self._has_begun = False  # part of a head was received, perhaps of a pipelined request
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first one is being processed
        self._timeout: asyncio.TimerHandle | None = None
        self._num_headers = self._header_bytes = 0
        self._refusal: TokenmillError | None = None  # of the head that was just read
        self._write_timeout: asyncio.TimerHandle | None = None
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        self._bytes_since_body += len(data)
        try:
            self._read(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or _unreadable_request(data))
        if not self._in_head and not self._unanswered and self._head_bytes > MAX_UNREAD_BYTES:
            self.transport.close()
        if (self._in_head and self._head_bytes > MAX_HEAD_BYTES) or self._bytes_since_body > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"the request's head is larger than {MAX_HEAD_BYTES} bytes"))
        self._start_timer()

    def _read(self, data: bytes) -> None:
        """Feed the parser. An offer to switch the protocol (Upgrade) is declined by ignoring the header, as HTTP
        requires. Java's HTTP client offers HTTP/2 with its first request, and the parser would skip its body."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":  # a request for a tunnel, without a body
            raise httptools.HttpParserError("not a proxy")
        kept = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        return b"".join([method, b" ", self.url, b" HTTP/", version, b"\r\n", *kept, b"\r\n"])

    def _start_timer(self) -> None:
        """Limit the time for the rest of a head, or of a body whose reply was sent early; uvicorn limits idle time."""
        is_idle = self.timeout_keep_alive_task is not None
        if self._timeout is None and not self._unanswered and not is_idle:
            self._timeout = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def on_message_begin(self) -> None:
        self._has_begun = True
        self._num_headers = self._header_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._in_head:
            super().on_header(name, value)
        else:  # trailers after a chunked body: they are not used, and their size is limited
            self._require_bounded_head()

    def _require_bounded_head(self) -> None:
        if self._header_bytes + len(self.url) > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge(f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
        elif self._num_headers > MAX_HEADERS:
            self._refusal = HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
        if self._refusal is not None:
            raise self._refusal

    def _require_sound_head(self) -> None:
        self._require_bounded_head()
        if self.parser.get_http_version() not in HTTP_VERSIONS:
            self._refusal = UnreadableRequest("the request is not HTTP/1.1")
        if self._refusal is not None:
            raise self._refusal

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._require_sound_head()
        self._in_head = self._has_begun = False
        self._stop_timer()
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = OpenEndedReply(self.cycle).send  # type: ignore[method-assign]  # uvicorn makes the cycle

    def on_body(self, body: bytes) -> None:
        self._bytes_since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes, self._bytes_since_body = True, 0, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._has_begun:  # not idle: part of the next request arrived before this reply was complete
            self._unset_keepalive_if_required()
            self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _expect_reading(self) -> None:
        """Disconnect a client that does not read, since its generation would hold memory and device time."""
        unsent = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() > unsent - MIN_PROGRESS_BYTES:
                event(log, "disconnected", client=self.client[0] if self.client else None, why="it does not read")
                self.transport.abort()
            else:
                self._expect_reading()

        self._write_timeout = self.loop.call_later(WRITE_TIMEOUT_S, check)

    def _stop_write_timer(self) -> None:
        if self._write_timeout is not None:
            self._write_timeout.cancel()
            self._write_timeout = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        for cycle in self._unanswered:  # uvicorn notifies only the last of several pipelined requests
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _refuse(self, error: TokenmillError) -> None:
        if self.transport.is_closing():
            return
        if self._unanswered and not self._unanswered[0].more_body:  # never write into a reply that is being sent
            for cycle in self._unanswered:
                cycle.keep_alive = False
            return
        request_id, client = call_id(""), self.client[0] if self.client else None
        event(log, "unreadable", id=request_id, client=client, error=error.code, why=error.message)
        body = self.dialects.of(path_only(self._path())).error_body(error, request_id)
        head = (
            f"HTTP/1.1 {STATUS_LINES[error.http_status]}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {request_id}\r\nrequest-id: {request_id}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _path(self) -> str:
        """Return the path of the request whose head is being read, or the part of it that was received."""
        return self.url.split(b"?")[0].decode("latin-1") if self._has_begun else ""


def _unreadable_request(data: bytes) -> UnreadableRequest:
    if data.startswith(TLS_HELLO):
        return UnreadableRequest("got TLS, but this port speaks plain HTTP", hint="use a URL that begins with http://")
    return UnreadableRequest("the request is not valid HTTP/1.1")


class OpenEndedReply:
    """A reply to an HTTP/1.0 client, which can't read chunked encoding: without a length, closing the connection ends
    it."""

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
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks each piece against it
        await self._send(message)
