"""Digests of a packed file, beside it: a byte that changed on the disk is noticed before it is computed with.

    <digest>          packed weights
    <digest>.sums     SHA-256 of each 32 MiB of them, and when they were last found right: boot of the machine, and the
                      file's modification time then

To digest a file takes as long as to read it, so a file is checked by the first start after each boot, and again when it
was written to; other starts believe the note. `tokenmill verify` checks in any case. Pieces are digested by all cores.
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
    """SHA-256 of each piece of a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        whole = memoryview(content)

        def digest(start: int) -> str:
            with whole[start : start + PIECE_BYTES] as piece:
                return hashlib.sha256(piece).hexdigest()

        with whole, ThreadPoolExecutor(max(1, os.cpu_count() or 1), "packed-sums") as pool:
            return list(pool.map(digest, range(0, len(content), PIECE_BYTES)))


def read_sums(path: Path) -> PackedSums | None:
    """Read the checksums noted beside a file; None where there are none that can be read."""
    try:
        return msgspec.json.decode(sums_path(path).read_bytes(), type=PackedSums)
    except (OSError, msgspec.DecodeError):
        return None


def write_sums(path: Path, pieces: list[str], boot: str) -> None:
    """Note that a file was found right, as it is now."""
    sums = PackedSums(pieces, boot, path.stat().st_mtime_ns)
    aside = sums_path(path).with_name(f"{path.name}{SUFFIX}.{os.getpid()}.tmp")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(sums))
    os.replace(aside, sums_path(path))


def remove_sums(path: Path) -> None:
    with suppress(OSError):
        sums_path(path).unlink()
