"""Disk cache of packed weights, so that later starts of a large model need not pack them again.

    $TOKENMILL_HOME/packed/<digest>      digest of: the checkpoint's files, how tensors are assembled, the kernels'
                                         memory layout, what is quantised at load time, the Tokenmill version

A checkpoint file is identified by its size, modification time and samples of its content (`FileIdentity`): hashing the
whole file would take longer than packing.

    |████░░░░█░░░░░░█░░░░░░█░░░░░░█░░░░░░██|      █ hashed: the beginning (all of a GGUF header that differs between
                                                    quantisations), 64 pieces spread evenly, the end

The path does not matter: a file that was moved, or copied with its times, counts as the same. A file that was
overwritten differs in its content even if size and time were restored. Packed files are readable by their owner only,
written under a temporary name and renamed. Damaged, stale and surplus files are deleted when the next one is written,
and when a model is removed from the store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tokenmill.store.layout import store_root
from tokenmill.version import VERSION
from tokenmill.weights.packed_file import (
    Bytes,
    FileSection,
    PackedFile,
    PackedWriter,
    Unusable,
    note_use,
    read_record,
    require_written_out,
    settle,
)
from tokenmill.weights.packed_sums import SUFFIX, remove_sums

HEAD_BYTES = 1 << 20
PIECE_BYTES = 16 << 10
NUM_PIECES = 64


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    path: str  # not part of the identity
    num_bytes: int
    changed_ns: int
    content: str  # digest of the samples

    @property
    def key(self) -> tuple[int, int, str]:
        return self.num_bytes, self.changed_ns, self.content


def identity(path: Path) -> FileIdentity:
    resolved = path.resolve()
    with resolved.open("rb") as file:
        found = os.fstat(file.fileno())
        digest = hashlib.sha256()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead behind the samples
        for start, length in samples(found.st_size):
            file.seek(start)
            digest.update(file.read(length))
    return FileIdentity(str(resolved), found.st_size, found.st_mtime_ns, digest.hexdigest())


def samples(num_bytes: int) -> list[tuple[int, int]]:
    """Return (start, length) of the parts of a file that are hashed."""
    last = max(0, num_bytes - PIECE_BYTES)
    return [(0, HEAD_BYTES), *((last * piece // NUM_PIECES, PIECE_BYTES) for piece in range(1, NUM_PIECES + 1))]


MIN_SOURCE_BYTES = 200_000_000  # smaller checkpoints are packed in a tenth of a second and not cached
MAX_TOTAL_BYTES = 64 << 30
MAX_DISK_SHARE = 0.5  # maximum share of the free disk space that a new file may take
ABANDONED_S = 3600.0  # a temporary file of this age is deleted

log = logging.getLogger(__name__)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Cache key: everything that packed bytes depend on."""

    files: list[FileIdentity]
    version: str
    layout: str  # digest of the kernels' own packing
    recipe: str  # digest of how tensors are assembled, and of what is quantised

    @property
    def digest(self) -> str:
        parts = ([file.key for file in self.files], self.version, self.layout, self.recipe)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def source_of(files: Sequence[Path], layout: str, recipe: str) -> Source:
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    return Source(files=[identity(file) for file in files], version=VERSION, layout=layout, recipe=digest)


