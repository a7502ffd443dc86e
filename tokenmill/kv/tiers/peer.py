"""Blocks of another core, by name, over a stream of bytes.

    asking core                                          core that has blocks
    question: digest, names, is it for the records?  ──►
                                                     ◄──  one byte a name: is it here?          (only asked)
                                                     ◄──  a head and a record for each name     (records asked)

A stream is a unix socket here. For a core on another machine it is that of a relay (`fleet/block_relay.py`), which is
told the name behind the address's # and hands on the bytes without understanding them. The protocol has no sessions and
no state: a core answers with the blocks it has at this moment, and copies them as the saver does (`kv/traffic.py`): a
block that is overwritten meanwhile counts as missing. The asking core checks every record's sum. A core that is silent
for too long, gone, or of another digest has no blocks, and they are computed.

The socket lies in the core's own folder, which only this user can enter. Names are hashes of all tokens before, begun
with the tenant's salt: who can't name a block can't get it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.names import BlockName
from tokenmill.kv.records import BlockRecords, Record, bytes_of

log = logging.getLogger(__name__)

SILENCE_S = 5.0  # after which a stream is given up
MAX_QUESTION_BYTES = 64 << 20
MAX_STREAMS = 16  # that a core answers at a time
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<QI")  # bytes of the record, 0: it is not here; crc32


class BlockQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question of one core to another: which blocks it has, or their records."""

    digest: bytes
    names: list[BlockName]
    is_for_records: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockQuestion)


class PeerTier:
    """The blocks of one other core, for one fetch."""

    needs_scratch = True

    def __init__(self, address: str, digest: bytes) -> None:
        """`address`: of a core's socket, or of a relay's with the core's name behind a #."""
        self._address = address
        self._path, _, self._target = address.partition("#")
        self.name = tier_name(address)
        self._digest = digest
        self._stream: socket.socket | None = None
        self._is_closed = False

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        try:
            stream = self._asked(names, is_for_records=False)
            found = bytearray(len(names))
            receive(stream, memoryview(found))
            return list(map(bool, found))
        except OSError as error:
            log.info("%s can't be asked for blocks: %s", self._address, error)
            self.close()
            return [False] * len(names)

    @contextlib.contextmanager
    def records(self, names: Sequence[BlockName], scratch: Sequence[Record]) -> Iterator[list[Record | None]]:
        """The records of these blocks, in `scratch`; None for those that are gone, or do not arrive whole."""
        found: list[Record | None] = []
        try:
            stream = self._asked(names, is_for_records=True)
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

    def _asked(self, names: Sequence[BlockName], *, is_for_records: bool) -> socket.socket:
        if self._is_closed:
            raise OSError("an earlier request to it failed")
        if self._stream is None:
            self._stream = socket.socket(socket.AF_UNIX)
            self._stream.settimeout(SILENCE_S)
            self._stream.connect(self._path)
            if self._target:
                self._stream.sendall(_LENGTH.pack(len(self._target)) + self._target.encode())
        question = _encoder.encode(BlockQuestion(self._digest, list(names), is_for_records))
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
    ) -> None:
        """`address`: the path of its socket; `regions`: of the pool, by cache group."""
        self.address = address
        self._digest = digest
        self._index = index
        self._regions = regions
        self._make_records = make_records
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
            try:
                while (question := received_question(stream)) is not None:
                    is_known = question.digest == self._digest()
                    if not question.is_for_records:
                        stream.sendall(bytes(is_known and self._block(name) is not None for name in question.names))
                        continue
                    for name in question.names:
                        self._send_record(stream, name if is_known else None, records, room)
            except (OSError, msgspec.MsgspecError) as error:
                log.debug("a stream of blocks has ended: %s", error)

    def _block(self, name: BlockName) -> int | None:
        return self._index.find(*name) if name.group < len(self._regions) else None

    def _send_record(
        self, stream: socket.socket, name: BlockName | None, records: BlockRecords, room: dict[int, list[Record]]
    ) -> None:
        block = None if name is None else self._block(name)
        registration = None if block is None else self._index.registration(block)
        if name is None or block is None or registration is None:
            stream.sendall(_HEAD.pack(0, 0))
            return
        region = self._regions[name.group]
        record = room.setdefault(region, records.empty(region, 1))[0]
        records.read(region, [block], [record])
        if registration != name or self._index.registration(block) is not registration:
            stream.sendall(_HEAD.pack(0, 0))
            return
        values = bytes_of(record)
        stream.sendall(_HEAD.pack(len(values), zlib.crc32(values)))
        stream.sendall(values)


def received_question(stream: socket.socket) -> BlockQuestion | None:
    """The next question of a stream; None where it has ended."""
    head = bytearray(_LENGTH.size)
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
