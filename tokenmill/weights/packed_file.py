"""A file of packed matrices, as the kernels read them: mapped, never copied.

    0        header, 256 KiB: magic, length and digest of the record, then the record: format, source, index's place
    256 KiB  matrices of one weight after another, each weight at a multiple of 4096
    ...      index: name, kind, shape, offset of every weight; its digest is in the header

A file is written aside under a name of its own, completed and renamed into place; it is not changed after that. It is
then written out to the disk, which may take longer than the process lives, and made read-only as a sign that it is
(`settle`): one that is not is good until the machine goes down. A reader believes the header only if its digest fits,
the index only if the header's digest of it fits, and both only in a file that belongs to this user and that no
other user may write. The matrices it believes if their digests fit, which lie in a file beside it
(`packed_sums.py`). Whatever is wrong is one `Unusable`.
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
    source: str  # what the weights were packed from, as `packed_cache` writes it
    boot: str  # id of the machine's start; empty where unknown
    index_offset: int
    index_bytes: int
    index_digest: str


class Unusable(Exception):
    """The reason why a file is not used; it is then written again."""


class PackedFile:
    """A complete file, mapped."""

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
        self._map.madvise(mmap.MADV_WILLNEED)  # from a cold disk in large pieces, not page by page
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
        """Reserve space, or raise OSError if the disk is full: space is allocated before it is mapped, since a mapped
        page without disk space would end the process.
        """
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
            raise OSError("the checkpoint has more files than a header can name")
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
        raise Unusable("it is cut short")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC or length > HEADER_BYTES - _PREFIX.size:
        raise Unusable("it has no header")
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise Unusable("its header is damaged")
    try:
        record = msgspec.json.decode(text, type=PackedFileRecord)
    except msgspec.DecodeError as problem:
        raise Unusable(f"its header can't be read: {problem}") from None
    if record.format != FORMAT:
        raise Unusable(f"it has format {record.format}, not {FORMAT}")
    return record


def require_written_out(record: PackedFileRecord, mode: int) -> None:
    """Refuse a file that may lack pages: the machine went down before the file was synced to disk."""
    if mode & stat.S_IWUSR and record.boot != (boot_id() or None):
        raise Unusable("the machine went down before it was written out")


def require_sums(path: Path, *, always: bool = False) -> None:
    """Refuse a settled file with a byte that has changed. It is read through where no process has since the machine's
    start, or `always`."""
    sums = read_sums(path)
    if sums is None:
        raise Unusable("nothing tells whether it is as it was written")
    if not always and sums.boot and sums.boot == boot_id() and sums.changed_ns == path.stat().st_mtime_ns:
        return
    if digests(path) != sums.pieces:
        raise Unusable("its content has changed on the disk")


def note_use(path: Path) -> None:
    """Let a file that was found right count as used now: least recently used ones are removed first."""
    os.utime(path)
    if (sums := read_sums(path)) is not None:
        write_sums(path, sums.pieces, boot_id())


def settle(path: Path) -> None:
    """Wait until all of it is on the disk and digested, then say so in its mode, which changes at once or not at
    all."""
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
        raise Unusable("others than this user may write it")
    return file


def _read_index(file: Any, record: PackedFileRecord, size: int) -> dict[str, FileSection]:
    if not HEADER_BYTES <= record.index_offset <= size or not 0 < record.index_bytes <= MAX_INDEX_BYTES:
        raise Unusable("its index lies outside the file")
    file.seek(record.index_offset)
    packed = file.read(record.index_bytes)
    if hashlib.sha256(packed).hexdigest() != record.index_digest:
        raise Unusable("its index is damaged or cut off")
    index = msgspec.msgpack.decode(packed, type=dict[str, FileSection])
    for name, section in index.items():
        ends = section.offset + section.num_bytes
        if (
            not HEADER_BYTES <= section.offset <= ends <= record.index_offset
            or section.count < 1
            or section.offset % PAGE
        ):
            raise Unusable(f"{name} lies outside the file")
    return index


def _next_page(place: int) -> int:
    return -(-place // PAGE) * PAGE
