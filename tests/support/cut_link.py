"""A slow, unreliable connection between two machines: a TCP relay on this machine."""

from __future__ import annotations

import asyncio
import contextlib


class CutLink:
    """Forwards bytes after a delay, and cuts every connection once a number of bytes has come back through it."""

    def __init__(self, port: int, *, delay_s: float, cut_bytes: int, num_cuts: int) -> None:
        """`port`: the destination. `cut_bytes`: a connection is cut after so many bytes from the destination."""
        self.num_cuts = 0
        self.seen = bytearray()  # bytes forwarded, in both directions
        self._port = port
        self._delay_s = delay_s
        self._cut_bytes = cut_bytes
        self._most_cuts = num_cuts
        self._num_back = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> int:
        """Start to listen; return the relay's port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        ways = [(reader, there_writer, True), (there_reader, writer, False)]
        tasks = [asyncio.create_task(self._carry(*way)) for way in ways]
        self._tasks |= set(tasks)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks -= set(tasks)
        for one in (writer, there_writer):
            one.transport.abort()
            self._writers.discard(one)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_back: bool) -> None:
        """Forward bytes. `is_back`: from the machine that connected, which has the cores."""
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            self.seen += data
            loop.call_later(self._delay_s, self._write, writer, data)
            self._num_back += len(data) if is_back else 0
            if self._num_back >= self._cut_bytes and self.num_cuts < self._most_cuts:
                self._num_back = 0
                self.num_cuts += 1
                loop.call_soon(self.cut)
        # Closing a connection waits until the other side has closed it too.
        loop.call_later(self._delay_s, writer.close)

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.transport.is_closing():
            writer.write(data)
