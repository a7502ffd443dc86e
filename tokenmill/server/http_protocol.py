"""The HTTP/1.1 connection, on top of uvicorn's: bounds on the size and time of a request's head, and clients that break
off, send on while they are answered, do not read what they are sent, or offer other protocols.

Before its head is complete nothing is known of a client, not even its key, and the HTTP library would collect a head
without end. A timer runs whenever no request of the connection is being answered.
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

from tokenmill.engine.request_ids import call_id
from tokenmill.errors import TokenmillError
from tokenmill.observe.log import event, get_log
from tokenmill.server.dialect import Dialects, path_only
from tokenmill.server.errors import HeadTooLarge, UnreadableRequest

log = get_log("server")
MAX_HEAD_BYTES = 64 << 10  # checked after each piece that arrives, and once the head is complete
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 60.0
HTTP_VERSIONS = ("1.0", "1.1")
WRITE_TIMEOUT_S = 60.0  # in which a client that is behind takes LEAST_TAKEN_BYTES, or the connection ends
LEAST_TAKEN_BYTES = 1024
MAX_UNREAD_BYTES = 64 << 20  # of a body that was refused before it came: read, so that the client sees why, and dropped
STATUS_LINES = {400: "400 Bad Request", 431: "431 Request Header Fields Too Large"}
FEW_LEFT = 16  # descriptors
REPEAT_WARNING_S = 60.0
TLS_HELLO = b"\x16\x03"


def limited_protocol(dialects: Dialects) -> type[LimitedHttpProtocol]:
    """The class of uvicorn's connections, for a server with these dialects."""
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), {"dialects": dialects})


class DescriptorWatch:
    """Says in the log, once a minute at most, that connections take the last descriptors of this process. Later ones
    are closed by the system, unseen."""

    def __init__(self) -> None:
        self._told_s = -math.inf

    def note(self, transport: asyncio.Transport) -> None:
        connection = transport.get_extra_info("socket")
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if connection is None or limit == resource.RLIM_INFINITY or connection.fileno() < limit - FEW_LEFT:
            return
        now_s = time.monotonic()
        if now_s - self._told_s > REPEAT_WARNING_S:
            self._told_s = now_s
            log.error("%d connections and files are open, nearly all that may be: raise the limit (ulimit -n)", limit)


FEW_DESCRIPTORS = DescriptorWatch()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Errors before routing are shown in the dialect of the path, as far as that is known."""

    dialects: Dialects

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        FEW_DESCRIPTORS.note(transport)
        self._in_head, self._head_bytes = True, 0
        self._has_begun = False  # a head, perhaps of the next request while one is being answered
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first one is being answered
        self._timeout: asyncio.TimerHandle | None = None
        self._num_headers = self._header_bytes = 0
        self._refusal: TokenmillError | None = None  # of the head that was just read
        self._write_timeout: asyncio.TimerHandle | None = None
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            self._read(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or _unreadable_request(data))
        if not self._in_head and not self._unanswered and self._head_bytes > MAX_UNREAD_BYTES:
            self.transport.close()
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"the request's head is larger than {MAX_HEAD_BYTES} bytes"))
        self._start_timer()

    def _read(self, data: bytes) -> None:
        """Feed the parser. An offer to change the protocol is declined as HTTP wants it: the request is read as if it
        came without. (Java's own client offers HTTP/2 with every first request; the parser would skip its body.)"""
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

    def _start_timer(self) -> None:
        """Limit the time for the rest of a head, or of a body that was answered early; uvicorn limits idle time."""
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
        super().on_header(name, value)

    def _require_sound_head(self) -> None:
        if self._header_bytes + len(self.url) > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge(f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
        elif self._num_headers > MAX_HEADERS:
            self._refusal = HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
        elif self.parser.get_http_version() not in HTTP_VERSIONS:
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

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._has_begun:  # not idle: the next request began while this one was answered
            self._unset_keepalive_if_required()
            self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _expect_reading(self) -> None:
        """Disconnect a client that does not read, so that its answer does not hold memory and device time."""
        unsent = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() > unsent - LEAST_TAKEN_BYTES:
                event(log, "given up", client=self.client[0] if self.client else None, why="it does not read")
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
        for cycle in self._unanswered:  # uvicorn notifies the last one only, which may be waiting behind others
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _refuse(self, error: TokenmillError) -> None:
        if self.transport.is_closing():
            return
        if self._unanswered and not self._unanswered[0].more_body:  # never write into an answer that is being sent
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
        """Return the path of the request whose head is being read, as far as it was received."""
        return self.url.split(b"?")[0].decode("latin-1") if self._has_begun else ""


def _unreadable_request(data: bytes) -> UnreadableRequest:
    if data.startswith(TLS_HELLO):
        return UnreadableRequest("a client speaks TLS to a port that does not", hint="the URL begins with http://")
    return UnreadableRequest("the request is not valid HTTP/1.1")


class OpenEndedReply:
    """A reply to an HTTP/1.0 client, which knows no chunks: without a length it ends with its connection."""

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
