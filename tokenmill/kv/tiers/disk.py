"""The disk tier: blocks in a folder, a prompt cache that outlives the process.

    FOLDER/<digest>/<first byte>/<hash>-<group>      one file per block, mode 0600, folders 0700
    digest     of everything that a block's bytes depend on: weights, precisions, kernels, layout, block size
    hash       of the tokens up to the block's end, starting with the tenant's salt: a block can be read only by hash

A file is a header and a record. It is written under a temporary name and renamed, so that readers never see an
incomplete file. A file must have the right length and checksum (crc32) and belong to this user; otherwise the block
counts as missing. Several servers, also of different models, may share a folder.

The folder's size is limited, counting the files of all servers: whenever this server has written a tenth of the limit,
it lists the files and removes the least recently used ones. If the disk is full, or can't be written for another
reason, writing ends with one warning; existing blocks are still read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenmill.errors import InvalidConfig
from tokenmill.kv.names import BlockName
from tokenmill.kv.records import BufferOf, Record, bytes_of

log = logging.getLogger(__name__)

MAGIC = b"TMKV0001"
_HEAD = struct.Struct("<8s16s16sIQI")  # magic, digest, hash, group, bytes of the record, crc32 of header and record
UNFINISHED = ".new"
ABANDONED_S = 3600.0  # a temporary file of this age is abandoned
KEPT_SHARE = 0.9  # share of the allowed bytes that is kept when files have to be removed
RELIST_SHARE = 0.1  # share of the allowed bytes that is written before the folder is listed again


class DiskTier:
    name = "disk"

    def __init__(self, folder: Path, digest: bytes, max_bytes: int) -> None:
        self._folder = folder
        self._digest = digest[:16]
        self._subfolder = folder / digest.hex()[:32]
        self._max_bytes = max_bytes
        self._num_bytes = 0  # in the folder, when it was last listed
        self._num_written = 0  # since then
        self._was_listed = False
        self._is_writable = True
        try:
            self._subfolder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for first in range(256):
                (self._subfolder / f"{first:02x}").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"the folder {folder} can't be used for KV blocks: {error}", param="kv_disk") from None
        if os.stat(self._subfolder).st_uid != os.getuid():
            raise InvalidConfig(f"the folder {self._subfolder} belongs to another user", param="kv_disk")

    def has(self, name: BlockName) -> bool:
        return os.path.exists(self._path(name))

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        return [self.has(name) for name in names]

    def scratch(self, region: int, buffer: BufferOf) -> Sequence[Record]:
        return buffer(region)

    @contextlib.contextmanager
    def records(self, names: Sequence[BlockName], scratch: Sequence[Record]) -> Iterator[list[Record | None]]:
        """Return the records of these blocks, read into `scratch`; None for a missing or damaged block."""
        yield [self._read(name, record) for name, record in zip(names, scratch, strict=True)]

    def keep(self, name: BlockName, record: Record) -> int:
        """Write a block's file; return the bytes written, 0 if none were."""
        if not self._is_writable or self.has(name):
            return 0
        path = self._path(name)
        unfinished = f"{path}.{os.getpid()}{UNFINISHED}"
        head = self._head(name, bytes_of(record))
        try:
            self._make_room(record.numel() + len(head))
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                written = os.writev(descriptor, [head, bytes_of(record)])
            finally:
                os.close(descriptor)
            if written != len(head) + record.numel():
                raise OSError("a file was written incompletely")
            os.rename(unfinished, path)
        except OSError as error:
            self._is_writable = False
            log.warning("KV blocks are no longer written to %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            return 0
        self._num_written += written
        return written

    # ── one file ───────────────────────────────────────────────────────────────────────────────────────

    def _path(self, name: BlockName) -> str:
        digits = name.block_hash.hex()
        return f"{self._subfolder}/{digits[:2]}/{digits}-{name.group}"

    def _head(self, name: BlockName, record: memoryview) -> bytes:
        parts = (MAGIC, self._digest, name.block_hash, name.group, len(record))
        return _HEAD.pack(*parts, zlib.crc32(record, zlib.crc32(_HEAD.pack(*parts, 0))))

    def _read(self, name: BlockName, record: Record) -> Record | None:
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if self._is_whole(descriptor, name, record):
                with contextlib.suppress(OSError):
                    os.utime(descriptor)  # marks it as recently used
                return record
            log.warning("the KV block in %s is damaged and will be recomputed", path)
            os.unlink(path)
        except OSError as error:
            log.warning("the KV block in %s can't be read: %s", path, error)
        finally:
            os.close(descriptor)
        return None

    def _is_whole(self, descriptor: int, name: BlockName, record: Record) -> bool:
        """Read a file into a record; tell whether its length, header and checksum are valid for this block."""
        found, values = os.fstat(descriptor), bytes_of(record)
        if found.st_uid != os.getuid() or found.st_size != _HEAD.size + len(values):
            return False
        head = bytearray(_HEAD.size)
        if os.readv(descriptor, [head, values]) != found.st_size:
            return False
        return bytes(head) == self._head(name, values)

    # ── the folder ─────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used files of all servers, if necessary, so that a new one fits the limit."""
        is_due = self._num_written >= RELIST_SHARE * self._max_bytes
        if self._was_listed and not is_due and self._num_bytes + self._num_written + num_bytes <= self._max_bytes:
            return
        files = sorted(self._files())
        self._num_bytes, self._num_written, self._was_listed = sum(size for _, size, _ in files), 0, True
        if self._num_bytes + num_bytes <= self._max_bytes:
            return
        for _, size, path in files:
            if self._num_bytes + num_bytes <= KEPT_SHARE * self._max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._num_bytes -= size

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """List (time of last use, bytes, path) of the folder's files, and remove abandoned temporary ones."""
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(parent, name)
                with contextlib.suppress(OSError):
                    found = os.stat(path, follow_symlinks=False)
                    if name.endswith(UNFINISHED) and found.st_mtime < time.time() - ABANDONED_S:
                        os.unlink(path)
                    elif len(name) > 32 and name[32] == "-":
                        yield found.st_mtime, found.st_size, path
