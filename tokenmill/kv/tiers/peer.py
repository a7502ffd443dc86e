"""The peer tier: fetching blocks by name from another core, over a stream of bytes.

    fetching core                                    core with the blocks
    request: digest, names, kind of request  ──►
                                             ◄──  one byte per name                   presence: does it have the block?
                                             ◄──  a header and a record for each      records
                                             ◄──  a `BlockMap`, or nothing            memory: how to read its memory
                                             ◄──  a row for each name                 rows: the blocks' locations
                                             ◄──  a header for each                   sums: checksums of these rows

The stream is a unix socket. For a core on another machine it is the socket of a relay (`fleet/block_relay.py`), which
gets the core's name, the part of the address after #, and forwards the bytes unchanged. A core replies with the blocks
it has at that moment, and copies them as the saver does (`kv/traffic.py`): a block that is overwritten meanwhile counts
as missing. The fetching core verifies every record's checksum. A core that does not respond in time, has ended, or has
another digest has no blocks, and they are computed.

If both cores use NIXL (`nixl.py`), the fetching core asks for the blocks' rows, reads them from the other core's memory
and then asks for their checksums: a block that was overwritten meanwhile has none. If that memory can't be read,
records are requested instead.

The socket is in the core's folder, which only this user can access. Names are hashes of all tokens up to the block's
end, starting with the tenant's salt, so a block can be fetched only by a core that knows its tokens and salt.
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
from tokenmill.kv.records import BlockRecords, BufferOf, Record, bytes_of
from tokenmill.kv.tiers.nixl import BlockMap, MemoryAgent

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # after which a stream is closed
MAX_REQUEST_BYTES = 64 << 20
PROGRESS_INTERVAL_S = 0.0002  # between calls of a transport that makes progress only when it is called
MAX_STREAMS = 16  # that a core serves at the same time
_LENGTH = struct.Struct("<I")
_ROW = struct.Struct("<q")  # -1: the block is missing
_HEAD = struct.Struct("<QI")  # bytes of the record (0: the block is missing), crc32


About = Literal["presence", "records", "memory", "rows", "sums"]


class BlockRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request of one core to another about some blocks."""

    digest: bytes
    names: list[BlockName]
    about: About


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockRequest)
_map_decoder = msgspec.msgpack.Decoder(BlockMap)

Offer = tuple[int, tuple[int, bytes]]  # a block and its registration


