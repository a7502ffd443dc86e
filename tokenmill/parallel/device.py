"""Collectives between GPU ranks whose kernels access each other's memory (CUDA IPC): an exchange is one kernel.

Each rank allocates a window and maps those of the others (`device_memory.py`); the ranks publish their IPC handles in a
small file that all of them have open. The kernel (`ops/triton/batch/exchange.py`) synchronises with the other ranks by
itself, so graphs capture exchanges like any other kernels.

A kernel that waits for another rank keeps its device busy. If ranks share a device, the driver may load no kernels
meanwhile, and a rank that has yet to load one would deadlock the others. So before each of the first exchanges, while
steps still load kernels, the hosts of all ranks load the exchange's kernel and wait for each other (a rendezvous).
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
from tokenmill.ops.triton.launch.kernel import is_recording
from tokenmill.parallel.device_memory import HANDLE_BYTES, MappedMemory, SharedMemory

ROOM_BYTES = 1 << 23  # size of each of a window's two buffers; larger parts take several exchanges
WHOLE_SUM_BYTES = 1 << 19  # up to this many bytes over all ranks, each rank adds up everything itself
WINDOW_BYTES = ARRIVAL_BYTES + 2 * ROOM_BYTES
CONNECT_TIMEOUT_S = 600.0  # ranks may take this long to load their weights
CONNECT_POLL_S = 0.002
NUM_RENDEZVOUS = 2048  # exchanges that are preceded by a rendezvous of the hosts; captured graphs do not count
RENDEZVOUS_POLL_S = 0.0001
COUNT = struct.Struct("<q")
RECORD_BYTES = HANDLE_BYTES + 8  # handle, then a counter: 1 once the handle is written, plus 1 per rendezvous


class Window(Protocol):
    """Memory that kernels of this rank's device can access."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class Launch(Protocol):
    def __call__(self, stopped: torch.Tensor, *, is_rehearsal: bool) -> None: ...


OpenWindows = Callable[["DeviceGroup"], Sequence[Window]]
"""Allocate this rank's window and map the others'; returns one per rank, in rank order."""
Rendezvous = Callable[["DeviceGroup", int], None]
"""Wait until the hosts of all ranks have reached the rendezvous of this number, counted from 1."""


