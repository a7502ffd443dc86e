"""Control of the pages of a mapped file that are read.

By default the system reads ahead, on some disks by megabytes. That is right if the whole file is needed, but far too
much for a rank that needs only some rows of each matrix.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch


def read_no_page_ahead(mapped: torch.Tensor) -> None:
    """Turn off read-ahead for this mapped memory: only pages that are accessed or fetched are read."""
    _advise(mapped, mmap.MADV_RANDOM)


def fetch(part: torch.Tensor) -> None:
    """Read a part of a mapped file in large pieces, rather than page by page on access."""
    if part.is_contiguous():
        _advise(part, mmap.MADV_WILLNEED)
    elif part.dim() > 1 and part.stride(-1) == 1:
        for one in part:
            fetch(one)
    elif part.dim() > 1 and part.stride(-2) == 1:  # a transposed view: the file's rows are its columns
        fetch(part.transpose(-1, -2))
    # other layouts are read on access


def _advise(part: torch.Tensor, advice: int) -> None:
    if part.numel() == 0:
        return
    start, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(first, end - first, advice)  # only a hint: a failure is harmless


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc
