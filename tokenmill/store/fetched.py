"""The result of a source (hub, wheel), and its errors.

A source downloads into the model's partial directory, verifies the files, and returns `Fetched`. If it can't provide
the model, it raises `SourceUnavailable` with a one-line message, and the next source is tried. A full disk ends the
pull immediately, because another source needs the same space.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import PullFailed
from tokenmill.store.layout import StoredFile

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Fetched:
    source: str
    files: list[tuple[StoredFile, Path]]


class SourceUnavailable(Exception):
    """A source can't provide the model; the message is one line."""


def is_disk_full(problem: BaseException) -> bool:
    return isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_full(folder: Path, needed_bytes: int) -> PullFailed:
    free = shutil.disk_usage(nearest_existing(folder)).free
    return PullFailed(
        f"no space left on the disk of {folder}: {megabytes(needed_bytes)} needed, {megabytes(free)} free",
        hint="free some space, or set TOKENMILL_HOME to a directory on another disk",
    )


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise PullFailed before the download if the disk has too little space."""
    if shutil.disk_usage(nearest_existing(folder)).free < needed_bytes:
        raise disk_full(folder, needed_bytes)


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes < 10e9 else f"{num_bytes / 1e9:,.1f} GB"


def nearest_existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent, for queries of the disk."""
    while not folder.exists():
        folder = folder.parent
    return folder
