"""Routed experts whose sums do not depend on who else was sent there: tiles of one shape, choices in their order."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.moe.align import Tile
from tokenmill.ops.triton.moe.grouped_gemm import sorted_experts

TILE = Tile(64, 128, 64, 4, 4)
FLOAT32_TILE = Tile(16, 32, 32, 4, 2)


@kernel
def _add_choices(pairs, out, size, K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        total += tl.load(pairs + (token * K + choice) * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


def deterministic_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    tile = FLOAT32_TILE if x.dtype == torch.float32 else TILE
    pairs = sorted_experts(x.contiguous(), weights, ids, packed, activation, tile)
    num_tokens, k, size = pairs.shape
    out = torch.empty_like(x)
    _add_choices[(num_tokens, cdiv(size, 1024))](pairs, out, size, k, 1024, num_warps=4)
    return out
