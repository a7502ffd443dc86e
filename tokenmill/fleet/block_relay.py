"""Blocks between machines: streams of bytes through the link that joins them (`link.py`).

    core ─► its machine's relay socket ══ link ══ front ══ link ══ the other machine ─► socket of the core with blocks

To a core another one is an address (`kv/tiers/peer.py`). That of a core elsewhere is this machine's relay socket and,
behind a #, the name of the target, which the core says first. From there on bytes are handed on as they are. Nobody
names a path to another machine: a target is the number of a core there, or one of the front's own cores.

The link carries outputs too, so a stream waits while much is on its way. What goes wrong ends the stream: the core that
has asked computes.
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
TARGET_S = 5.0  # for a core to say whom it asks
BEHIND = "#"  # between a relay's socket and a target
_LENGTH = struct.Struct("<I")


Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str], Awaitable[Pipe]]  # to a target; OSError: it can't be reached


class LinkedStreams:
    """The streams over one link, as one of its sides sees them."""

    def __init__(self, link: ReliableLink, send: Callable[[StreamMessage], None], connect: Connect, first: int) -> None:
        """`connect`: to a target that the other side names. `first`: the number of this side's first stream."""
        self._link = link
        self._send = send
        self._connect = connect
        self._numbers = itertools.count(first, 2)
        self._incoming: dict[int, asyncio.Queue[bytes]] = {}  # by stream; empty bytes end it
        self._tasks: set[asyncio.Task[None]] = set()

    async def carry(self, target: str, pipe: Pipe) -> None:
        """Carry a pipe's bytes to and from a target on the other side, until either ends."""
        number = next(self._numbers)
        self._send(OpenBlocks(number, target))
        await self._carry(number, pipe)

    def note(self, message: StreamMessage) -> None:
        """Take in what the other side says."""
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
        """End all streams: the other side is gone."""
        for incoming in self._incoming.values():
            incoming.put_nowait(b"")
        for task in self._tasks:
            task.cancel()

    async def _open(self, number: int, target: str) -> None:
        try:
            pipe = await self._connect(target)
        except OSError as problem:
            log.info("blocks of %s can't be had: %s", target, problem)
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
            pass  # the core at this side is gone
        finally:
            reading.cancel()
            self._incoming.pop(number, None)
            self._send(CloseBlocks(number))
            writer.close()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        """Hand on what a core says; its end is told to our own side, which tells the other."""
        try:
            while data := await reader.read(CHUNK):
                await self._link.wait_for_room()
                self._send(BlockBytes(number, data))
        except OSError:
            pass
        if number in self._incoming:
            self._incoming[number].put_nowait(b"")


class RelaySocket:
    """The socket at which a machine's cores ask for blocks of cores elsewhere; only this user can reach it."""

    def __init__(self, carry: Callable[[str, Pipe], Awaitable[None]]) -> None:
        """`carry`: the bytes of a core's stream to a target."""
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
            target = await asyncio.wait_for(said_target(reader), TARGET_S)
            await self._carry(target, (reader, writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, UnicodeDecodeError) as problem:
            log.info("a core's question for blocks was dropped: %s", problem)
        finally:
            writer.close()


async def said_target(reader: asyncio.StreamReader) -> str:
    """The target that a core names first."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 < length <= MAX_TARGET:
        raise OSError(f"a target of {length} bytes")
    return (await reader.readexactly(length)).decode()


async def joined_pipes() -> tuple[Pipe, Pipe]:
    """Two ends of one pipe in this process."""
    ends = socket.socketpair()
    with contextlib.ExitStack() as undo:
        for end in ends:
            undo.callback(end.close)
        one, other = [await asyncio.open_unix_connection(sock=end) for end in ends]
        undo.pop_all()
    return one, other
