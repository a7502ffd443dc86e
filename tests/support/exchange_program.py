"""A rank whose window is memory of the host, in Triton's interpreter: `... DESCRIPTOR RANK SIZE TASK`.

The windows of all ranks lie one behind the other in a file that they share. Tasks: `join`, parts of several shapes come
together; `stop`, a wait for ranks that never come is ended.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from dataclasses import dataclass
from unittest.mock import patch

import torch

from tokenmill.ops.triton.batch import exchange
from tokenmill.parallel import device
from tokenmill.parallel.device import ARRIVAL_BYTES, DeviceGroup

ROOM_BYTES = 1 << 10  # so that some parts need several exchanges
WINDOW_BYTES = ARRIVAL_BYTES + 2 * ROOM_BYTES
PROGRAMS = 3  # the interpreter runs one after the other


@dataclass(frozen=True)
class HostWindow:
    shared: mmap.mmap
    offset: int

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.shared)) + self.offset

    def close(self) -> None:
        pass


def group_over(descriptor: int, rank: int, size: int) -> DeviceGroup:
    shared = mmap.mmap(descriptor, 0)
    windows = [HostWindow(shared, number * WINDOW_BYTES) for number in range(size)]
    return DeviceGroup(rank, size, torch.device("cpu"), lambda _group: windows)


def join_parts(group: DeviceGroup) -> None:
    torch.manual_seed(0)
    size = group.size
    for num_rows, widths, dtype in [
        (3, [5] * size, torch.float32),
        (4, [64 + 16 * rank for rank in range(size)], torch.bfloat16),  # uneven
        (7, [3 + rank for rank in range(size)], torch.bfloat16),  # words of two bytes
        (40, [16] * size, torch.float32),  # more than a room
        (1, [24] * size, torch.float16),
        (1, [1] * size, torch.uint8),
    ] * 2:
        whole = (torch.randn(num_rows, sum(widths)) * 99).to(dtype)
        own = torch.split(whole, widths, dim=-1)[group.rank]  # rows that do not lie behind each other
        assert torch.equal(group.join(own, widths), whole), (num_rows, widths)
        assert all(map(torch.equal, group.all_gather(own, widths), torch.split(whole, widths, dim=-1)))


def stop_waiting(group: DeviceGroup) -> None:
    threading.Timer(0.2, group.abort).start()
    group.join(torch.zeros(1, 8), [8] * group.size)
    assert group.is_aborted


def main() -> None:
    descriptor, rank, size = map(int, sys.argv[1:4])
    with (
        patch.object(exchange, "NUM_PROGRAMS", PROGRAMS),
        patch.object(exchange, "POLLS", 8),
        patch.object(device, "ROOM_BYTES", ROOM_BYTES),
    ):
        {"join": join_parts, "stop": stop_waiting}[sys.argv[4]](group_over(descriptor, rank, size))


if __name__ == "__main__":
    main()