class PeerTier:
    """The blocks of another core, for one fetch."""

    def __init__(self, address: str, digest: bytes, agent: MemoryAgent | None = None) -> None:
        """`address`: of a core's socket, or of a relay's socket followed by # and the core's name. `agent`: reads from
        the other core's memory, if that is possible."""
        self._address = address
        self._path, _, self._target = address.partition("#")
        self.name = tier_name(address)
        self._digest = digest
        self._agent = agent
        self._map: BlockMap | None = None  # of the other core, if its memory can be read
        self._is_map_known = agent is None
        self._stream: socket.socket | None = None
        self._is_closed = False

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        try:
            stream = self._request(names, "presence")
            found = bytearray(len(names))
            receive(stream, memoryview(found))
            return list(map(bool, found))
        except OSError as error:
            log.info("no KV blocks from %s: %s", self._address, error)
            self.close()
            return [False] * len(names)

    def scratch(self, region: int, buffer: BufferOf) -> Sequence[Record]:
        return buffer(region) if self._agent is None or self._readable() is None else self._agent.landing(region)

    @contextlib.contextmanager
    def records(self, names: Sequence[BlockName], scratch: Sequence[Record]) -> Iterator[list[Record | None]]:
        """Return the records of these blocks, received into `scratch`; None for missing and damaged blocks."""
        found: list[Record | None] = []
        try:
            if self._agent is not None and self._map is not None:
                found.extend(self._read(self._agent, self._map, names, scratch))
            else:
                stream = self._request(names, "records")
                found.extend(receive_record(stream, record) for record in scratch)  # those before a failure are used
        except OSError as error:
            log.info("%s has stopped sending KV blocks: %s", self._address, error)
            self.close()
        yield found + [None] * (len(names) - len(found))

    def close(self) -> None:
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _readable(self) -> BlockMap | None:
        """Return the map of the other core's memory, requested once; None if it can't be read."""
        if not self._is_map_known and self._agent is not None:
            self._is_map_known = True
            try:
                stream = self._request((), "memory")
                head = bytearray(_LENGTH.size)
                receive(stream, memoryview(head))
                (length,) = _LENGTH.unpack(head)
                if 0 < length <= MAX_REQUEST_BYTES:
                    encoded = bytearray(length)
                    receive(stream, memoryview(encoded))
                    known = _map_decoder.decode(encoded)
                    self._map = known if self._agent.can_read(known) else None
            except (OSError, msgspec.MsgspecError) as error:
                log.info("%s has not sent the map of its memory: %s", self._address, error)
                self.close()
        return self._map

    def _read(
        self, agent: MemoryAgent, memory: BlockMap, names: Sequence[BlockName], scratch: Sequence[Record]
    ) -> Iterator[Record | None]:
        """Read blocks from the other core's memory; None for those that were overwritten meanwhile."""
        stream = self._request(names, "rows")
        encoded = bytearray(_ROW.size * len(names))
        receive(stream, memoryview(encoded))
        rows = [row for (row,) in _ROW.iter_unpack(encoded)]
        present = [(row, record) for row, record in zip(rows, scratch, strict=True) if row >= 0]
        if present:
            agent.read(memory, names[0].group, present, TIMEOUT_S)
        heads = bytearray(_HEAD.size * len(names))
        stream = self._request((), "sums")
        receive(stream, memoryview(heads))
        for record, (length, crc) in zip(scratch, _HEAD.iter_unpack(heads), strict=True):
            if length and not memory.is_on_device and zlib.crc32(bytes_of(record)) != crc:
                raise OSError("a block was damaged in transit")
            yield record if length else None

    def _request(self, names: Sequence[BlockName], about: About) -> socket.socket:
        """Send a request, and return the stream to receive the reply from."""
        if self._is_closed:
            raise OSError("an earlier request to it failed")
        if self._stream is None:
            self._stream = socket.socket(socket.AF_UNIX)
            self._stream.settimeout(TIMEOUT_S)
            self._stream.connect(self._path)
            if self._target:
                self._stream.sendall(_LENGTH.pack(len(self._target)) + self._target.encode())
        request = _encoder.encode(BlockRequest(self._digest, list(names), about))
        self._stream.sendall(_LENGTH.pack(len(request)) + request)
        return self._stream


def tier_name(address: str) -> str:
    """Return the tier name for a core's address; transfer times are measured per tier name."""
    return "elsewhere" if "#" in address else "peer"


def receive_record(stream: socket.socket, record: Record) -> Record | None:
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
        raise OSError("a record was damaged in transit")
    return record


