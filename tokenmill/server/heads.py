"""Request heads of bounded size and time. Nothing is known of a client before its head is complete, not even its key,
and the HTTP library would collect one without end.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenmill.server.failures import HeadTooLarge
from tokenmill.server.openai.errors import error_body

MAX_HEAD_BYTES = 64 << 10  # a piece that arrived together is looked at as a whole, so a little more may come
HEAD_TIMEOUT_S = 60.0


class BoundedHeads(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._in_head, self._head_bytes = True, 0
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._patience.cancelled():  # the next request of a connection that is kept
            self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._patience.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def _refuse(self) -> None:
        body = error_body(HeadTooLarge(f"the request's head is larger than {MAX_HEAD_BYTES} bytes"))
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
