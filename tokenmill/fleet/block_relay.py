"""Transfer of KV blocks between machines, as byte streams over their links (`link.py`).

    core ─► its machine's relay socket ══ link ══ front ══ link ══ the other machine ─► socket of the core with blocks

A core knows another core by an address (`kv/tiers/peer.py`). For a core on another machine, the address is this
machine's relay socket and, after a #, the name of the target, which the core sends first; all later bytes are forwarded
unchanged. A target is the number of a core, never a path in another machine's file system.

The link carries outputs too, so a stream waits while much data is in flight. Any failure ends the stream, and the
requesting core computes the blocks itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable

from tokenmill.engine.core_process import FOLDER_PREFIX, socket_path
from tokenmill.fleet.link import BlockBytes, CloseBlocks, OpenBlocks, ReliableLink, StreamMessage
from tokenmill.observe.log import get_log

log = get_log("fleet")

CHUNK = 64 << 10
MAX_TARGET = 200  # bytes
MAX_STREAMS = 64  # over one link
TARGET_TIMEOUT_S = 5.0  # for a core to send the target
TARGET_SEPARATOR = "#"  # between a relay's socket and a target in an address
_LENGTH = struct.Struct("<I")


Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str], Awaitable[Pipe]]  # target → a pipe to it; raises OSError if it is unreachable


class LinkedStreams:
    """One side's view of the streams over a link."""

    def __init__(self, link: ReliableLink, send: Callable[[StreamMessage], None], connect: Connect, first: int) -> None:
        """`connect`: opens a pipe to a target that the other side names. `first`: the number of this side's first
        stream."""
        self._link = link
        self._send = send
        self._connect = connect
        self._numbers = itertools.count(first, 2)
        self._incoming: dict[int, asyncio.Queue[bytes]] = {}  # by stream; empty bytes end it
        self._tasks: set[asyncio.Task[None]] = set()

    async def carry(self, target: str, pipe: Pipe) -> None:
        """Forward a pipe's bytes to and from a target on the other side, until either ends."""
        number = next(self._numbers)
        self._send(OpenBlocks(number, target))
        await self._carry(number, pipe)

    def note(self, message: StreamMessage) -> None:
        """Handle a message of the other side."""
        match message:
            case OpenBlocks(stream, target) if stream not in self._incoming and len(self._incoming) < MAX_STREAMS:
                self._incoming[stream] = asyncio.Queue()
                task = asyncio.create_task(self._open(stream, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case OpenBlocks(stream):
                self._send(CloseBlocks(stream))
            case BlockBytes(stream, data) if stream in self._incoming:
                self._incoming[stream].put_nowait(data)
            case CloseBlocks(stream) if stream in self._incoming:
                self._incoming[stream].put_nowait(b"")

    def close(self) -> None:
        """End all streams, because the other side is lost."""
        for incoming in self._incoming.values():
            incoming.put_nowait(b"")
        for task in self._tasks:
            task.cancel()

    async def _open(self, number: int, target: str) -> None:
        try:
            pipe = await self._connect(target)
        except OSError as problem:
            log.info("blocks of %s can't be fetched: %s", target, problem)
            self._incoming.pop(number, None)
            self._send(CloseBlocks(number))
            return
        await self._carry(number, pipe)

    async def _carry(self, number: int, pipe: Pipe) -> None:
        reader, writer = pipe
        incoming = self._incoming.setdefault(number, asyncio.Queue())
        reading = asyncio.create_task(self._read(number, reader))
        try:
            while data := await incoming.get():
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the core on this side has ended
        finally:
            reading.cancel()
            self._incoming.pop(number, None)
            self._send(CloseBlocks(number))
            writer.close()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        """Forward the bytes of a core. When its stream ends, close the stream on this side, which closes the other."""
        try:
            while data := await reader.read(CHUNK):
                await self._link.wait_for_capacity()
                self._send(BlockBytes(number, data))
        except OSError:
            pass
        if number in self._incoming:
            self._incoming[number].put_nowait(b"")


class RelaySocket:
    """The socket at which a machine's cores request blocks of cores on other machines; only this user can access it."""

    def __init__(self, carry: Callable[[str, Pipe], Awaitable[None]]) -> None:
        """`carry`: forwards the bytes of a core's stream to and from a target."""
        self.path = ""  # until it is open
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._carry = carry
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=socket_path(tempfile.gettempdir()))
        self.path = os.path.join(self._folder.name, "relay")
        self._server = await asyncio.start_unix_server(self._accept, self.path, limit=2 * CHUNK)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._folder is not None:
            self._folder.cleanup()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = await asyncio.wait_for(read_target(reader), TARGET_TIMEOUT_S)
            await self._carry(target, (reader, writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, UnicodeDecodeError) as problem:
            log.info("a core's request for blocks was dropped: %s", problem)
        finally:
            writer.close()


async def read_target(reader: asyncio.StreamReader) -> str:
    """Read the target's name, which a core sends first."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 < length <= MAX_TARGET:
        raise OSError(f"a target of {length} bytes is too long or empty")
    return (await reader.readexactly(length)).decode()


async def joined_pipes() -> tuple[Pipe, Pipe]:
    """Return the two ends of a pipe within this process."""
    ends = socket.socketpair()
    with contextlib.ExitStack() as undo:
        for end in ends:
            undo.callback(end.close)
        one, other = [await asyncio.open_unix_connection(sock=end) for end in ends]
        undo.pop_all()
    return one, other