def receive(stream: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; raise OSError if the stream ends before."""
    while buffer:
        number = stream.recv_into(buffer)
        if not number:
            raise OSError("the stream has ended")
        buffer = buffer[number:]


# ── the core with the blocks ───────────────────────────────────────────────────────────────────────────


class BlockServer:
    """Serves blocks to other cores in background threads, which end with this object."""

    def __init__(
        self,
        address: str,
        digest: Callable[[], bytes],
        index: PrefixIndex,
        regions: Sequence[int],
        make_records: Callable[[], BlockRecords],
        agent: MemoryAgent | None = None,
    ) -> None:
        """`address`: the path of its socket; `regions`: the pool's region of each cache group; `agent`: lets other
        cores read the pool."""
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
        """Answer all requests of a stream until it ends or sends an invalid one."""
        with stream, self._free:
            stream.settimeout(TIMEOUT_S)
            records = self._make_records()
            buffers: dict[int, Record] = {}
            offered: list[Offer | None] = []
            make_progress = None if self._agent is None else self._agent.make_progress
            try:
                while (request := receive_request(stream, make_progress if offered else None)) is not None:
                    is_known = request.digest == self._digest()
                    offers = [self._offer(name) if is_known else None for name in request.names]
                    match request.about:
                        case "presence":
                            stream.sendall(bytes(offer is not None for offer in offers))
                        case "records":
                            for offer in offers:
                                self._send_record(stream, offer, records, buffers)
                        case "memory":
                            encoded = _encoder.encode(self._agent.map) if is_known and self._agent is not None else b""
                            stream.sendall(_LENGTH.pack(len(encoded)) + encoded)
                        case "rows":
                            records.wait_for_steps()
                            offered = offers
                            stream.sendall(b"".join(_ROW.pack(self._row(records, one)) for one in offers))
                        case "sums":
                            stream.sendall(b"".join(self._sum(offer, records, buffers) for offer in offered))
                            offered = []
            except (OSError, msgspec.MsgspecError) as error:
                log.debug("a stream of blocks has ended: %s", error)

    def _offer(self, name: BlockName) -> Offer | None:
        """Return the block with this name and its registration; None if it is not registered."""
        block = self._index.find(*name) if name.group < len(self._regions) else None
        registration = None if block is None else self._index.registration(block)
        return None if block is None or registration is None or registration != name else (block, registration)

    def _row(self, records: BlockRecords, offer: Offer | None) -> int:
        return -1 if offer is None else records.row(self._regions[offer[1][0]], offer[0])

    def _copy(self, offer: Offer | None, records: BlockRecords, buffers: dict[int, Record]) -> Record | None:
        """Copy a block into the stream's buffer for its region; return None if the block was reused since the offer."""
        if offer is None:
            return None
        block, registration = offer
        region = self._regions[registration[0]]
        if region not in buffers:
            buffers[region] = records.empty(region, 1)[0]
        record = buffers[region]
        records.read(region, [block], [record])
        return record if self._index.registration(block) is registration else None

    def _send_record(
        self, stream: socket.socket, offer: Offer | None, records: BlockRecords, buffers: dict[int, Record]
    ) -> None:
        record = self._copy(offer, records, buffers)
        if record is None:
            stream.sendall(_HEAD.pack(0, 0))
            return
        stream.sendall(head_of(record))
        stream.sendall(bytes_of(record))

    def _sum(self, offer: Offer | None, records: BlockRecords, buffers: dict[int, Record]) -> bytes:
        """Return the header of a block that another core has read from memory. Blocks in a GPU's memory have no
        checksum: it would require a copy of each, and the links between GPUs detect errors themselves."""
        if self._agent is not None and self._agent.is_on_device:
            is_there = offer is not None and self._index.registration(offer[0]) is offer[1]
            return _HEAD.pack(int(is_there), 0)
        record = self._copy(offer, records, buffers)
        return _HEAD.pack(0, 0) if record is None else head_of(record)


def head_of(record: Record) -> bytes:
    values = bytes_of(record)
    return _HEAD.pack(len(values), zlib.crc32(values))


def receive_request(stream: socket.socket, make_progress: Callable[[], None] | None = None) -> BlockRequest | None:
    """Return the next request of a stream; None if it has ended or timed out. `make_progress`: called repeatedly until
    the request arrives."""
    head = bytearray(_LENGTH.size)
    if make_progress is not None:
        end_s = time.monotonic() + TIMEOUT_S
        while not select.select([stream], [], [], PROGRESS_INTERVAL_S)[0] and time.monotonic() < end_s:
            make_progress()
    with contextlib.suppress(TimeoutError):
        if not stream.recv_into(head, _LENGTH.size, socket.MSG_WAITALL):
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_REQUEST_BYTES:
            raise OSError(f"a request of {length} bytes is too large")
        request = bytearray(length)
        receive(stream, memoryview(request))
        return _decoder.decode(request)
    return None


def accept_streams(owner: weakref.ref[BlockServer], listening: socket.socket) -> None:
    """Start a thread for each stream until the socket is closed."""
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
    """Close the listening socket, which ends the accepting thread."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
