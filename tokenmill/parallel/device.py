"""Ranks with a GPU each, or several on one, whose kernels reach each other's memory: an exchange is one kernel.

Each rank has a window of its own and maps those of the others (`device_memory.py`); they find each other's handles in
a small file that all of them have open. The kernel (`ops/triton/batch/exchange.py`) meets the other ranks by itself, so
captured graphs hold exchanges like any other kernels.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tokenmill.errors import PeerDied
from tokenmill.ops.triton.batch.exchange import ARRIVAL_BYTES, MAX_RANKS, NUM_PROGRAMS, exchange, in_words, word_bytes
from tokenmill.ops.triton.launch.kernel import is_asking
from tokenmill.parallel.device_memory import HANDLE_BYTES, MappedMemory, SharedMemory

ROOM_BYTES = 1 << 23  # of a rank's part, twice: larger ones go in several exchanges
WINDOW_BYTES = ARRIVAL_BYTES + 2 * ROOM_BYTES
CONNECT_LIMIT_S = 600.0  # the slowest rank's load
CONNECT_CHECK_S = 0.002
RECORD_BYTES = HANDLE_BYTES + 1  # the last byte: the handle is there


class Window(Protocol):
    """Memory that kernels of this rank's device can reach."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


OpenWindows = Callable[["DeviceGroup"], Sequence[Window]]
"""Make this rank's window and map the others': one for each rank, in order."""


class DeviceGroup:
    def __init__(self, rank: int, size: int, device: torch.device, open_windows: OpenWindows) -> None:
        """`open_windows` is called at the first exchange, in which all ranks take part."""
        assert size <= MAX_RANKS
        self.rank = rank
        self.size = size
        self._device = device
        self._open_windows = open_windows
        self._windows: Sequence[Window] = ()
        self._addresses = torch.zeros(size, dtype=torch.int64, device=device)
        self._turns = torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._borders: dict[tuple[int, ...], torch.Tensor] = {}  # made in steps that no graph captures

    @classmethod
    def over_file(cls, descriptor: int, rank: int, size: int, device: torch.device) -> DeviceGroup:
        """The one of a rank that is a process, over a file of `file_bytes` zeros that all ranks have open."""
        return cls(rank, size, device, lambda group: share_windows(group, descriptor))

    @staticmethod
    def file_bytes(size: int) -> int:
        return size * RECORD_BYTES

    @property
    def is_aborted(self) -> bool:
        return bool(self._stopped.numpy()[0])

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]: the parts of all ranks side by side."""
        if not self._windows and not is_asking():
            self._windows = self._open_windows(self)
            self._addresses.copy_(torch.tensor([window.address for window in self._windows]))
        total, size = sum(widths), x.element_size()
        out = torch.empty(len(x), total, dtype=x.dtype, device=x.device)
        number = word_bytes(size, widths)
        borders = self._borders_of(tuple(width * size // number for width in widths))
        own, words = in_words(x, number), in_words(out, number)
        most = max(1, ROOM_BYTES // max(1, max(widths) * size))
        assert max(widths) * size <= ROOM_BYTES, "a row of one rank is larger than its room"
        for first in range(0, len(x), most):
            rows = slice(first, first + most)
            exchange(
                own[rows], words[rows], self._addresses, borders, max(widths) * size // number, self._turns,
                self._stopped, ROOM_BYTES, self.rank, self.size,
            )  # fmt: skip
        return out

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.split(self.join(x, widths), list(widths), dim=-1))

    def _borders_of(self, widths: tuple[int, ...]) -> torch.Tensor:
        if widths not in self._borders:
            ends = [sum(widths[:rank]) for rank in range(self.size + 1)]
            self._borders[widths] = torch.tensor(ends, dtype=torch.int32).to(self._device)
        return self._borders[widths]

    def abort(self) -> None:
        """End the waits of this rank's kernels; other ranks' end when theirs is called."""
        self._stopped.numpy()[0] = 1

    def close(self) -> None:
        for window in self._windows:
            window.close()
        self._windows = ()


def share_windows(group: DeviceGroup, descriptor: int) -> list[Window]:
    """Make this rank's window, tell the others of it, and map theirs."""
    torch.cuda.synchronize()  # which also makes the device's context this thread's, for the driver's calls
    own = SharedMemory(WINDOW_BYTES)
    os.pwrite(descriptor, own.handle() + b"\1", group.rank * RECORD_BYTES)
    handles = [wait_for_handle(group, descriptor, rank) for rank in range(group.size)]
    return [own if rank == group.rank else MappedMemory(handle) for rank, handle in enumerate(handles)]


def wait_for_handle(group: DeviceGroup, descriptor: int, rank: int) -> bytes:
    until_s = time.monotonic() + CONNECT_LIMIT_S
    while time.monotonic() < until_s and not group.is_aborted:
        record = os.pread(descriptor, RECORD_BYTES, rank * RECORD_BYTES)
        if record[HANDLE_BYTES]:
            return record[:HANDLE_BYTES]
        threading.Event().wait(CONNECT_CHECK_S)
    raise PeerDied(f"rank {rank} has ended, or does not answer")
