"""Checksums of a packed file, stored beside it, so that corruption on disk is detected before the weights are used.

    <digest>          packed weights
    <digest>.sums     SHA-256 of each 32 MiB of them, and when they were last verified: the machine's boot id and the
                      file's modification time

Hashing a file takes as long as reading it. So it is verified by the first start after each boot, and again if its
modification time changed; other starts trust that record. `tokenmill verify` always checks. All cores hash in parallel.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

PIECE_BYTES = 32 << 20
SUFFIX = ".sums"


class PackedSums(msgspec.Struct, frozen=True):
    pieces: list[str]
    boot: str
    changed_ns: int


def sums_path(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def digests(path: Path) -> list[str]:
    """Return the SHA-256 of each piece of a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        whole = memoryview(content)

        def digest(start: int) -> str:
            with whole[start : start + PIECE_BYTES] as piece:
                return hashlib.sha256(piece).hexdigest()

        with whole, ThreadPoolExecutor(max(1, os.cpu_count() or 1), "packed-sums") as pool:
            return list(pool.map(digest, range(0, len(content), PIECE_BYTES)))


def read_sums(path: Path) -> PackedSums | None:
    """Read a file's checksums; None if they are missing or invalid."""
    try:
        return msgspec.json.decode(sums_path(path).read_bytes(), type=PackedSums)
    except (OSError, msgspec.DecodeError):
        return None


def write_sums(path: Path, pieces: list[str], boot: str) -> None:
    """Record that a file was verified in its present state."""
    sums = PackedSums(pieces, boot, path.stat().st_mtime_ns)
    aside = sums_path(path).with_name(f"{path.name}{SUFFIX}.{os.getpid()}.tmp")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(sums))
    os.replace(aside, sums_path(path))


def remove_sums(path: Path) -> None:
    with suppress(OSError):
        sums_path(path).unlink()
