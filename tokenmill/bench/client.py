"""A streaming HTTP/1.1 client that does as little as possible between the socket and the clock.

One asyncio protocol object is one connection. Bytes are stamped on arrival and parsed soon after (`Inbox`), without
tasks and without copies of earlier data. So one core can hold thousands of streams and still know when each piece came.

    bytes ─► stamp ─► head ─► body (chunked, counted, or until the end) ─► lines ─► the dialect's reader ─► Record

A connection whose answer ended cleanly is kept for the next request.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

import orjson

from tokenmill.bench.dialects import ClientDialect, RequestSpec
from tokenmill.bench.request_records import BenchRecord
from tokenmill.errors import InvalidConfig

SLICE_S = 0.0002

Take = Callable[[bytes | None, float], None]  # bytes, or None at the end of the connection; arrival time


class Inbox:
    """Received bytes with their arrival times, parsed a little later.

    When a thousand streams receive data at the same moment, parsing the first one's bytes would delay the time stamps
    of the others. So data is stamped and queued here, and parsed in slices between two polls of the sockets:

        sockets ─► stamp, put ─► sockets ─► stamp, put ─► ...
                          └─► parse for a fraction of a millisecond ─┘

    The order is kept over all connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Take, bytes | None, float]] = deque()
        self._is_reading = False

    def put(self, take: Take, data: bytes | None, at: float) -> None:
        self._waiting.append((take, data, at))
        if not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        waiting, clock = self._waiting, time.perf_counter
        until = clock() + SLICE_S
        while waiting:
            take, data, at = waiting.popleft()
            take(data, at)
            if clock() > until:
                self._loop.call_soon(self._read)
                return
        self._is_reading = False


MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 20
MAX_ERROR_BYTES = 4096
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError)  # raised for malformed replies


def bad_reply(problem: Exception) -> tuple[str, str]:
    return "bad_reply", f"{type(problem).__name__}: {problem}"


def length_of(digits: bytes, base: int) -> int:
    if (length := int(digits, base)) < 0:
        raise ValueError(f"a length of {length}")
    return length


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, which carries one request at a time."""

    def __init__(self, dialect: ClientDialect, began: float, inbox: Inbox) -> None:
        self._dialect = dialect
        self._began = began
        self._inbox = inbox
        self._transport: asyncio.Transport | None = None
        self._record: BenchRecord | None = None
        self._done: asyncio.Future[None] | None = None
        self._buffer = b""
        self._line = b""
        self._error_body = b""
        self._in_body = self._is_chunked = self._has_length = False
        self._remaining = 0
        self._may_be_kept = self._is_lost = False

    # ── used by the client ─────────────────────────────────────────────────────────────────────────────

    def start(self, request: bytes, record: BenchRecord, done: asyncio.Future[None]) -> None:
        assert self._transport is not None
        self._record, self._done, self._may_be_kept = record, done, False
        self._buffer = self._line = self._error_body = b""
        self._in_body = self._is_chunked = self._has_length = False
        self._remaining = 0
        record.sent_s = time.perf_counter() - self._began
        self._transport.write(request)

    @property
    def is_reusable(self) -> bool:
        return self._may_be_kept and not self._is_lost

    def time_out(self) -> None:
        self._finish(time.perf_counter() - self._began, "timeout", "no complete answer in time")
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ── called by the event loop ───────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's own kind

    def data_received(self, data: bytes) -> None:
        self._inbox.put(self._read, data, time.perf_counter() - self._began)

    def eof_received(self) -> None:
        self._is_lost = True  # at once: this connection must not be reused while its last bytes wait to be read
        self._inbox.put(self._read, None, time.perf_counter() - self._began)

    def connection_lost(self, exc: Exception | None) -> None:
        self.eof_received()

    # ── parsing ────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, data: bytes | None, now: float) -> None:
        if data is None:
            self._lost(now)
            return
        if self._record is None:  # bytes after the end of an answer: do not reuse this connection
            self._may_be_kept = False
            return
        try:
            self._take(self._buffer + data if self._buffer else data, now)
        except UNREADABLE as problem:
            self._finish(now, *bad_reply(problem))

    def _take(self, data: bytes, now: float) -> None:
        self._buffer = b""
        if not self._in_body:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                if len(head) > MAX_HEAD_BYTES:
                    raise ValueError("headers too long")
                self._buffer = head
                return
            self._read_head(head)
        if self._is_chunked:
            self._take_chunks(data, now)
        elif self._has_length:
            part = data[: self._remaining]
            self._remaining -= len(part)
            self._take_body(part, now)
            if self._remaining == 0:
                self._finish(now)
        else:
            self._take_body(data, now)

    def _read_head(self, head: bytes) -> None:
        assert self._record is not None
        first, *lines = head.split(b"\r\n")
        self._record.status = int(first.split(b" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._in_body = True
        self._is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        self._has_length = not self._is_chunked and b"content-length" in headers
        self._remaining = length_of(headers[b"content-length"], 10) if self._has_length else 0
        self._may_be_kept = headers.get(b"connection", b"").lower() != b"close"

    def _take_chunks(self, data: bytes, now: float) -> None:
        """Parse chunks: hex length, CRLF, bytes, CRLF; length 0 ends the answer. Data may be split anywhere."""
        position = 0
        while position < len(data):
            if self._remaining:
                part = data[position : position + self._remaining]
                position += len(part)
                self._remaining -= len(part)
                self._take_body(part[:-2] if self._remaining == 0 else part[: self._inside(part)], now)
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                self._buffer = data[position:]
                return
            size = length_of(data[position:end].split(b";")[0], 16)
            position = end + 2
            if size == 0:
                self._finish(now)
                return
            self._remaining = size + 2  # with the CRLF that follows

    def _inside(self, part: bytes) -> int:
        """Return how much of an unfinished part is content: the CRLF at a chunk's end may itself be split."""
        return len(part) - max(0, 2 - self._remaining)

    def _take_body(self, data: bytes, now: float) -> None:
        assert self._record is not None
        if self._record.status != 200:
            self._error_body = (self._error_body + data)[:MAX_ERROR_BYTES]
            return
        *lines, self._line = (self._line + data if self._line else data).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            raise ValueError("line too long")
        for line in lines:
            self._read_line(line, now)

    def _read_line(self, line: bytes, now: float) -> None:
        assert self._record is not None
        if not self._dialect.is_sse:
            if line.strip():
                self._dialect.read(line, self._record, now)
        elif line.startswith(b"data:"):
            self._dialect.read(line[5:].strip(), self._record, now)

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, now: float, error: str | None = None, detail: str = "") -> None:
        record, done = self._record, self._done
        if record is None or done is None:
            return
        if (
            self._line and error is None
        ):  # the last line needs no line break; a partial line of a broken answer is dropped
            try:
                self._read_line(self._line, now)
            except UNREADABLE as problem:
                error, detail = bad_reply(problem)
        self._record = self._done = None
        record.end_s = now
        if error is not None:
            self._may_be_kept = False
            record.error, record.detail = error, detail
        elif record.status != 200:
            record.error, record.detail = f"http_{record.status}", self._error_body.decode("utf-8", "replace")
        elif record.error is None and not record.times_s:
            record.error = "empty"
        if not done.done():
            done.set_result(None)

    def _lost(self, now: float) -> None:
        """Handle the end of the connection: the end of an answer without a length, an error for any other."""
        self._may_be_kept = False
        if self._in_body and not self._is_chunked and not self._has_length:
            self._finish(now)
        else:
            self._finish(now, "cut", "the connection was closed before the answer ended")


