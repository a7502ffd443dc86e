"""The pages of a mapped file that are read. By itself the system reads ahead of what is touched, by megabytes where a
disk is set so: right for who needs all of a file, far too much for a rank that needs some rows of each matrix.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch


def read_no_page_ahead(mapped: torch.Tensor) -> None:
    """Turn off read-ahead for this mapped memory: only pages that are touched or fetched are read."""
    _advise(mapped, mmap.MADV_RANDOM)


def fetch(part: torch.Tensor) -> None:
    """Read a part of a mapped file in large pieces, rather than page by page when it is touched."""
    if part.is_contiguous():
        _advise(part, mmap.MADV_WILLNEED)
    elif part.dim() > 1 and part.stride(-1) == 1:
        for one in part:
            fetch(one)
    elif part.dim() > 1 and part.stride(-2) == 1:  # columns of what the file has: they lie on all of its pages
        fetch(part.transpose(-1, -2))
    # others are read when they are touched


def _advise(part: torch.Tensor, advice: int) -> None:
    if part.numel() == 0:
        return
    start, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(first, end - first, advice)  # where it is refused, pages are read as they were


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc
