"""Blocks of another core, by name, over a stream of bytes.

    asking core                                          core that has blocks
    question: digest, names, what is asked of them   ──►
                                                     ◄──  one byte a name                presence: is it here?
                                                     ◄──  a head and a record for each   records
                                                     ◄──  a `BlockMap`, or nothing       memory: how it may be read
                                                     ◄──  a row for each name            rows: where it lies there
                                                     ◄──  a head for each                sums: of the rows told last

A stream is a unix socket here. For a core on another machine it is that of a relay (`fleet/block_relay.py`), which is
told the name behind the address's # and hands on the bytes without understanding them. The protocol has no sessions and
no state: a core answers with the blocks it has at this moment, and copies them as the saver does (`kv/traffic.py`): a
block that is overwritten meanwhile counts as missing. The asking core checks every record's sum. A core that is silent
for too long, gone, or of another digest has no blocks, and they are computed.

Where both cores have NIXL and were told to use it (`nixl.py`), the asking one reads blocks from the other one's memory
after it was told their rows, and then asks for their sums: a block that was overwritten meanwhile has none. A core that
can't be read from is asked for records.

The socket lies in the core's own folder, which only this user can enter. Names are hashes of all tokens before, begun
with the tenant's salt: who can't name a block can't get it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.names import BlockName
from tokenmill.kv.records import BlockRecords, Record, Room, bytes_of
from tokenmill.kv.tiers.nixl import BlockMap, MemoryAgent

log = logging.getLogger(__name__)

SILENCE_S = 5.0  # after which a stream is given up
MAX_QUESTION_BYTES = 64 << 20
DRIVE_S = 0.0002  # between calls of a transport that works when it is called
MAX_STREAMS = 16  # that a core answers at a time
_LENGTH = struct.Struct("<I")
_ROW = struct.Struct("<q")  # -1: it is not here
_HEAD = struct.Struct("<QI")  # bytes of the record, 0: it is not here; crc32


About = Literal["presence", "records", "memory", "rows", "sums"]


class BlockQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question of one core to another about some blocks."""

    digest: bytes
    names: list[BlockName]
    about: About


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockQuestion)
_map_decoder = msgspec.msgpack.Decoder(BlockMap)

Offer = tuple[int, tuple[int, bytes]]  # a block, and what it is registered as


