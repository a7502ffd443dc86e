"""Ranks of one host that exchange through shared memory: processes that map an anonymous file, or threads.

The native decoder exchanges within a step, without calling Python (`csrc/window.h`); this group exchanges tensors
through the same windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenmill.errors import PeerDied
from tokenmill.ops.cpu.availability import native
from tokenmill.parallel.group import BaseGroup

ROOM_BYTES = 1 << 22  # size of each of a rank's two buffers; larger parts take several exchanges


class SharedGroup(BaseGroup):
    def __init__(self, window: Any) -> None:
        """`window`: a window of the native module."""
        self.window = window
        self.rank: int = window.rank
        self._size: int = window.size

    @property
    def size(self) -> int:
        return self._size

    @classmethod
    def in_threads(cls, size: int) -> list[SharedGroup]:
        """Make the groups of all ranks, one per thread."""
        return [cls(window) for window in native().thread_windows(size, ROOM_BYTES)]

    @classmethod
    def over_file(cls, descriptor: int, rank: int, size: int) -> SharedGroup:
        """Make the group of a rank that is a process, over a file of `file_bytes` zeros that all ranks have open."""
        return cls(native().mapped_window(descriptor, rank, size, ROOM_BYTES))

    @staticmethod
    def file_bytes(size: int) -> int:
        return int(native().window_bytes(size, ROOM_BYTES))

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        part_bytes = [len(x) * width * x.element_size() for width in widths]
        out = torch.empty(sum(part_bytes), dtype=torch.uint8)
        try:
            self.window.all_gather(x.contiguous().view(-1).view(torch.uint8).numpy(), out.numpy(), part_bytes)
        except RuntimeError as error:
            raise PeerDied(str(error)) from None
        parts = torch.split(out, part_bytes)
        return [part.view(x.dtype).view(len(x), width) for part, width in zip(parts, widths, strict=True)]

    @property
    def is_aborted(self) -> bool:
        return bool(self.window.is_aborted)

    def abort(self) -> None:
        self.window.abort()

    def close(self) -> None:
        pass
