"""Shared memory for a KV pool that another process of this machine maps too.

Ranks in processes put their parts of the pool into anonymous files, whose descriptors their core has too. So the core
can read and write the blocks of all ranks itself (`ranked_records.py`), without involving the ranks. The memory is
freed with the last process that has it mapped.
"""

from __future__ import annotations

import mmap
import os

import numpy as np


class PoolMemory:
    """Allocates consecutive pieces of a file. All processes that map it must allocate the same sizes in the same
    order."""

    def __init__(self, descriptor: int, *, is_owner: bool) -> None:
        """`is_owner`: the file grows with each allocation; otherwise its owner has already allocated everything."""
        self._descriptor = descriptor
        self._is_owner = is_owner
        self._end = 0

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return the next piece, initially zero."""
        start, pages = self._end, -(-num_bytes // mmap.PAGESIZE)
        self._end += pages * mmap.PAGESIZE
        if self._is_owner:
            os.ftruncate(self._descriptor, self._end)
        mapped = mmap.mmap(self._descriptor, pages * mmap.PAGESIZE, offset=start)
        return np.frombuffer(mapped, dtype=np.uint8, count=num_bytes)


def pool_file() -> int:
    """Create an anonymous file for one rank's part of the pool; return its descriptor."""
    return os.memfd_create("tokenmill-kv", os.MFD_CLOEXEC)