class PeerTier:
    """The blocks of one other core, for one fetch."""

    def __init__(self, address: str, digest: bytes, agent: MemoryAgent | None = None) -> None:
        """`address`: of a core's socket, or of a relay's with the core's name behind a #. `agent`: reads from the other
        core's memory, where that core lets it."""
        self._address = address
        self._path, _, self._target = address.partition("#")
        self.name = tier_name(address)
        self._digest = digest
        self._agent = agent
        self._map: BlockMap | None = None  # of the other core, where its memory may be read
        self._is_map_known = agent is None
        self._stream: socket.socket | None = None
        self._is_closed = False

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        try:
            stream = self._asked(names, "presence")
            found = bytearray(len(names))
            receive(stream, memoryview(found))
            return list(map(bool, found))
        except OSError as error:
            log.info("%s can't be asked for blocks: %s", self._address, error)
            self.close()
            return [False] * len(names)

    def scratch(self, region: int, room: Room) -> Sequence[Record]:
        return room(region) if self._agent is None or self._readable() is None else self._agent.landing(region)

    @contextlib.contextmanager
    def records(self, names: Sequence[BlockName], scratch: Sequence[Record]) -> Iterator[list[Record | None]]:
        """The records of these blocks, in `scratch`; None for those that are gone, or do not arrive whole."""
        found: list[Record | None] = []
        try:
            if self._agent is not None and self._map is not None:
                found.extend(self._read(self._agent, self._map, names, scratch))
            else:
                stream = self._asked(names, "records")
                found.extend(received_record(stream, record) for record in scratch)  # those before a fault count
        except OSError as error:
            log.info("%s does not send its blocks any more: %s", self._address, error)
            self.close()
        yield found + [None] * (len(names) - len(found))

    def close(self) -> None:
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _readable(self) -> BlockMap | None:
        """Return how the other core's memory is read; None: it is not. Asked once."""
        if not self._is_map_known and self._agent is not None:
            self._is_map_known = True
            try:
                stream = self._asked((), "memory")
                head = bytearray(_LENGTH.size)
                receive(stream, memoryview(head))
                (length,) = _LENGTH.unpack(head)
                if 0 < length <= MAX_QUESTION_BYTES:
                    encoded = bytearray(length)
                    receive(stream, memoryview(encoded))
                    known = _map_decoder.decode(encoded)
                    self._map = known if self._agent.can_read(known) else None
            except (OSError, msgspec.MsgspecError) as error:
                log.info("%s does not say where its blocks lie: %s", self._address, error)
                self.close()
        return self._map

    def _read(
        self, agent: MemoryAgent, memory: BlockMap, names: Sequence[BlockName], scratch: Sequence[Record]
    ) -> Iterator[Record | None]:
        """Read blocks from the other core's memory; those count that it had all the time, and whose sums are right."""
        stream = self._asked(names, "rows")
        encoded = bytearray(_ROW.size * len(names))
        receive(stream, memoryview(encoded))
        rows = [row for (row,) in _ROW.iter_unpack(encoded)]
        here = [(row, record) for row, record in zip(rows, scratch, strict=True) if row >= 0]
        if here:
            agent.read(memory, names[0].group, here, SILENCE_S)
        heads = bytearray(_HEAD.size * len(names))
        stream = self._asked((), "sums")
        receive(stream, memoryview(heads))
        for record, (length, crc) in zip(scratch, _HEAD.iter_unpack(heads), strict=True):
            if length and not memory.is_on_device and zlib.crc32(bytes_of(record)) != crc:
                raise OSError("a block was damaged on its way")
            yield record if length else None

    def _asked(self, names: Sequence[BlockName], about: About) -> socket.socket:
        if self._is_closed:
            raise OSError("an earlier request to it failed")
        if self._stream is None:
            self._stream = socket.socket(socket.AF_UNIX)
            self._stream.settimeout(SILENCE_S)
            self._stream.connect(self._path)
            if self._target:
                self._stream.sendall(_LENGTH.pack(len(self._target)) + self._target.encode())
        question = _encoder.encode(BlockQuestion(self._digest, list(names), about))
        self._stream.sendall(_LENGTH.pack(len(question)) + question)
        return self._stream


def tier_name(address: str) -> str:
    """Return the tier name of a core's address, under which its transfer time is measured."""
    return "elsewhere" if "#" in address else "peer"


def received_record(stream: socket.socket, record: Record) -> Record | None:
    head = bytearray(_HEAD.size)
    receive(stream, memoryview(head))
    length, crc = _HEAD.unpack(head)
    if not length:
        return None
    values = bytes_of(record)
    if length != len(values):
        raise OSError(f"a record of {length} bytes where {len(values)} were expected")
    receive(stream, values)
    if zlib.crc32(values) != crc:
        raise OSError("a record was damaged on its way")
    return record


