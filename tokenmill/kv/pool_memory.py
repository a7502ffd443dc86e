"""Memory of a KV pool that another process of this machine maps too.

Ranks that are processes keep their parts of the pool in files without names, whose descriptors their core has as well.
So a core reads and writes blocks of all ranks itself (`ranked_records.py`), and no rank has to take part in it. The
memory is freed with the last process that has it mapped.
"""

from __future__ import annotations

import mmap
import os

import numpy as np


class PoolMemory:
    """Pieces of a file, one behind the other. All who map it allocate the same sizes in the same order."""

    def __init__(self, descriptor: int, *, is_owner: bool) -> None:
        """`is_owner`: the file grows by what is allocated; else its owner has allocated everything already."""
        self._descriptor = descriptor
        self._is_owner = is_owner
        self._end = 0

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return the next piece, which is zero until somebody writes into it."""
        start, pages = self._end, -(-num_bytes // mmap.PAGESIZE)
        self._end += pages * mmap.PAGESIZE
        if self._is_owner:
            os.ftruncate(self._descriptor, self._end)
        mapped = mmap.mmap(self._descriptor, pages * mmap.PAGESIZE, offset=start)
        return np.frombuffer(mapped, dtype=np.uint8, count=num_bytes)


def pool_file() -> int:
    """Return the descriptor of a file for one rank's part of the pool."""
    return os.memfd_create("tokenmill-kv", os.MFD_CLOEXEC)