class DeviceGroup:
    def __init__(
        self, rank: int, size: int, device: torch.device, open_windows: OpenWindows,
        rendezvous: Rendezvous | None = None, *, ranks_of_device: int = 1,
    ) -> None:  # fmt: skip
        """`open_windows` is called at the first exchange, `rendezvous` before each of the first `NUM_RENDEZVOUS`.
        `ranks_of_device`: the largest number of ranks that share a device; the same value on all ranks."""
        assert size <= MAX_RANKS
        self.rank = rank
        self.size = size
        self._device = device
        self._open_windows = open_windows
        self._windows: Sequence[Window] = ()
        self._addresses = torch.zeros(size, dtype=torch.int64, device=device)
        self._turns = torch.zeros(num_programs(ranks_of_device), dtype=torch.int64, device=device)
        self._stopped = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._borders: dict[tuple[int, ...], torch.Tensor] = {}  # created by eager steps, before graphs are captured
        self._always_stopped = torch.ones(1, dtype=torch.int32, device=device)
        self._rendezvous = rendezvous
        self._is_alone = ranks_of_device == 1
        self._num_rendezvous = 0

    @classmethod
    def over_file(
        cls, descriptor: int, rank: int, size: int, device: torch.device, *, ranks_of_device: int = 1
    ) -> DeviceGroup:
        """Make the group of a rank that is a process, over a file of `file_bytes` zeros that all ranks have open."""
        rendezvous = partial(rendezvous_over_file, descriptor) if size > 2 else None
        return cls(rank, size, device, partial(share_windows, descriptor), rendezvous, ranks_of_device=ranks_of_device)

    @staticmethod
    def file_bytes(size: int) -> int:
        return size * RECORD_BYTES

    @property
    def is_aborted(self) -> bool:
        return bool(self._stopped.numpy()[0])

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]: the parts of all ranks, concatenated."""
        self._connect()
        total, size = sum(widths), x.element_size()
        out = torch.empty(len(x), total, dtype=x.dtype, device=x.device)
        number = word_bytes(size, widths)
        borders = self._borders_of(tuple(width * size // number for width in widths))
        own, words = in_words(x, number), in_words(out, number)
        max_rows = max(1, ROOM_BYTES // max(1, max(widths) * size))
        assert max(widths) * size <= ROOM_BYTES, "a row of one rank is larger than an exchange buffer"
        for first in range(0, len(x), max_rows):
            rows = slice(first, first + max_rows)
            launch = partial(
                exchange, own[rows], words[rows], self._addresses, borders, max(widths) * size // number, self._turns,
                room_bytes=ROOM_BYTES, rank=self.rank, size=self.size, is_alone=self._is_alone,
            )  # fmt: skip
            self._launch(launch)
        return out

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.split(self.join(x, widths), list(widths), dim=-1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W] of this rank → the sum over all ranks.

        For small tensors every rank adds up all values, in one exchange. For large ones every rank adds up a share
        (reduce-scatter) and a second exchange gathers the shares (all-gather), which transfers less data.
        """
        self._connect()
        own = x.contiguous().view(-1)
        out = torch.empty_like(own)
        max_values = ROOM_BYTES // x.element_size() // SUM_BLOCK * SUM_BLOCK
        for first in range(0, len(own), max_values):
            self._sum(own[first : first + max_values], out[first : first + max_values])
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
        """Launch an exchange; one of the first only after all ranks have loaded its kernel and met."""
        if self._rendezvous is None or self._num_rendezvous == NUM_RENDEZVOUS or is_recording() or self._is_capturing():
            launch(self._stopped, is_rehearsal=False)
            return
        launch(self._always_stopped, is_rehearsal=True)
        self._synchronize()
        self._num_rendezvous += 1
        self._rendezvous(self, self._num_rendezvous)
        launch(self._stopped, is_rehearsal=False)
        self._synchronize()

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _connect(self) -> None:
        if not self._windows and not is_recording():
            self._windows = self._open_windows(self)
            self._addresses.copy_(torch.tensor([window.address for window in self._windows]))

    def _borders_of(self, widths: tuple[int, ...]) -> torch.Tensor:
        if widths not in self._borders:
            ends = [sum(widths[:rank]) for rank in range(self.size + 1)]
            self._borders[widths] = torch.tensor(ends, dtype=torch.int32).to(self._device)
        return self._borders[widths]

    def abort(self) -> None:
        """End the waits of this rank's kernels; each other rank must call its own `abort`."""
        self._stopped.numpy()[0] = 1

    def close(self) -> None:
        for window in self._windows:
            window.close()
        self._windows = ()


def share_windows(descriptor: int, group: DeviceGroup) -> list[Window]:
    """Allocate this rank's window, publish its handle, and map the other ranks' windows."""
    torch.cuda.synchronize()  # also makes the CUDA context current in this thread, for the driver API calls below
    own = SharedMemory(WINDOW_BYTES)
    os.pwrite(descriptor, own.handle() + COUNT.pack(1), group.rank * RECORD_BYTES)
    handles = [wait_for_handle(group, descriptor, rank) for rank in range(group.size)]
    return [own if rank == group.rank else MappedMemory(handle) for rank, handle in enumerate(handles)]


def wait_for_handle(group: DeviceGroup, descriptor: int, rank: int) -> bytes:
    return wait_for_record(group, descriptor, rank, 1, CONNECT_POLL_S)[:HANDLE_BYTES]


def rendezvous_over_file(descriptor: int, group: DeviceGroup, number: int) -> None:
    """Wait until all ranks have reached the rendezvous of this number, counted from 1."""
    os.pwrite(descriptor, COUNT.pack(1 + number), group.rank * RECORD_BYTES + HANDLE_BYTES)
    for rank in range(group.size):
        wait_for_record(group, descriptor, rank, 1 + number, RENDEZVOUS_POLL_S)


def wait_for_record(group: DeviceGroup, descriptor: int, rank: int, count: int, poll_s: float) -> bytes:
    """Wait until a rank's counter is at least `count`, and return its record."""
    until_s = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < until_s and not group.is_aborted:
        record = os.pread(descriptor, RECORD_BYTES, rank * RECORD_BYTES)
        if COUNT.unpack_from(record, HANDLE_BYTES)[0] >= count:
            return record
        time.sleep(poll_s)
    raise PeerDied(f"rank {rank} has ended, or does not answer")
