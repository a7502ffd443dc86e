"""A rank whose exchange window is host memory, in Triton's interpreter: `... DESCRIPTOR RANK SIZE TASK`.

The windows of all ranks are consecutive parts of a shared file. Tasks: `join` gathers parts of several shapes; `sum`
adds tensors of several shapes; `stop` ends a wait for ranks that never come.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch

from tokenmill.ops.triton.batch import exchange
from tokenmill.parallel import device
from tokenmill.parallel.device import ARRIVAL_BYTES, DeviceGroup

ROOM_BYTES = 1 << 10  # so that some parts need several exchanges
WINDOW_BYTES = ARRIVAL_BYTES + 2 * ROOM_BYTES
WHOLE_SUM_BYTES, SUM_BLOCK = 1 << 10, 16
NUM_RENDEZVOUS = 9  # so that hosts synchronise before some exchanges only
PROGRAMS = 3  # the interpreter runs programs one after another


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
    """Make a group over a shared file, which begins with the records by which hosts synchronise; these take less
    than a window."""
    shared = mmap.mmap(descriptor, 0)
    windows = [HostWindow(shared, (1 + number) * WINDOW_BYTES) for number in range(size)]
    rendezvous = partial(device.rendezvous_over_file, descriptor)
    return DeviceGroup(rank, size, torch.device("cpu"), lambda _group: windows, rendezvous, ranks_of_device=size)


def join_parts(group: DeviceGroup) -> None:
    torch.manual_seed(0)
    size = group.size
    for num_rows, widths, dtype in [
        (3, [5] * size, torch.float32),
        (4, [64 + 16 * rank for rank in range(size)], torch.bfloat16),  # uneven
        (7, [3 + rank for rank in range(size)], torch.bfloat16),  # elements of two bytes
        (40, [16] * size, torch.float32),  # more than ROOM_BYTES
        (1, [24] * size, torch.float16),
        (1, [1] * size, torch.uint8),
    ] * 2:
        whole = (torch.randn(num_rows, sum(widths)) * 99).to(dtype)
        own = torch.split(whole, widths, dim=-1)[group.rank]  # rows that are not contiguous
        assert torch.equal(group.join(own, widths), whole), (num_rows, widths)
        assert all(map(torch.equal, group.all_gather(own, widths), torch.split(whole, widths, dim=-1)))


def sum_numbers(group: DeviceGroup) -> None:
    torch.manual_seed(0)
    for shape, dtype in [
        ((3, 5), torch.float32),
        ((4, 64), torch.float16),
        ((7, 33), torch.float16),  # more than each rank adds on its own
        ((40, 16), torch.float32),  # more than ROOM_BYTES
        ((1, 8), torch.float32),  # less than a block for each rank
    ] * 2:
        each = [(torch.randn(shape) * 9).to(dtype) for _ in range(group.size)]
        wide = torch.cat((each[group.rank], each[0]), dim=-1)
        found = group.sum(wide[:, : shape[1]])  # rows that are not contiguous
        expected = torch.zeros(shape)
        for part in each:
            expected = expected + part
        assert torch.equal(found, expected.to(dtype)), (shape, dtype)
        assert torch.equal(group.join(each[group.rank], [shape[1]] * group.size), torch.cat(each, dim=-1))


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
        patch.object(device, "NUM_RENDEZVOUS", 0 if sys.argv[4] == "stop" else NUM_RENDEZVOUS),
        patch.object(device, "WHOLE_SUM_BYTES", WHOLE_SUM_BYTES),
        patch.object(device, "SUM_BLOCK", SUM_BLOCK),
        patch.object(exchange, "SUM_BLOCK", SUM_BLOCK),
    ):
        {"join": join_parts, "sum": sum_numbers, "stop": stop_waiting}[sys.argv[4]](group_over(descriptor, rank, size))


if __name__ == "__main__":
    main()
