"""Ranks with a GPU each, or several on one, whose kernels reach each other's memory: an exchange is one kernel.

Each rank has a window of its own and maps those of the others (`device_memory.py`); they find each other's handles in
a small file that all of them have open. The kernel (`ops/triton/batch/exchange.py`) meets the other ranks by itself, so
captured graphs hold exchanges like any other kernels.

A kernel that waits for another rank keeps its device busy. Where ranks share a device, the driver may let no rank load
a kernel then, so the rank that is waited for would never come. The first exchanges, in whose steps kernels are loaded,
are therefore launched when the hosts of all ranks have come as far, and their kernels are loaded by then.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from tokenmill.errors import PeerDied
from tokenmill.ops.triton.batch.exchange import (
    ARRIVAL_BYTES,
    MAX_RANKS,
    SUM_BLOCK,
    exchange,
    in_words,
    num_programs,
    sum_ranks,
    word_bytes,
)
from tokenmill.ops.triton.launch.kernel import is_asking
from tokenmill.parallel.device_memory import HANDLE_BYTES, MappedMemory, SharedMemory

ROOM_BYTES = 1 << 23  # for a rank's part, in each of two rooms: larger parts take several exchanges
WHOLE_SUM_BYTES = 1 << 19  # of all ranks' numbers, up to which each rank adds up all of them itself
WINDOW_BYTES = ARRIVAL_BYTES + 2 * ROOM_BYTES
CONNECT_LIMIT_S = 600.0  # the slowest rank's load
CONNECT_CHECK_S = 0.002
MEETINGS = 2048  # exchanges before which hosts meet; those in captured graphs do not count
MEETING_CHECK_S = 0.0001
COUNT = struct.Struct("<q")
RECORD_BYTES = HANDLE_BYTES + 8  # then: 1 when the handle is there, and by one more for each meeting


class Window(Protocol):
    """Memory that kernels of this rank's device can reach."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class Launch(Protocol):
    def __call__(self, stopped: torch.Tensor, *, is_rehearsal: bool) -> None: ...


OpenWindows = Callable[["DeviceGroup"], Sequence[Window]]
"""Make this rank's window and map the others': one for each rank, in order."""
Meet = Callable[["DeviceGroup", int], None]
"""Wait until all ranks have come to the meeting of this number, from 1 on."""