class PackedCache:
    """Packed matrices by name: read from a complete file, written to a new one, or neither."""

    def __init__(self, reading: PackedFile | None = None, writing: PackedWriter | None = None) -> None:
        self._reading, self._writing = reading, writing

    @property
    def is_hit(self) -> bool:
        return self._reading is not None

    def find(self, name: str) -> tuple[FileSection, Bytes] | None:
        return None if self._reading is None else self._reading.find(name)

    def reserve(self, name: str, kind: str, rows: int, cols: int, count: int, num_bytes: int) -> Bytes | None:
        if self._writing is None:
            return None
        try:
            return self._writing.reserve(name, kind, rows, cols, count, num_bytes)
        except OSError as problem:  # a full disk: memory already mapped remains usable, the rest is packed in memory
            log.warning("packed weights are not cached: %s", problem.strerror or problem)
            self._give_up()
            return None

    def finish(self) -> threading.Thread | None:
        """Publish the file of packed weights for later starts. Syncing it to disk takes seconds in a background thread;
        the next start continues it if this process ends first."""
        try:
            if self._writing is not None:
                self._writing.finish()
        except OSError as problem:
            log.warning("packed weights are not cached: %s", problem.strerror or problem)
            self._give_up()
        unsettled = self._writing or self._reading
        self._writing = None
        if unsettled is None or unsettled.is_settled:
            return None
        settling = threading.Thread(target=_settle, args=(unsettled.path,), name="packed-weights", daemon=True)
        settling.start()
        return settling

    def _give_up(self) -> None:
        if self._writing is not None:
            self._writing.abandon()
            self._writing = None


def is_worth_keeping(files: Sequence[Path]) -> bool:
    return sum(file.stat().st_size for file in files) >= MIN_SOURCE_BYTES


def open_cache(source: Source, folder: Path | None = None) -> PackedCache:
    """Open the cached file of this source; otherwise a new file, if there is room for one."""
    folder = folder or packed_folder()
    path = folder / source.digest
    if path.exists():
        try:
            found = PackedFile(path)
            with suppress(OSError):
                note_use(path)
            return PackedCache(reading=found)
        except Unusable as problem:
            log.warning("packed weights %s are discarded and packed again: %s", path, problem)
    return PackedCache(writing=_new_file(path, source))


def packed_folder() -> Path:
    return store_root() / "packed"


def _new_file(path: Path, source: Source) -> PackedWriter | None:
    needed = sum(file.num_bytes for file in source.files)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.chmod(path.parent, 0o700)
        prune(path.parent, keep_bytes=max(0, MAX_TOTAL_BYTES - needed))
        if needed > MAX_DISK_SHARE * shutil.disk_usage(path.parent).free:
            return None
        return PackedWriter(path, msgspec.json.encode(source).decode())
    except OSError as problem:  # the store is not writable, or another process is writing the same file
        log.info("packed weights are not cached: %s", problem.strerror or problem)
        return None


def _settle(path: Path) -> None:
    with suppress(OSError):  # removed meanwhile, or a disk error: the file is packed again after the next boot
        settle(path)


# ── pruning ────────────────────────────────────────────────────────────────────────────────────────────


def prune(folder: Path | None = None, keep_bytes: int = MAX_TOTAL_BYTES) -> int:
    """Delete files that are no longer usable, then the least recently used until the rest fits; return the bytes
    freed."""
    folder = folder or packed_folder()
    freed = 0
    kept: list[tuple[float, int, Path]] = []
    for path in folder.glob("*") if folder.is_dir() else ():
        with suppress(OSError):
            if path.suffix == SUFFIX:
                continue
            found = path.stat()
            if _is_stale(path, found):
                freed += _remove(path, found.st_size)
            else:
                kept.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= keep_bytes:
            break
        total -= size
        freed += _remove(path, size)
    for path in folder.glob("*" + SUFFIX):
        if not path.with_suffix("").exists():
            remove_sums(path.with_suffix(""))
    return freed


def _is_stale(path: Path, found: os.stat_result) -> bool:
    if path.suffix == ".tmp":
        return time.time() - found.st_mtime > ABANDONED_S
    try:
        with path.open("rb") as file:
            record = read_record(file)
        require_written_out(record, found.st_mode)
        source = msgspec.json.decode(record.source, type=Source)
        return source.version != VERSION or any(identity(Path(f.path)) != f for f in source.files)
    except (Unusable, OSError, msgspec.DecodeError):
        return True


def _remove(path: Path, size: int) -> int:
    try:
        path.unlink()
    except OSError:
        return 0
    return size
