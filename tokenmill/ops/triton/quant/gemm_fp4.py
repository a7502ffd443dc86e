"""Split-K products of a few rows with MXFP4 or NVFP4 matrices (`packed_fp4.py`), where the Hopper kernel
(`hopper_gemm_fp4.py`) is not available: the matrix is the left factor, its values are expanded in registers, and
columns are split until every multiprocessor has work."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.arch.packed_formats import FP4_SPAN
from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.gemm.splitk import (
    SplitKConfig,
    join_splits,
    prefetch_tile,
    split_of_tile,
    splits_for,
    store_tile,
)
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, room_for_splits, wait_for_previous
from tokenmill.ops.triton.quant.fp4 import GROUPS_OF_16, expand_pairs
from tokenmill.ops.triton.quant.packed_fp4 import WORDS, PackedFp4Matrix, load_scales, span_columns
from tokenmill.ops.triton.quant.packed_int import has_ptx


@kernel_unspecialized("num_rows")
def _splitk_fp4(
    x, weight, scales, factors, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr, FETCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one span per iteration."""
    launch_dependents(OVERLAPS)
    row_words = num_in // 4
    matrix_tile, matrix_rows, low, high = split_of_tile(row_words, TILE_N, WORDS, SPLITS)
    words, rows = tl.arange(0, WORDS), tl.arange(0, ROWS)
    read = (matrix_rows % num_out).to(tl.int64)[:, None]
    matrix, own = weight + read * row_words + words[None, :], scales + read * (num_in // GROUP)
    inputs = x + (rows % num_rows)[:, None] * num_in + span_columns()[None, :]
    if FETCHED and OVERLAPS:
        prefetch_tile(weight, low, num_out, row_words, 2, FETCHED, TILE_N, THREADS)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, ROWS), tl.float32)
    for start in range(low, high, WORDS):
        first, second = load_scales(own + 4 * start // GROUP, GROUP)
        values = expand_pairs(tl.load(matrix + start), first, second, HAS_PTX)
        for i in tl.static_range(4):
            right = tl.trans(tl.load(inputs + 4 * start + 8 * i))
            sums = tl.dot(values[i].to(right.dtype), right, sums)
    is_last = True
    if SPLITS > 1:
        sums, is_last = join_splits(sums, parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)
    if is_last:
        if GROUP == GROUPS_OF_16:
            sums *= tl.load(factors + matrix_rows % num_out)[:, None]
        store_tile(sums, bias, out, matrix_rows, rows, num_rows, num_out, HAS_BIAS)


def pick_fp4_config(product: Product) -> SplitKConfig:
    """Return the configuration, as for 4-bit integers."""
    tuning, most = product.capabilities.tuning, product.k // FP4_SPAN
    if product.m > tuning.gemm_splitk_max_rows:
        return SplitKConfig(128, FP4_SPAN, splits_for(product.n, most, tuning.int4_splitk_programs), 3, 0, 8)
    return SplitKConfig(64, FP4_SPAN, splits_for(product.n, most, tuning.int4_splitk_programs), 4, 256)


def splitk_fp4_linear(
    x: torch.Tensor, matrix: PackedFp4Matrix, bias: torch.Tensor | None, config: SplitKConfig, _dtype: object = None
) -> torch.Tensor:
    """x [rows, num_in], matrix [num_out, num_in] → [rows, num_out]"""
    x = x.contiguous()
    (num_rows, num_in), num_out = x.shape, len(matrix.words)
    padded = max(16, next_power_of_2(num_rows))
    matrix_tiles = cdiv(num_out, config.tile_n)
    out = x.new_empty(num_rows, num_out)
    parts, arrived = room_for_splits(matrix_tiles, config.splits, config.tile_n * padded, out)
    split_size = cdiv(num_in, config.splits * FP4_SPAN) * FP4_SPAN
    shortest = num_in - (config.splits - 1) * split_size  # the last split
    _splitk_fp4[(matrix_tiles, config.splits)](
        x, matrix.words, matrix.scales, matrix.factors, bias if bias is not None else x, out, parts, arrived,
        num_rows, num_out, num_in, padded, config.tile_n, config.splits, 32 * config.warps,
        config.fetched if shortest // 2 >= config.fetched else 0, bias is not None, matrix.group, has_ptx(),
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out


SPLITK_FP4 = GemmKernel(pick_fp4_config, splitk_fp4_linear)
