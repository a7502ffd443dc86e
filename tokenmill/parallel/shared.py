"""Ranks of one host over memory that they share: a file without a name that their processes map, or memory of one
process whose threads they are.

The native kernels exchange within a step, without a call of Python (`csrc/window.h`); tensors go the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenmill.errors import PeerDied
from tokenmill.ops.cpu.availability import native
from tokenmill.parallel.joined_parts import JoinedParts

ROOM_BYTES = 1 << 22  # of each rank, twice: larger parts go in several exchanges


class SharedGroup(JoinedParts):
    def __init__(self, window: Any) -> None:
        """`window`: of the native module."""
        self.window = window
        self.rank: int = window.rank
        self._size: int = window.size

    @property
    def size(self) -> int:
        return self._size

    @classmethod
    def in_threads(cls, size: int) -> list[SharedGroup]:
        """Make the groups of all ranks, for threads."""
        return [cls(window) for window in native().thread_windows(size, ROOM_BYTES)]

    @classmethod
    def over_file(cls, descriptor: int, rank: int, size: int) -> SharedGroup:
        """Make the group of a rank that is a process, over a file of `file_bytes` zeros that all ranks have open."""
        return cls(native().mapped_window(descriptor, rank, size, ROOM_BYTES))

    @staticmethod
    def file_bytes(size: int) -> int:
        return int(native().window_bytes(size, ROOM_BYTES))

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        each = [len(x) * width * x.element_size() for width in widths]
        out = torch.empty(sum(each), dtype=torch.uint8)
        try:
            self.window.all_gather(x.contiguous().view(-1).view(torch.uint8).numpy(), out.numpy(), each)
        except RuntimeError as error:
            raise PeerDied(str(error)) from None
        parts = torch.split(out, each)
        return [part.view(x.dtype).view(len(x), width) for part, width in zip(parts, widths, strict=True)]

    @property
    def is_aborted(self) -> bool:
        return bool(self.window.is_aborted)

    def abort(self) -> None:
        self.window.abort()

    def close(self) -> None:
        pass
