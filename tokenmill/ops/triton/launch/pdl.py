"""One kernel begins while the one before it ends (programmatic dependent launch, NVIDIA from Hopper on).

A kernel that takes part allows its successor to be launched (`launch_dependents`) at its own beginning, and waits
(`wait_for_previous`) before it reads anything that kernels before it wrote. What it needs from elsewhere, weights above
all, it may load before that.

Programs of one kernel that share a result, as the splits of split-K do, count themselves; the last one adds up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_SPLIT_COUNTERS = 8192


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
    """Return whether the num - 1 other programs arrived before; what they stored can then be read (with ".cg")."""
    tl.debug_barrier()  # what all threads stored is announced by one of them
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def fetch_early(addresses, num_bytes):
    """Asks for memory to be brought into the L2 cache: num_bytes, a multiple of 16, from each thread's address on. Slow
    for more than kilobytes: a multiprocessor's copying unit takes some 20 ns a line."""
    tl.inline_asm_elementwise(
        "{.reg .pred any; setp.gt.s32 any, $2, 0; @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r",
        [addresses, addresses.to(tl.int32) * 0 + num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def settle(known: torch.Tensor) -> None:
    """Let all kernels behind this read `known` before they wait for the one before them. They do not begin before what
    is launched here, and that, since torch launches it in the ordinary way, not before all that came earlier ended."""
    known.new_zeros(1)


@cache
def overlaps() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


@cache
def split_counters(device: torch.device) -> torch.Tensor:
    """Counters that are 0 between kernels: the program that counts to the end sets its counter back."""
    return torch.zeros(MAX_SPLIT_COUNTERS, dtype=torch.int32, device=device)


def room_for_splits(
    num_tiles: int, splits: int, tile_size: int, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the splits of each tile leave their sums, float32, and counters of those that have; `unused` for both where
    nothing is split"""
    if splits == 1:
        return unused, unused
    assert num_tiles <= MAX_SPLIT_COUNTERS
    parts = torch.empty(num_tiles * splits * tile_size, dtype=torch.float32, device=unused.device)
    return parts, split_counters(unused.device)


@cache
def launch_options() -> dict[str, Any]:
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps() else {"OVERLAPS": False}
