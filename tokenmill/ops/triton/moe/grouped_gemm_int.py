"""Experts whose matrices are words (see `words`) times the rows of many tokens, sorted by expert (see `expert_tiles`).

A tile's program multiplies a strip of its expert's lines, expanded on their way, with the tile's rows: as `strips` does
for a matrix that all rows share.
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.gemm.splitk import packed_tile_sums
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.moe.align import SortedPairs, expert_of_tile
from tokenmill.ops.triton.quant.packed_int import has_ptx
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix


@kernel
def _moe_grouped_gemm_int(
    x, words, scales, out, order, offsets, shares, num_out, num_in, num_experts,
    K: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, IS_GATHERED: tl.constexpr, HAS_PTX: tl.constexpr,
) -> None:  # fmt: skip
    """IS_GATHERED: rows of x are tokens, rows of out sorted pairs; else x has sorted pairs, and out pairs times shares.
    Lines and pairs beyond the last are read as others, so that no load is masked by them."""
    expert, first, end = expert_of_tile(offsets, num_experts, TILE)
    if first < end:
        row_words = num_in * BITS // 32
        places = first + tl.arange(0, TILE)
        is_pair = places < end
        stands = tl.minimum(places, end - 1)
        pairs = tl.load(order + stands)
        sources = pairs // K if IS_GATHERED else stands
        columns = tl.arange(0, WORDS)
        lines = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
        rows = tl.cast(expert, tl.int64) * num_out + lines % num_out
        sums = packed_tile_sums(
            words + rows[:, None] * row_words + columns[None, :],
            x + sources.to(tl.int64)[:, None] * num_in + columns[None, :],
            scales + rows, num_experts * num_out, 0, row_words, TILE, STRIP, WORDS, GROUP, BITS, HAS_PTX,
        )  # fmt: skip
        if IS_GATHERED:
            targets = places
        else:
            sums *= tl.load(shares + pairs)[None, :]
            targets = pairs
        out_lines = out + targets.to(tl.int64)[None, :] * num_out + lines[:, None]
        tl.store(out_lines, sums.to(out.dtype.element_ty), mask=is_pair[None, :] & (lines < num_out)[:, None])


def moe_grouped_gemm_int(
    x: torch.Tensor, matrix: PackedIntMatrix, pairs: SortedPairs, *, is_gathered: bool
) -> torch.Tensor:
    """All experts' lines one below the other → [pairs, num_out]"""
    num_experts, num_pairs = pairs.num_experts, len(pairs.order)
    num_out = len(matrix.words) // num_experts
    tile, strip, warps, stages = _tile_for(num_pairs / num_experts)
    out = x.new_empty(num_pairs, num_out)
    _moe_grouped_gemm_int[(num_pairs // tile + num_experts, cdiv(num_out, strip))](
        x, matrix.words, matrix.scales, out, pairs.order, pairs.offsets, pairs.shares, num_out, matrix.num_columns,
        num_experts, pairs.k, tile, strip, matrix.interleave, matrix.group, matrix.bits, is_gathered, has_ptx(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _tile_for(pairs_each: float) -> tuple[int, int, int, int]:
    """Pairs, lines, warps and stages: most experts' pairs are one tile, so that their matrices are expanded once."""
    if pairs_each <= 4:
        return 8, 64, 4, 3
    return (32, 64, 4, 3) if pairs_each <= 16 else (64, 128, 8, 2)
