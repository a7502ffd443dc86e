"""A file of packed matrices in the kernels' layout: mapped, never copied.

    0        header, 256 KiB: magic, length and digest of the record, then the record: format, source, index position
    256 KiB  the matrices of each weight in turn, each weight at a multiple of 4096
    ...      index: name, kind, shape, offset of every weight; its digest is in the header

A file is written under a temporary name, completed and renamed; after that it never changes. Then it is synced to disk,
which may take longer than the process lives, and made read-only to mark that (`settle`). A file that was not synced is
valid only until the machine restarts. A reader accepts the header if its digest matches, the index if its digest in the
header matches, and both only in a file that this user owns and no other user can write. It accepts the matrices if
their digests match, which are in a separate file (`packed_sums.py`). Any violation raises `Unusable`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill.weights.packed_sums import digests, read_sums, write_sums

MAGIC = b"TOKENMILL PACKED"
FORMAT = 2
PAGE = 4096
HEADER_BYTES = 256 << 10
MAX_INDEX_BYTES = 64 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PREFIX = struct.Struct("<16sI32s")  # magic, bytes of the record, its digest

Bytes = NDArray[np.uint8]


class FileSection(msgspec.Struct, frozen=True, array_like=True):
    """`count` matrices of one kind and shape, one after another."""

    kind: str
    rows: int
    cols: int
    count: int
    offset: int
    num_bytes: int


class PackedFileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the header."""

    format: int
    source: str  # JSON of the cache key, `packed_cache.Source`
    boot: str  # the machine's boot id; empty if unknown
    index_offset: int
    index_bytes: int
    index_digest: str


class Unusable(Exception):
    """A file can't be used, for this reason; the weights are packed again."""


class PackedFile:
    """A complete file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as file:
            found = os.fstat(file.fileno())
            self.is_settled = not found.st_mode & stat.S_IWUSR
            record = read_record(file)
            require_written_out(record, found.st_mode)
            self._index = _read_index(file, record, found.st_size)
            if self.is_settled:
                require_sums(path)
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._map.madvise(mmap.MADV_WILLNEED)  # reads from a cold disk in large pieces, not page by page
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def find(self, name: str) -> tuple[FileSection, Bytes] | None:
        section = self._index.get(name)
        if section is None:
            return None
        return section, self._bytes[section.offset : section.offset + section.num_bytes]


class PackedWriter:
    """A file being written: `reserve` returns mapped memory of the file to pack into; `finish` renames it into
    place."""

    is_settled = False

    def __init__(self, path: Path, source: str) -> None:
        self.path, self._source = path, source
        self._aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file = os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._index: dict[str, FileSection] = {}
        self._end = HEADER_BYTES

    def reserve(self, name: str, kind: str, rows: int, cols: int, count: int, num_bytes: int) -> Bytes:
        """Reserve space, or raise OSError if the disk is full. Space is allocated before it is mapped, because writing
        to a mapped page without disk space would kill the process."""
        os.posix_fallocate(self._file, self._end, num_bytes)
        mapped = mmap.mmap(self._file, num_bytes, offset=self._end)
        self._index[name] = FileSection(kind, rows, cols, count, self._end, num_bytes)
        self._end = _next_page(self._end + num_bytes)
        return np.frombuffer(mapped, np.uint8)

    def finish(self) -> None:
        """Write index and header once all reserved memory is filled, and publish the file."""
        index = msgspec.msgpack.encode(self._index)
        os.pwrite(self._file, index, self._end)
        record = msgspec.json.encode(
            PackedFileRecord(
                format=FORMAT,
                source=self._source,
                boot=boot_id(),
                index_offset=self._end,
                index_bytes=len(index),
                index_digest=hashlib.sha256(index).hexdigest(),
            )
        )
        header = _PREFIX.pack(MAGIC, len(record), hashlib.sha256(record).digest()) + record
        if len(header) > HEADER_BYTES:
            raise OSError("the checkpoint has more files than fit into the header")
        os.pwrite(self._file, header, 0)
        os.replace(self._aside, self.path)
        os.close(self._file)

    def abandon(self) -> None:
        """Delete the unfinished file; this process can still use the memory."""
        os.close(self._file)
        with suppress(OSError):
            self._aside.unlink()


def read_record(file: Any) -> PackedFileRecord:
    """Read the header of an open file."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise Unusable("it is truncated")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC or length > HEADER_BYTES - _PREFIX.size:
        raise Unusable("it has no header")
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise Unusable("its header is damaged")
    try:
        record = msgspec.json.decode(text, type=PackedFileRecord)
    except msgspec.DecodeError as problem:
        raise Unusable(f"its header is not valid: {problem}") from None
    if record.format != FORMAT:
        raise Unusable(f"it has format {record.format}, not {FORMAT}")
    return record


def require_written_out(record: PackedFileRecord, mode: int) -> None:
    """Refuse a file that may lack pages because the machine restarted before the file was synced to disk."""
    if mode & stat.S_IWUSR and record.boot != (boot_id() or None):
        raise Unusable("the machine restarted before it was synced to disk")


def require_sums(path: Path, *, always: bool = False) -> None:
    """Refuse a settled file whose content has changed. The whole file is read once after each boot, or if `always`."""
    sums = read_sums(path)
    if sums is None:
        raise Unusable("its checksums are missing")
    if not always and sums.boot and sums.boot == boot_id() and sums.changed_ns == path.stat().st_mtime_ns:
        return
    if digests(path) != sums.pieces:
        raise Unusable("its content has changed on the disk")


def note_use(path: Path) -> None:
    """Record that a verified file is used now, because the least recently used files are deleted first."""
    os.utime(path)
    if (sums := read_sums(path)) is not None:
        write_sums(path, sums.pieces, boot_id())


def settle(path: Path) -> None:
    """Sync a file to disk, write its checksums, then mark both as done by making it read-only, which is atomic."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        write_sums(path, digests(path), boot_id())
        os.fchmod(file, stat.S_IRUSR)
    finally:
        os.close(file)


def boot_id() -> str:
    """Return an id that changes each time the machine starts."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _opened(path: Path) -> Any:
    """Open a file that only this user can write: other writers could change the weights."""
    try:
        file = path.open("rb")
    except OSError as problem:
        raise Unusable(problem.strerror or "it can't be opened") from None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        file.close()
        raise Unusable("other users can write it")
    return file


def _read_index(file: Any, record: PackedFileRecord, size: int) -> dict[str, FileSection]:
    if not HEADER_BYTES <= record.index_offset <= size or not 0 < record.index_bytes <= MAX_INDEX_BYTES:
        raise Unusable("its index is outside the file")
    file.seek(record.index_offset)
    packed = file.read(record.index_bytes)
    if hashlib.sha256(packed).hexdigest() != record.index_digest:
        raise Unusable("its index is damaged or truncated")
    index = msgspec.msgpack.decode(packed, type=dict[str, FileSection])
    for name, section in index.items():
        ends = section.offset + section.num_bytes
        if (
            not HEADER_BYTES <= section.offset <= ends <= record.index_offset
            or section.count < 1
            or section.offset % PAGE
        ):
            raise Unusable(f"{name} is outside the file")
    return index


def _next_page(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
