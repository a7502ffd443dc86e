"""Identity of a checkpoint file without reading all of it: size, modification time, samples of its content.

    |████░░░░█░░░░░░█░░░░░░█░░░░░░█░░░░░░██|      █ hashed: the first part (all of a GGUF header that differs between
                                                    quantisations), 64 pieces spread evenly, the end

The path does not matter: a file that was moved, or copied with its times, is the same file. A file that was overwritten
differs in its content even if size and time were restored.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

HEAD_BYTES = 1 << 20
PIECE_BYTES = 16 << 10
NUM_PIECES = 64


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    path: str  # not part of the identity
    num_bytes: int
    changed_ns: int
    content: str  # digest of the samples

    @property
    def what(self) -> tuple[int, int, str]:
        return self.num_bytes, self.changed_ns, self.content


def identity(path: Path) -> FileIdentity:
    place = path.resolve()
    with place.open("rb") as file:
        found = os.fstat(file.fileno())
        digest = hashlib.sha256()
        for start, length in samples(found.st_size):
            file.seek(start)
            digest.update(file.read(length))
    return FileIdentity(str(place), found.st_size, found.st_mtime_ns, digest.hexdigest())


def samples(num_bytes: int) -> list[tuple[int, int]]:
    """Return start and length of the parts of a file that are hashed."""
    last = max(0, num_bytes - PIECE_BYTES)
    return [(0, HEAD_BYTES), *((last * piece // NUM_PIECES, PIECE_BYTES) for piece in range(1, NUM_PIECES + 1))]