class DeviceGroup:
    def __init__(
        self, rank: int, size: int, device: torch.device, open_windows: OpenWindows, meet: Meet | None = None,
        *, ranks_of_device: int = 1,
    ) -> None:  # fmt: skip
        """`open_windows` is called at the first exchange, in which all ranks take part; `meet` before each of the first
        ones; `ranks_of_device`: that share one at most, the same number for all ranks."""
        assert size <= MAX_RANKS
        self.rank = rank
        self.size = size
        self._device = device
        self._open_windows = open_windows
        self._windows: Sequence[Window] = ()
        self._addresses = torch.zeros(size, dtype=torch.int64, device=device)
        self._turns = torch.zeros(num_programs(ranks_of_device), dtype=torch.int64, device=device)
        self._stopped = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._borders: dict[tuple[int, ...], torch.Tensor] = {}  # made in steps that no graph captures
        self._always_stopped = torch.ones(1, dtype=torch.int32, device=device)
        self._meet = meet
        self._is_alone = ranks_of_device == 1
        self._num_met = 0

    @classmethod
    def over_file(
        cls, descriptor: int, rank: int, size: int, device: torch.device, *, ranks_of_device: int = 1
    ) -> DeviceGroup:
        """The one of a rank that is a process, over a file of `file_bytes` zeros that all ranks have open."""
        meet = partial(meet_ranks, descriptor) if size > 2 else None  # two have been seen to need no meetings
        return cls(rank, size, device, partial(share_windows, descriptor), meet, ranks_of_device=ranks_of_device)

    @staticmethod
    def file_bytes(size: int) -> int:
        return size * RECORD_BYTES

    @property
    def is_aborted(self) -> bool:
        return bool(self._stopped.numpy()[0])

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]: the parts of all ranks side by side."""
        self._connect()
        total, size = sum(widths), x.element_size()
        out = torch.empty(len(x), total, dtype=x.dtype, device=x.device)
        number = word_bytes(size, widths)
        borders = self._borders_of(tuple(width * size // number for width in widths))
        own, words = in_words(x, number), in_words(out, number)
        most = max(1, ROOM_BYTES // max(1, max(widths) * size))
        assert max(widths) * size <= ROOM_BYTES, "a row of one rank is larger than its room"
        for first in range(0, len(x), most):
            rows = slice(first, first + most)
            launch = partial(
                exchange, own[rows], words[rows], self._addresses, borders, max(widths) * size // number, self._turns,
                room_bytes=ROOM_BYTES, rank=self.rank, size=self.size, is_alone=self._is_alone,
            )  # fmt: skip
            self._launch(launch)
        return out

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.split(self.join(x, widths), list(widths), dim=-1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W] of this rank → the sum of all ranks'. Of few numbers each rank adds up all, in one exchange; of many
        each adds up a share, and a second exchange puts those together: less goes through each rank."""
        self._connect()
        own = x.contiguous().view(-1)
        out = torch.empty_like(own)
        most = ROOM_BYTES // x.element_size() // SUM_BLOCK * SUM_BLOCK
        for first in range(0, len(own), most):
            self._sum(own[first : first + most], out[first : first + most])
        return out.view(x.shape)

    def _sum(self, own: torch.Tensor, out: torch.Tensor) -> None:
        if self.size == 2 or self.size * own.nbytes <= WHOLE_SUM_BYTES:
            self._sum_part(own, 0, out)
            return
        blocks = -(-len(own) // SUM_BLOCK)
        ends = [min(len(own), blocks * rank // self.size * SUM_BLOCK) for rank in range(self.size + 1)]
        widths = [end - start for start, end in pairwise(ends)]
        part = torch.empty(1, widths[self.rank], dtype=own.dtype, device=own.device)
        self._sum_part(own, ends[self.rank], part[0])
        out.copy_(self.join(part, widths)[0])

    def _sum_part(self, own: torch.Tensor, first: int, out: torch.Tensor) -> None:
        launch = partial(
            sum_ranks, own, out, self._addresses, first, self._turns,
            room_bytes=ROOM_BYTES, rank=self.rank, size=self.size, is_alone=self._is_alone,
        )  # fmt: skip
        self._launch(launch)

    def _launch(self, launch: Launch) -> None:
        """Launch an exchange; one of the first when all ranks are about to, with nothing left to be loaded."""
        if self._meet is None or self._num_met == MEETINGS or is_asking() or self._is_capturing():
            launch(self._stopped, is_rehearsal=False)
            return
        launch(self._always_stopped, is_rehearsal=True)
        self._synchronize()
        self._num_met += 1
        self._meet(self, self._num_met)
        launch(self._stopped, is_rehearsal=False)
        self._synchronize()

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _connect(self) -> None:
        if not self._windows and not is_asking():
            self._windows = self._open_windows(self)
            self._addresses.copy_(torch.tensor([window.address for window in self._windows]))

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


def share_windows(descriptor: int, group: DeviceGroup) -> list[Window]:
    """Make this rank's window, tell the others of it, and map theirs."""
    torch.cuda.synchronize()  # which also makes the device's context this thread's, for the driver's calls
    own = SharedMemory(WINDOW_BYTES)
    os.pwrite(descriptor, own.handle() + COUNT.pack(1), group.rank * RECORD_BYTES)
    handles = [wait_for_handle(group, descriptor, rank) for rank in range(group.size)]
    return [own if rank == group.rank else MappedMemory(handle) for rank, handle in enumerate(handles)]


def wait_for_handle(group: DeviceGroup, descriptor: int, rank: int) -> bytes:
    return wait_for_record(group, descriptor, rank, 1, CONNECT_CHECK_S)[:HANDLE_BYTES]


def meet_ranks(descriptor: int, group: DeviceGroup, number: int) -> None:
    """Wait until all ranks have come to their meeting of this number, from 1 on."""
    os.pwrite(descriptor, COUNT.pack(1 + number), group.rank * RECORD_BYTES + HANDLE_BYTES)
    for rank in range(group.size):
        wait_for_record(group, descriptor, rank, 1 + number, MEETING_CHECK_S)


def wait_for_record(group: DeviceGroup, descriptor: int, rank: int, count: int, check_s: float) -> bytes:
    """Another rank's record, once it counts so many."""
    until_s = time.monotonic() + CONNECT_LIMIT_S
    while time.monotonic() < until_s and not group.is_aborted:
        record = os.pread(descriptor, RECORD_BYTES, rank * RECORD_BYTES)
        if COUNT.unpack_from(record, HANDLE_BYTES)[0] >= count:
            return record
        time.sleep(check_s)
    raise PeerDied(f"rank {rank} has ended, or does not answer")
