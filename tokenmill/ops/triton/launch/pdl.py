"""Programmatic dependent launch (PDL): a kernel starts while the previous one ends (NVIDIA GPUs from Hopper on).

A participating kernel allows its successor to be launched at its own start (`launch_dependents`), and waits
(`wait_for_previous`) before it reads anything that earlier kernels wrote. Other data, above all weights, it may load
before that.

Programs of one kernel that share a result, as in split-K, count their arrivals; the last one adds up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_SPLIT_COUNTERS = 8192
# About ten seconds: only a mistake makes a program wait for longer than some microseconds.
MAX_POLLS = tl.constexpr(15_000_000)


@triton.jit
def launch_dependents(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_wait()


@triton.jit
def is_last_to_arrive(counter, num):
    """Return whether the num - 1 other programs have arrived before; their stores can then be read (with ".cg")."""
    tl.debug_barrier()  # one thread announces the stores of all threads
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def announce_arrival(counter):
    """Count this program, whose stores `wait_for_arrivals` makes visible to other programs (loaded with ".cg")."""
    tl.debug_barrier()  # one thread announces the stores of all threads
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_for_arrivals(counter, num):
    """Wait until `num` programs have arrived, which must have started before this one. Returns 0, for the addresses of
    what the others have stored: so no compiler moves those loads ahead of the wait.

    After MAX_POLLS polls a program traps: the step fails with a CUDA error, and the engine restarts. Otherwise a
    mistake would hang the device, or yield wrong numbers that nobody notices. Polls are counted, not seconds, so a
    device that other processes share may take its time."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred waits, polls_on;
            .reg .b32 seen, polls;
            mov.u32 polls, 0;
        poll:
            ld.acquire.gpu.global.u32 seen, [$1];
            add.u32 polls, polls, 1;
            setp.lt.s32 waits, seen, $2;
            setp.lt.and.u32 polls_on, polls, $3, waits;
            @polls_on bra poll;
            @waits trap;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [counter.to(tl.int64), num, num * 0 + MAX_POLLS],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_early(addresses, num_bytes):
    """Prefetch num_bytes, a multiple of 16, from each thread's address into the L2 cache. Slow for more than kilobytes:
    a multiprocessor's copy unit takes about 20 ns per cache line."""
    tl.inline_asm_elementwise(
        "{.reg .pred any; setp.gt.s32 any, $2, 0; @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r",
        [addresses, addresses.to(tl.int32) * 0 + num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def settle(known: torch.Tensor) -> None:
    """Let all later kernels read `known` before they wait for their predecessors. They start only after the launch
    here, which torch makes without PDL, so it starts only after all earlier kernels have ended."""
    known.new_zeros(1)


@cache
def overlaps() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


@cache
def split_counters(device: torch.device) -> torch.Tensor:
    """Return counters that are 0 between kernels: the last program to arrive resets its counter."""
    return torch.zeros(MAX_SPLIT_COUNTERS, dtype=torch.int32, device=device)


def room_for_splits(
    num_tiles: int, splits: int, tile_size: int, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for the float32 sums of each tile's splits, and their counters; `unused` for both without
    splits."""
    if splits == 1:
        return unused, unused
    assert num_tiles <= MAX_SPLIT_COUNTERS
    parts = torch.empty(num_tiles * splits * tile_size, dtype=torch.float32, device=unused.device)
    return parts, split_counters(unused.device)


@cache
def launch_options() -> dict[str, Any]:
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps() else {"OVERLAPS": False}
