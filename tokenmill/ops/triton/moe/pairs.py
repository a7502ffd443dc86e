"""(token, expert) pairs sorted by expert, for the grouped GEMM.

A tile's expert is found on the device: expert e's tiles begin at offsets[e] // TILE + e, which reserves space for each
expert's last, partly filled tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2

MAX_FEW_PAIRS = 8192  # up to this many pairs are sorted by one kernel, faster than by torch's dozen


@triton.jit
def expert_of_tile(offsets, num_experts, TILE: tl.constexpr, IS_PART: tl.constexpr = False):
    """Return the expert of this program's tile, the index of its first pair, and the end of the expert's pairs.
    IS_PART: `offsets` does not begin with the first expert."""
    tile = tl.program_id(0)
    if IS_PART:
        tile += tl.load(offsets) // TILE
    low, high = 0, num_experts
    while high - low > 1:  # the last expert whose tiles begin at or before this one
        middle = (low + high) // 2
        if tl.load(offsets + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    expert = low
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    first = begin + (tile - begin // TILE - expert) * TILE
    return expert, first, end


@kernel_unspecialized("num_pairs")
def _sort_pairs(ids, order, offsets, num_pairs, num_experts, CHUNK: tl.constexpr) -> None:
    """Each program finds one expert's pairs and stores them, in their order, behind those of earlier experts; the last
    program, which has no expert, stores the end."""
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    place = 0
    for first in range(0, num_pairs, CHUNK):
        found = tl.load(ids + first + chunk, mask=first + chunk < num_pairs, other=num_experts + 1)
        place += tl.sum((found < expert).to(tl.int32), axis=0)
    tl.store(offsets + expert, place.to(tl.int64))  # type: ignore[attr-defined]
    for first in range(0, num_pairs, CHUNK):
        found = tl.load(ids + first + chunk, mask=first + chunk < num_pairs, other=num_experts + 1)
        is_own = (found == expert).to(tl.int32)
        targets = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(order + targets, (first + chunk).to(tl.int64), mask=is_own > 0)
        place += tl.sum(is_own, axis=0)


class SortedPairs(NamedTuple):
    order: torch.Tensor  # int64 [P]: indices of the pairs, sorted by expert
    offsets: torch.Tensor  # int64 [experts + 1]: the first pair of each expert
    weights: torch.Tensor  # float32 [T, k]: routing weights
    num_experts: int

    @property
    def k(self) -> int:
        """Return the number of choices per token."""
        return self.weights.shape[1]


def sort_pairs(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Sort (token, expert) pairs by expert; `weights` and `ids` of the chosen experts are [T, k]."""
    ids, weights = ids.contiguous().flatten(), weights.contiguous()
    if len(ids) > MAX_FEW_PAIRS:
        sorted_ids, order = ids.sort(stable=True)
        offsets = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    else:
        order, offsets = torch.empty_like(ids), ids.new_empty(num_experts + 1)
        _sort_pairs[(num_experts + 1,)](ids, order, offsets, len(ids), num_experts, 1024, num_warps=4)
    return SortedPairs(order, offsets, weights, num_experts)


@kernel_unspecialized("num_columns")
def _gather_tokens(x, order, out, num_columns, K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    place, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < num_columns
    token = tl.load(order + place) // K
    tl.store(out + place * num_columns + columns, tl.load(x + token * num_columns + columns, mask=inside), mask=inside)


def gather_tokens(x: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
    """x [T, H] → the token of each sorted pair [P, H], for TMA, which can't gather"""
    out = x.new_empty(len(pairs.order), x.shape[1])
    _gather_tokens[(len(pairs.order),)](
        x, pairs.order, out, x.shape[1], pairs.k, next_power_of_2(x.shape[1]), num_warps=4
    )
    return out
