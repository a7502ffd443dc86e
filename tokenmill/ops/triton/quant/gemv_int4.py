"""GEMV: a single row times a 4-bit matrix without tensor cores, bound by reading the matrix once if each value takes
few instructions.

The row's columns are divided by a scale, one per 256 columns (32 interleaved words), rounded to float16, and stored in
pairs in the order of a word's values (`packed_int.py`):

    pair i of word w:   [ column w + 32 (i + 4) | column w + 32 i ]        i = 0 to 3

So one instruction processes two values (`fp16x2.py`). Four products at a time are added in float16, within groups of
128 columns that share a scale; then in float32. If groups are smaller or have minima, one more instruction dequantises
two values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.gemm.product import INTERLEAVE, GemmKernel, Product
from tokenmill.ops.triton.gemm.splitk import join_splits, scales_from, split_of_tile, splits_for
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, room_for_splits, wait_for_previous
from tokenmill.ops.triton.quant.fp16x2 import (
    REGISTERS,
    SMALLER,
    as_pair,
    half_of,
    ptx_times,
    ptx_values,
    times_weighed,
    value_of,
)
from tokenmill.ops.triton.quant.packed_int import has_ptx
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix

LARGEST = tl.constexpr(1024.0)  # 32 times as much still fits in float16

# Sums of the lower and of the upper four values of a word times their activations.
DOT_FP16_PAIRS = tl.constexpr(
    "{\n"
    + REGISTERS
    + ptx_values("$2")
    + ptx_times(3)
    + """cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}"""
)


class Fp16PairRow(NamedTuple):
    pairs: torch.Tensor  # int32 [1, columns / 2]
    scales: torch.Tensor  # float32 [columns / 256]


@triton.jit
def store_fp16_pairs(values, pairs, scales, first, size, BLOCK: tl.constexpr):
    """Store columns [first, first + BLOCK) of a row, float32 [BLOCK], as pairs."""
    spans = tl.reshape(values, (BLOCK // 256, 256))
    factors = tl.maximum(tl.max(tl.abs(spans), axis=1) / LARGEST, 1e-30)
    numbers = tl.arange(0, BLOCK // 256)
    tl.store(scales + first // 256 + numbers, factors, mask=first + numbers * 256 < size)
    bits = (spans * (1.0 / factors)[:, None]).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    low, high = tl.split(tl.permute(tl.reshape(bits, (BLOCK // 256, 2, 128)), (0, 2, 1)))
    packed = tl.reshape((high << 16) | (low & 0xFFFF), (BLOCK // 2,))
    word_ids = tl.arange(0, BLOCK // 2)
    tl.store(pairs + first // 2 + word_ids, packed, mask=first + 2 * word_ids < size)


def empty_fp16_pairs(size: int, device: torch.device) -> Fp16PairRow:
    pairs = torch.empty(1, size // 2, dtype=torch.int32, device=device)
    return Fp16PairRow(pairs, torch.empty(size // 256, dtype=torch.float32, device=device))


@triton.jit
def _dot_fp16_pairs(words, a, b, c, d, HAS_PTX: tl.constexpr):
    """words [TILE_N, SPAN], pairs [SPAN] → sums over the first and the second group of columns, [TILE_N, SPAN] each"""
    if HAS_PTX:
        first, second = tl.inline_asm_elementwise(
            DOT_FP16_PAIRS, "=f,=f,r,r,r,r,r", [words, a[None, :], b[None, :], c[None, :], d[None, :]],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = value_of(words, 0) * half_of(a, 0)[None, :] + value_of(words, 1) * half_of(b, 0)[None, :]
        first += value_of(words, 2) * half_of(c, 0)[None, :] + value_of(words, 3) * half_of(d, 0)[None, :]
        second = value_of(words, 4) * half_of(a, 1)[None, :] + value_of(words, 5) * half_of(b, 1)[None, :]
        second += value_of(words, 6) * half_of(c, 1)[None, :] + value_of(words, 7) * half_of(d, 1)[None, :]
    return first, second


@triton.jit
def _pair(x, word_ids, NUMBER: tl.constexpr, SPAN: tl.constexpr, HAS_PTX: tl.constexpr):
    """Load pair NUMBER of each word from an unconverted row."""
    low, high = tl.load(x + NUMBER * SPAN + word_ids), tl.load(x + (NUMBER + 4) * SPAN + word_ids)
    return as_pair(low, high, HAS_PTX)


@kernel
def _one_row(
    x, row_scales, weight, scales, bias, out, parts, arrived, num_out, num_in,
    TILE_N: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, IS_HALVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one span per iteration: so little of x that every thread reads its own part, and the loop has no
    barrier. IS_HALVED: x are pairs; else the row itself, which every program converts with a fixed scale. GROUP columns
    share a scale; for groups of 128 without minima, scales are in the order of the matrix: [rows, groups]."""
    launch_dependents(OVERLAPS)
    word_ids = tl.arange(0, SPAN)
    weighs: tl.constexpr = GROUP < 128 or scales.dtype.element_ty == tl.int32
    groups: tl.constexpr = 8 * SPAN // GROUP
    row_words = num_in // 8
    if weighs:  # then a thread should have many words of few matrix rows, to reuse their scales
        row_words = tl.multiple_of(row_words, SPAN)
    matrix_tile, matrix_rows, low, high = split_of_tile(row_words, TILE_N, SPAN, SPLITS)
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * row_words + word_ids[None, :]
    row_group_scales = scales + (matrix_rows % num_out if weighs else (matrix_rows % num_out) * (num_in // 128))
    words = tl.load(matrix + low, mask=low + word_ids[None, :] < high, other=0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, SPAN), tl.float32)
    if weighs:
        begin = tl.minimum(low, row_words - SPAN)  # a split may be empty
        scales_here = scales_from(row_group_scales + begin // SPAN * groups * num_out, num_out, groups)
    for start in range(low, high, SPAN):
        following = tl.load(matrix + start + SPAN, mask=start + SPAN + word_ids[None, :] < high, other=0)
        if IS_HALVED:
            here = x + start * 4 + word_ids
            a, b, c, d = tl.load(here), tl.load(here + SPAN), tl.load(here + 2 * SPAN), tl.load(here + 3 * SPAN)
            row_scale = tl.load(row_scales + start // SPAN)
        else:
            here = x + start * 8
            a, b = _pair(here, word_ids, 0, SPAN, HAS_PTX), _pair(here, word_ids, 1, SPAN, HAS_PTX)
            c, d = _pair(here, word_ids, 2, SPAN, HAS_PTX), _pair(here, word_ids, 3, SPAN, HAS_PTX)
            row_scale = 1.0 / SMALLER
        if weighs:
            turn = tl.minimum(start + SPAN, high - SPAN) // SPAN
            scales_next = scales_from(row_group_scales + turn * groups * num_out, num_out, groups)
            pairs = (a[None, :], b[None, :], c[None, :], d[None, :])
            sums += times_weighed(words, pairs, scales_here, SPAN, GROUP, 4, HAS_PTX) * row_scale
            scales_here = scales_next
        else:
            first, second = _dot_fp16_pairs(words, a, b, c, d, HAS_PTX)
            group = row_group_scales + start // SPAN * 2
            sums += first * (tl.load(group).to(tl.float32) * row_scale)[:, None]
            sums += second * (tl.load(group + 1).to(tl.float32) * row_scale)[:, None]
        words = following
    total = tl.sum(sums, axis=1)[:, None]
    is_last = True
    if SPLITS > 1:
        total, is_last = join_splits(total, parts, arrived, matrix_tile, TILE_N, 1, SPLITS)
    if is_last:
        target = matrix_rows[:, None]
        if HAS_BIAS:
            total += tl.load(bias + target, mask=target < num_out, other=0.0).to(tl.float32)
        tl.store(out + target, total.to(out.dtype.element_ty), mask=target < num_out)


@dataclass(frozen=True)
class GemvInt4Config:
    """The tile configuration of a product."""

    tile_n: int
    splits: int
    warps: int = 4


def pick_gemv_int4_config(product: Product) -> GemvInt4Config:
    wanted = product.capabilities.tuning.int4_gemv_programs
    return GemvInt4Config(64, splits_for(product.n, product.k // 256, wanted))


def gemv_int4(
    row: Fp16PairRow | torch.Tensor,
    matrix: PackedIntMatrix,
    bias: torch.Tensor | None,
    config: GemvInt4Config,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply a row, as pairs or as it is [1, columns] (of moderate magnitude), by a 4-bit matrix → [1, num_out]."""
    scales = matrix.scales if matrix.row_scales is None else matrix.row_scales
    num_out, num_in, device = len(matrix.words), matrix.num_columns, matrix.words.device
    matrix_tiles = cdiv(num_out, config.tile_n)
    out = torch.empty(1, num_out, dtype=dtype, device=device)
    parts, arrived = room_for_splits(matrix_tiles, config.splits, config.tile_n, out)
    _one_row[(matrix_tiles, config.splits)](
        *(row if isinstance(row, Fp16PairRow) else (row.contiguous(), out)), matrix.words, scales,
        bias if bias is not None else out, out, parts, arrived, num_out, num_in,
        config.tile_n, INTERLEAVE, config.splits, isinstance(row, Fp16PairRow), bias is not None, matrix.group,
        has_ptx(), num_warps=config.warps, **launch_options(),
    )  # fmt: skip
    return out


GEMV_INT4 = GemmKernel(pick_gemv_int4_config, gemv_int4)
