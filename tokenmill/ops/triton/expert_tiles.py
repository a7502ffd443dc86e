"""(token, choice) pairs sorted by expert, and the tiles that they are multiplied in.

Which expert a tile belongs to is found on the device. Expert e's tiles begin at offsets[e] // TILE + e, which leaves
each expert room for its last, partly filled one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.kernel import kernel_for_any
from tokenmill.ops.triton.sizes import next_power_of_2

MAX_FEW_PAIRS = 256  # that a single program sorts, faster than a dozen kernels that sort any number


class Tile(NamedTuple):
    """Sorted pairs, matrix rows and columns that a program multiplies at a time."""

    pairs: int
    columns: int
    stride: int
    warps: int
    stages: int


@triton.jit
def expert_of_tile(offsets, num_experts, TILE: tl.constexpr):
    """Whose tile this program's is; the place of its first pair, and the end of that expert's pairs"""
    tile = tl.program_id(0)
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


@kernel_for_any("num_pairs")
def _sort_pairs(
    ids, order, offsets, num_pairs, num_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, AT_ONCE: tl.constexpr
) -> None:  # fmt: skip
    """A pair's place is the number of pairs before it, and an expert's offset that of pairs before his."""
    pairs, experts = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    own = tl.load(ids + pairs, mask=pairs < num_pairs, other=0)
    places, begins = tl.zeros((PAIRS,), tl.int64), tl.zeros((EXPERTS,), tl.int64)
    for first in range(0, num_pairs, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)
        found = tl.load(ids + others, mask=others < num_pairs, other=num_experts)[None, :]
        is_earlier = (found == own[:, None]) & (others[None, :] < pairs[:, None])
        places += tl.sum(((found < own[:, None]) | is_earlier).to(tl.int64), axis=1)
        begins += tl.sum((found < experts[:, None]).to(tl.int64), axis=1)
    tl.store(order + places, pairs.to(tl.int64), mask=pairs < num_pairs)
    tl.store(offsets + experts, begins, mask=experts <= num_experts)


class SortedPairs(NamedTuple):
    order: torch.Tensor  # int64 [P]: pairs in the order of their experts
    offsets: torch.Tensor  # int64 [experts + 1]: where each expert's begin
    shares: torch.Tensor  # float32 [T, k]: how much each pair counts
    num_experts: int

    @property
    def k(self) -> int:
        """Choices of a token"""
        return self.shares.shape[1]


def sort_pairs(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Of the experts that tokens chose, and how much these count: [T, k] both"""
    ids, weights = ids.contiguous().flatten(), weights.contiguous()
    if len(ids) > MAX_FEW_PAIRS:
        sorted_ids, order = ids.sort(stable=True)
        offsets = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    else:
        order, offsets = torch.empty_like(ids), ids.new_empty(num_experts + 1)
        _sort_pairs[(1,)](
            ids, order, offsets, len(ids), num_experts, MAX_FEW_PAIRS, next_power_of_2(num_experts + 1), 32, num_warps=8
        )
    return SortedPairs(order, offsets, weights, num_experts)