class Client:
    """Requests to one server, over as many connections as are needed at once."""

    def __init__(self, url: str, dialect: ClientDialect, model: str, api_key: str | None, began: float) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfig(f"{url!r} is not an http address", param="url")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._dialect, self._model, self._began = dialect, model, began
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        keys = (f"authorization: Bearer {api_key}", *(f"{name}: {api_key}" for name in dialect.key_headers))
        auth = "".join(f"{line}\r\n" for line in (*dialect.headers, *(keys if api_key else ())))
        self._head = (
            f"POST {prefix}{dialect.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{auth}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._idle: list[Connection] = []
        self._inbox: Inbox | None = None

    def encode(self, ask: RequestSpec) -> bytes:
        body = orjson.dumps(self._dialect.body(ask, self._model))
        return self._head + str(len(body)).encode() + b"\r\n\r\n" + body

    async def fetch(self, request: bytes, record: BenchRecord, timeout_s: float) -> None:
        """Send the request and wait until its record is complete; errors are put into the record."""
        loop = asyncio.get_running_loop()
        connection = await self._connection(loop, record)
        if connection is None:
            return
        done: asyncio.Future[None] = loop.create_future()
        connection.start(request, record, done)
        timer = loop.call_later(timeout_s, connection.time_out)
        try:
            await done
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            timer.cancel()
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self, loop: asyncio.AbstractEventLoop, record: BenchRecord) -> Connection | None:
        while self._idle:
            kept = self._idle.pop()
            if kept.is_reusable:
                return kept
        context = ssl.create_default_context() if self._tls else None
        inbox = self._inbox = self._inbox or Inbox(loop)
        try:
            _, made = await loop.create_connection(
                lambda: Connection(self._dialect, self._began, inbox), self._host, self._port, ssl=context
            )
        except OSError as problem:
            record.sent_s = record.end_s = time.perf_counter() - self._began
            record.error, record.detail = "connect", str(problem)
            return None
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
