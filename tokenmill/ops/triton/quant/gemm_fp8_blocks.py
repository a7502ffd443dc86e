"""Products with fp8 matrices that have a scale per 128 columns of a row, as in DeepSeek's and Qwen's checkpoints
(`Fp8BlockMatrix`). Rows are quantised to fp8 too (`gemm_fp8_split.py`): 128 columns are multiplied in fp8, and their
float32 sums by the scales of the matrix; the row's scale is applied last.

    few rows     two fp8 values each, the matrix on the left, its columns split until every multiprocessor has work
    many rows    one fp8 value each, in tiles of rows and matrix rows
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.packed_formats import FP8_GROUP
from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.gemm.splitk import (
    SplitKConfig,
    join_splits,
    prefetch_tile,
    split_of_tile,
    splits_for,
    store_tile,
)
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, wait_for_previous
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows, launch_fp8_split
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix

GROUP = tl.constexpr(FP8_GROUP)
TALL = 8  # consecutive tiles of rows for the same matrix rows, so that both stay in the L2 cache


@kernel_unspecialized("num_rows")
def _gemm_fp8_blocks_split(
    x, weight, row_scales, scales, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply rows of two planes, one group of columns per iteration; scales are loaded one iteration ahead."""
    launch_dependents(OVERLAPS)
    matrix_tile, matrix_rows, low, high = split_of_tile(num_in, TILE_N, GROUP, SPLITS)
    columns, planes = tl.arange(0, GROUP), tl.arange(0, 2 * ROWS)
    # Matrix rows beyond the last are clamped, so that loads of the matrix need no mask.
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * num_in + columns[None, :]
    inputs = x + planes[:, None] * num_in + columns[None, :]
    is_plane = (planes < 2 * num_rows)[:, None]
    at, last = scales + matrix_rows % num_out, num_in // GROUP - 1
    found = tl.load(at + tl.minimum(low // GROUP, last) * num_out)
    if FETCHED and OVERLAPS:
        prefetch_tile(weight, low, num_out, num_in, 1, FETCHED, TILE_N, THREADS)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, 2 * ROWS), tl.float32)
    for start in range(low, high, GROUP):
        found_next = tl.load(at + tl.minimum(start // GROUP + 1, last) * num_out)
        right = tl.trans(tl.load(inputs + start, mask=is_plane, other=0.0))
        sums += tl.dot(tl.load(matrix + start), right, tl.zeros((TILE_N, 2 * ROWS), tl.float32)) * found[:, None]
        found = found_next
    first, second = tl.split(tl.reshape(sums, (TILE_N, ROWS, 2)))
    total = first + second * 0.0625
    is_last = True
    if SPLITS > 1:
        total, is_last = join_splits(total, parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)
    if is_last:
        rows = tl.arange(0, ROWS)
        total *= tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[None, :]
        store_tile(total, bias, out, matrix_rows, rows, num_rows, num_out, HAS_BIAS)


def pick_split_config(product: Product) -> SplitKConfig:
    """Return the configuration, as for matrices with one scale per row; never timed."""
    programs = product.capabilities.tuning.fp8_split_programs
    splits = splits_for(product.n, product.k // (2 * FP8_GROUP), programs if product.m <= 16 else programs // 2)
    return SplitKConfig(64, FP8_GROUP, max(1, splits), 6, 512)


def gemm_fp8_blocks_split(
    rows: Fp8Rows, matrix: Fp8BlockMatrix, bias: torch.Tensor | None, config: SplitKConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply rows of two planes by a matrix [num_out, num_in] → [R, num_out]."""
    assert config.stride == FP8_GROUP, "the stride must be the columns that share a scale"
    return launch_fp8_split(_gemm_fp8_blocks_split, rows, matrix.values, matrix.scales, bias, config, dtype)


class TileConfig(NamedTuple):
    rows: int
    matrix_rows: int
    warps: int
    stages: int


@triton.jit
def _tile_of(num_high, num_wide, TALL: tl.constexpr):
    """Return this program's tile: TALL tiles of rows for the same matrix rows before the next ones."""
    tile = tl.program_id(0)
    first = tile // (TALL * num_wide) * TALL
    tall = tl.minimum(num_high - first, TALL)
    within = tile % (TALL * num_wide)
    return first + within % tall, within // tall


@kernel_unspecialized("num_rows")
def _gemm_fp8_blocks(
    x, weight, row_scales, scales, bias, out, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, TALL: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Rows and matrix rows beyond the last are clamped."""
    high, wide = _tile_of(tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, TILE_N), TALL)
    rows, matrix_rows = high * ROWS + tl.arange(0, ROWS), wide * TILE_N + tl.arange(0, TILE_N)
    columns = tl.arange(0, GROUP)
    inputs = x + (rows % num_rows).to(tl.int64)[:, None] * num_in + columns[None, :]
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * num_in + columns[None, :]
    at, last = scales + matrix_rows % num_out, num_in // GROUP - 1
    found = tl.load(at)
    sums = tl.zeros((ROWS, TILE_N), tl.float32)
    for start in range(0, num_in, GROUP):
        found_next = tl.load(at + tl.minimum(start // GROUP + 1, last) * num_out)
        left, right = tl.load(inputs + start), tl.trans(tl.load(matrix + start))
        sums += tl.dot(left, right, tl.zeros((ROWS, TILE_N), tl.float32)) * found[None, :]
        found = found_next
    sums *= tl.load(row_scales + rows % num_rows)[:, None]
    is_column = matrix_rows < num_out
    if HAS_BIAS:
        sums += tl.load(bias + matrix_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * num_out + matrix_rows[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & is_column[None, :])


def pick_tile_config(product: Product) -> TileConfig:
    """Return the fastest of six configurations on an H200, from 256 rows on."""
    return TileConfig(64, 128, 4, 4)


def gemm_fp8_blocks(
    rows: Fp8Rows, matrix: Fp8BlockMatrix, bias: torch.Tensor | None, config: TileConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply rows of one plane by a matrix [num_out, num_in] → [R, num_out]."""
    num_rows, num_planes, num_in = rows.planes.shape
    assert num_planes == 1, "two planes are for few rows"
    num_out = len(matrix.values)
    out = torch.empty(num_rows, num_out, dtype=dtype, device=matrix.values.device)
    _gemm_fp8_blocks[(cdiv(num_rows, config.rows) * cdiv(num_out, config.matrix_rows),)](
        rows.planes, matrix.values, rows.scales, matrix.scales, bias if bias is not None else out, out,
        num_rows, num_out, num_in, config.rows, config.matrix_rows, TALL, bias is not None,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


FP8_BLOCKS_SPLIT = GemmKernel(pick_split_config, gemm_fp8_blocks_split)
FP8_BLOCKS = GemmKernel(pick_tile_config, gemm_fp8_blocks)
