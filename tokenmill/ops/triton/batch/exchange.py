"""All-gather and all-reduce between ranks as one kernel, without involving the hosts.

Each rank has a window: memory that the kernels of all ranks can access (`parallel/device_memory.py`). A program copies
its share of this rank's part to the window, announces that in all windows, waits for the same program of the other
ranks, and copies its share of their parts to the result:

    window    arrivals int64 [NUM_PROGRAMS, MAX_RANKS] | buffer ("room") 0 | buffer 1
    program   own part ─► own buffer ─► announce turn t to all ─► wait for t of all ─► all buffers ─► result

A sum works alike, with all values of each rank in its buffer: they are added while they are read, in rank order, so
that all ranks have the same bits. A rank may sum a range of the values only.

Turns alternate between the two buffers. A rank in turn t has met all others in t - 1, by when they had read the buffers
of t - 2; so one barrier per turn is enough. Each program counts its turns in device memory, so a captured graph needs
no arguments; all launches of a group have the same number of programs. Programs spin while they wait, so all programs
of all ranks on a device must be resident at the same time, and must leave some multiprocessors to the rank that they
wait for: a matrix product may need one.

If a rank has a device to itself, the exchange lets the next kernel be launched early, to fetch its weights during the
exchange (`launch/pdl.py`). If ranks share a device, that kernel would occupy multiprocessors meanwhile.

A wait ends early when the host sets `stopped`; the result is then invalid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

NUM_PROGRAMS = 32  # at most
MOST_WAITING = 48  # programs of the other ranks on a device: fewer than a GPU has multiprocessors
MAX_RANKS = 16
ARRIVAL_BYTES = 8 * NUM_PROGRAMS * MAX_RANKS
POLLS = 1024  # between two reads of `stopped`, which is in host memory
MOST_WORDS = 1024  # per program and iteration, of all ranks together
LEAST_WORDS = 64
SUM_BLOCK = 1024  # values per program and iteration
NO_OVERLAP: dict[str, Any] = {"OVERLAPS": False}
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARRIVAL_BYTES = tl.constexpr(ARRIVAL_BYTES)
_MAX_RANKS = tl.constexpr(MAX_RANKS)


@triton.jit
def _meet(windows, own_window, turn, stopped, program, ranks, is_rank, RANK: tl.constexpr, POLLS: tl.constexpr):
    """Announce a turn to all ranks, and wait until all have announced it to this one."""
    tl.debug_barrier()  # one thread announces the stores of all threads of this program
    announce = (windows + 8 * (program * _MAX_RANKS + RANK)).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(announce, tl.zeros_like(ranks).to(tl.int64) + turn, mask=is_rank, sem="release", scope="sys")
    arrivals = (own_window + 8 * (program * _MAX_RANKS + ranks)).to(tl.pointer_type(tl.int64))
    missing, polls = 1, 0
    while missing > 0:
        seen = tl.load(arrivals, mask=is_rank, other=0, volatile=True)
        missing = tl.sum((is_rank & (seen < turn)).to(tl.int32), axis=0)
        polls += 1
        is_stopped = tl.load(stopped, mask=polls % POLLS == 0, other=0, volatile=True)
        missing = tl.where(is_stopped != 0, 0, missing)
    own = (own_window + 8 * (program * _MAX_RANKS + RANK)).to(tl.pointer_type(tl.int64))
    tl.atomic_add(
        own, tl.zeros((), tl.int64), sem="acquire", scope="sys"
    )  # no later load may be served by stale cached data
    tl.debug_barrier()


@kernel_unspecialized("num_rows", "own_stride", "out_stride", "blocks")
def _exchange(
    own, out, addresses, borders, turns, stopped, num_rows, own_stride, out_stride, blocks, ROOM_BYTES: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    POLLS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    program = tl.program_id(0)
    ranks = tl.arange(0, RANKS)
    is_rank = ranks < SIZE
    turn = tl.load(turns + program) + 1
    windows = tl.load(addresses + ranks, mask=is_rank, other=0)
    own_window = tl.load(addresses + RANK)
    room = _ARRIVAL_BYTES + (turn % 2) * ROOM_BYTES
    own_room = (own_window + room).to(tl.pointer_type(own.dtype.element_ty))
    own_width = tl.load(borders + RANK + 1) - tl.load(borders + RANK)
    for task in range(program, num_rows * blocks, NUM_PROGRAMS):
        row = (task // blocks).to(tl.int64)
        columns = (task % blocks) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(own + row * own_stride + columns, mask=columns < own_width)
        tl.store(own_room + row * own_width + columns, words, mask=columns < own_width)
    _meet(windows, own_window, turn, stopped, program, ranks, is_rank, RANK, POLLS)
    rooms = (windows + room).to(tl.pointer_type(own.dtype.element_ty))
    firsts = tl.load(borders + ranks, mask=is_rank, other=0)
    widths = tl.load(borders + ranks + 1, mask=is_rank, other=0) - firsts
    for task in range(program, num_rows * blocks, NUM_PROGRAMS):
        row = (task // blocks).to(tl.int64)
        columns = (task % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = columns[None, :] < widths[:, None]
        at = rooms[:, None] + row * widths[:, None] + columns[None, :]
        words = tl.load(at, mask=inside, cache_modifier=".cg")
        tl.store(out + row * out_stride + firsts[:, None] + columns[None, :], words, mask=inside)
    tl.store(turns + program, turn)


@kernel_unspecialized("num_values", "first", "count")
def _sum(
    own, out, addresses, turns, stopped, num_values, first, count, ROOM_BYTES: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr, POLLS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum `count` values over all ranks, from `first * BLOCK` on; each rank has `num_values`."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    program = tl.program_id(0)
    ranks = tl.arange(0, RANKS)
    is_rank = ranks < SIZE
    turn = tl.load(turns + program) + 1
    windows = tl.load(addresses + ranks, mask=is_rank, other=0)
    own_window = tl.load(addresses + RANK)
    room = _ARRIVAL_BYTES + (turn % 2) * ROOM_BYTES
    own_room = tl.multiple_of((own_window + room).to(tl.pointer_type(own.dtype.element_ty)), 16)
    # A program writes what the same program of other ranks reads: blocks are assigned to programs in the same way.
    for task in range(program, tl.cdiv(num_values, BLOCK), NUM_PROGRAMS):
        values = task * BLOCK + tl.arange(0, BLOCK)
        tl.store(own_room + values, tl.load(own + values, mask=values < num_values), mask=values < num_values)
    _meet(windows, own_window, turn, stopped, program, ranks, is_rank, RANK, POLLS)
    begin = (program - first % NUM_PROGRAMS + NUM_PROGRAMS) % NUM_PROGRAMS
    for task in range(begin, tl.cdiv(count, BLOCK), NUM_PROGRAMS):
        places = task * BLOCK + tl.arange(0, BLOCK)
        inside = places < count
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(SIZE):
            window = tl.load(addresses + rank)
            theirs = tl.multiple_of((window + room).to(tl.pointer_type(own.dtype.element_ty)), 16)
            part = tl.load(theirs + first * BLOCK + places, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)
    tl.store(turns + program, turn)


def num_programs(ranks_of_device: int) -> int:
    """Return the number of programs of an exchange, given the largest number of ranks that share a device."""
    return max(1, min(NUM_PROGRAMS, MOST_WAITING // max(1, ranks_of_device - 1)))


def word_bytes(element_size: int, widths: Sequence[int]) -> int:
    """Return the largest word size that divides all parts; it depends on values that are the same on all ranks."""
    return next(number for number in (8, 4, 2, 1) if all(width * element_size % number == 0 for width in widths))


def in_words(x: torch.Tensor, number: int) -> torch.Tensor:
    """View a matrix as integers of `number` bytes; copies it if its rows are not aligned to them."""
    size = x.element_size()
    is_aligned = x.stride(-1) == 1 and x.data_ptr() % number == 0 and x.stride(0) * size % number == 0
    return (x if is_aligned else x.contiguous()).view(WORDS[number])


def exchange(
    own: torch.Tensor, out: torch.Tensor, addresses: torch.Tensor, borders: torch.Tensor, widest: int,
    turns: torch.Tensor, stopped: torch.Tensor, room_bytes: int, rank: int, size: int, *, is_rehearsal: bool = False,
    is_alone: bool = False,
) -> None:  # fmt: skip
    """own [T, this rank's width] → out [T, all widths], both of one integer type.

    addresses      int64 [size], of the windows
    borders        int32 [size + 1], the first column of each rank's part
    widest         width of the widest part
    turns          int64, one per program
    stopped        int32 [1], set by the host to end all waits
    is_rehearsal   only load the kernel: exchange no values
    is_alone       no other rank computes on this device
    """
    ranks = next_power_of_2(size)
    block = min(MOST_WORDS // ranks, max(LEAST_WORDS, next_power_of_2(widest)))
    _exchange[(len(turns),)](
        own, out, addresses, borders, turns, stopped, 0 if is_rehearsal else len(own), own.stride(0), out.stride(0),
        cdiv(widest, block), room_bytes, rank, size, ranks, block, len(turns), POLLS, num_warps=4,
        **(launch_options() if is_alone else NO_OVERLAP),
    )  # fmt: skip


def sum_ranks(
    own: torch.Tensor, out: torch.Tensor, addresses: torch.Tensor, first: int, turns: torch.Tensor,
    stopped: torch.Tensor, room_bytes: int, rank: int, size: int, *, is_rehearsal: bool = False, is_alone: bool = False,
) -> None:  # fmt: skip
    """own [N] of each rank → out: the sums over all ranks of the values from `first` on, a multiple of SUM_BLOCK. The
    other arguments are those of `exchange`."""
    assert first % SUM_BLOCK == 0
    num_values, count = (0, 0) if is_rehearsal else (len(own), len(out))
    _sum[(len(turns),)](
        own, out, addresses, turns, stopped, num_values, first // SUM_BLOCK, count, room_bytes, rank, size,
        next_power_of_2(size), SUM_BLOCK, len(turns), POLLS, num_warps=4,
        **(launch_options() if is_alone else NO_OVERLAP),
    )  # fmt: skip