def receive(stream: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; OSError where the stream ends before."""
    while buffer:
        number = stream.recv_into(buffer)
        if not number:
            raise OSError("the stream has ended")
        buffer = buffer[number:]


# ── the core that has blocks ───────────────────────────────────────────────────────────────────────────


class BlockServer:
    """Answers other cores in threads of its own, which end with this object."""

    def __init__(
        self,
        address: str,
        digest: Callable[[], bytes],
        index: PrefixIndex,
        regions: Sequence[int],
        make_records: Callable[[], BlockRecords],
        agent: MemoryAgent | None = None,
    ) -> None:
        """`address`: the path of its socket; `regions`: of the pool, by cache group; `agent`: lets others read the
        pool."""
        self.address = address
        self._digest = digest
        self._index = index
        self._regions = regions
        self._make_records = make_records
        self._agent = agent
        self._free = threading.Semaphore(MAX_STREAMS)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        os.chmod(address, 0o600)
        listening.listen()
        self.close = weakref.finalize(self, end_listening, listening)
        threading.Thread(
            target=accept_streams, args=(weakref.ref(self), listening), name="kv-server", daemon=True
        ).start()

    def answer(self, stream: socket.socket) -> None:
        """Answer all questions of a stream until it ends, or asks nonsense."""
        with stream, self._free:
            stream.settimeout(SILENCE_S)
            records = self._make_records()
            room: dict[int, list[Record]] = {}
            offered: list[Offer | None] = []
            drive = None if self._agent is None else self._agent.drive
            try:
                while (question := received_question(stream, drive if offered else None)) is not None:
                    is_known = question.digest == self._digest()
                    offers = [self._offer(name) if is_known else None for name in question.names]
                    match question.about:
                        case "presence":
                            stream.sendall(bytes(offer is not None for offer in offers))
                        case "records":
                            for offer in offers:
                                self._send_record(stream, offer, records, room)
                        case "memory":
                            encoded = _encoder.encode(self._agent.map) if is_known and self._agent is not None else b""
                            stream.sendall(_LENGTH.pack(len(encoded)) + encoded)
                        case "rows":
                            records.settle()
                            offered = offers
                            stream.sendall(b"".join(_ROW.pack(self._row(records, one)) for one in offers))
                        case "sums":
                            stream.sendall(b"".join(self._sum(offer, records, room) for offer in offered))
                            offered = []
            except (OSError, msgspec.MsgspecError) as error:
                log.debug("a stream of blocks has ended: %s", error)

    def _offer(self, name: BlockName) -> Offer | None:
        """Return the block of a name, and its registration."""
        block = self._index.find(*name) if name.group < len(self._regions) else None
        registration = None if block is None else self._index.registration(block)
        return None if block is None or registration is None or registration != name else (block, registration)

    def _row(self, records: BlockRecords, offer: Offer | None) -> int:
        return -1 if offer is None else records.row(self._regions[offer[1][0]], offer[0])

    def _copied(self, offer: Offer | None, records: BlockRecords, room: dict[int, list[Record]]) -> Record | None:
        """Copy a block; None where it is not what it was when it was offered."""
        if offer is None:
            return None
        block, registration = offer
        region = self._regions[registration[0]]
        record = room.setdefault(region, records.empty(region, 1))[0]
        records.read(region, [block], [record])
        return record if self._index.registration(block) is registration else None

    def _send_record(
        self, stream: socket.socket, offer: Offer | None, records: BlockRecords, room: dict[int, list[Record]]
    ) -> None:
        record = self._copied(offer, records, room)
        if record is None:
            stream.sendall(_HEAD.pack(0, 0))
            return
        stream.sendall(head_of(record))
        stream.sendall(bytes_of(record))

    def _sum(self, offer: Offer | None, records: BlockRecords, room: dict[int, list[Record]]) -> bytes:
        """Return the head of a block that another core has read by itself. Those in a GPU's memory have no sum: it
        would take a copy of each, and what lies between GPUs checks what it carries."""
        if self._agent is not None and self._agent.is_on_device:
            is_there = offer is not None and self._index.registration(offer[0]) is offer[1]
            return _HEAD.pack(int(is_there), 0)
        record = self._copied(offer, records, room)
        return _HEAD.pack(0, 0) if record is None else head_of(record)


def head_of(record: Record) -> bytes:
    values = bytes_of(record)
    return _HEAD.pack(len(values), zlib.crc32(values))


def received_question(stream: socket.socket, drive: Callable[[], None] | None = None) -> BlockQuestion | None:
    """The next question of a stream; None where it has ended. `drive`: called again and again until it comes."""
    head = bytearray(_LENGTH.size)
    if drive is not None:
        end_s = time.monotonic() + SILENCE_S
        while not select.select([stream], [], [], DRIVE_S)[0] and time.monotonic() < end_s:
            drive()
    with contextlib.suppress(TimeoutError):  # a stream may rest; the other side closes it
        if not stream.recv_into(head, _LENGTH.size, socket.MSG_WAITALL):
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_QUESTION_BYTES:
            raise OSError(f"a question of {length} bytes")
        question = bytearray(length)
        receive(stream, memoryview(question))
        return _decoder.decode(question)
    return None


def accept_streams(owner: weakref.ref[BlockServer], listening: socket.socket) -> None:
    """Begin a thread for each stream, until the socket is closed."""
    while True:
        try:
            stream, _ = listening.accept()
        except OSError:
            return
        server = owner()
        if server is None:
            stream.close()
            return
        threading.Thread(target=server.answer, args=(stream,), name="kv-stream", daemon=True).start()
        del server


def end_listening(listening: socket.socket) -> None:
    """Wake the thread that listens, and let it end."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
