"""fp8 matrices times rows that are split into two planes of fp8 values, so that tensor cores multiply fp8 directly.

The second plane is the rounding error of the first one, times 16: together they have the precision of bfloat16. Planes
are additional columns of the right factor, which the tensor cores would pad anyway:

    x / scale = a + b / 16        tile [TILE_N, columns] · [a | b] of each row → sums [TILE_N, 2 * ROWS]

Many rows are quantised to one plane. As in split-K, a matrix with few tiles is split by columns too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.gemm.splitk import SplitKConfig, join_splits, prefetch_tile, split_of_tile, splits_for
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import Kernel, cdiv, kernel, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, room_for_splits, wait_for_previous
from tokenmill.ops.triton.quant.quantized import FP8, Fp8Matrix

FP8_MAX = tl.constexpr(448.0)
ROWS_TOGETHER = 4  # cuBLAS requires a multiple of this many rows with group scales


class Fp8Rows(NamedTuple):
    """Rows quantised to one or two planes of fp8."""

    planes: torch.Tensor  # fp8 [R, 1 or 2, columns]
    scales: torch.Tensor  # float32 [R, 1]


@triton.jit
def store_fp8_rows(values, planes, scales, row, size, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise and store a row of float32 [BLOCK]."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / FP8_MAX, 1e-12)
    tl.store(scales + row, scale)
    columns = tl.arange(0, BLOCK)
    rest = values * (1.0 / scale)
    for plane in tl.static_range(PLANES):
        rounded = rest
        if plane + 1 < PLANES:
            # Round to four bits by hand: ptxas 12.8 uses the wrong register when a number is converted to fp8 and back.
            rounded = ((rest.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
            rest = (rest - rounded) * 16
        target = planes + (row * PLANES + plane) * size + columns
        tl.store(target, rounded.to(planes.dtype.element_ty), mask=columns < size)


@kernel
def _quantize_rows(
    x, planes, scales, size, PLANES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * size + columns, mask=columns < size, other=0.0).to(tl.float32)
    store_fp8_rows(values, planes, scales, row, size, PLANES, BLOCK)


def num_planes_for(num_rows: int, device: torch.device) -> int:
    return 2 if num_rows <= capabilities_of(device).tuning.fp8_split_max_rows else 1


def empty_planes(num_rows: int, size: int, device: torch.device, num_planes: int | None = None) -> Fp8Rows:
    """Allocate planes, padded to a multiple of ROWS_TOGETHER rows."""
    num_planes = num_planes_for(num_rows, device) if num_planes is None else num_planes
    padded = cdiv(num_rows, ROWS_TOGETHER) * ROWS_TOGETHER
    planes = torch.empty(padded, num_planes, size, dtype=FP8, device=device)[:num_rows]
    return Fp8Rows(planes, torch.empty(num_rows, 1, dtype=torch.float32, device=device))


def padded_plane(rows: Fp8Rows) -> torch.Tensor:
    """Return rows of one plane with their padding to a multiple of ROWS_TOGETHER, undefined: [padded, columns]."""
    num_rows, _, size = rows.planes.shape
    padded = cdiv(num_rows, ROWS_TOGETHER) * ROWS_TOGETHER
    assert rows.planes.untyped_storage().nbytes() >= rows.planes.storage_offset() + padded * size, "see `empty_planes`"
    return rows.planes.as_strided((padded, size), (size, 1))


def quantize_rows(x: torch.Tensor, num_planes: int | None = None) -> Fp8Rows:
    """Quantise rows, by default to as many planes as products with this number of rows use."""
    num_rows, size = x.shape
    rounded = empty_planes(num_rows, size, x.device, num_planes)
    _quantize_rows[(num_rows,)](
        x.contiguous(), *rounded, size, rounded.planes.shape[1], next_power_of_2(size),
        num_warps=8, **launch_options(),
    )  # fmt: skip
    return rounded


@kernel_unspecialized("num_rows")
def _gemm_fp8_split(
    x, weight, row_scales, scales, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply STRIDE columns per iteration; IS_EVEN: the number of columns is a multiple of STRIDE."""
    launch_dependents(OVERLAPS)
    matrix_tile, matrix_rows, low, high = split_of_tile(num_in, TILE_N, STRIDE, SPLITS)
    columns, planes = tl.arange(0, STRIDE), tl.arange(0, 2 * ROWS)
    # Matrix rows beyond the last are clamped, so that loads of the matrix need no mask.
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * num_in + columns[None, :]
    inputs = x + planes[:, None] * num_in + columns[None, :]
    is_plane = (planes < 2 * num_rows)[:, None]
    if FETCHED and OVERLAPS:
        prefetch_tile(weight, low, num_out, num_in, 1, FETCHED, TILE_N, THREADS)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, 2 * ROWS), tl.float32)
    for start in range(low, high, STRIDE):
        if IS_EVEN:
            left = tl.load(matrix + start)
            right = tl.load(inputs + start, mask=is_plane, other=0.0)
        else:
            inside = (start + columns < num_in)[None, :]
            left = tl.load(matrix + start, mask=inside, other=0.0)
            right = tl.load(inputs + start, mask=is_plane & inside, other=0.0)
        sums = tl.dot(left, tl.trans(right), sums)
    first, second = tl.split(tl.reshape(sums, (TILE_N, ROWS, 2)))
    total = first + second * 0.0625
    is_last = True
    if SPLITS > 1:
        total, is_last = join_splits(total, parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)
    if is_last:
        rows = tl.arange(0, ROWS)
        is_matrix_row, is_row = matrix_rows < num_out, rows < num_rows
        total *= tl.load(row_scales + rows, mask=is_row, other=0.0)[None, :]
        total *= tl.load(scales + matrix_rows, mask=is_matrix_row, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + matrix_rows, mask=is_matrix_row, other=0.0).to(tl.float32)[:, None]
        target = out + rows[None, :] * num_out + matrix_rows[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_matrix_row[:, None])


def pick_fp8_split_config(product: Product) -> SplitKConfig:
    m, n, most = product.m, product.n, product.k // 256
    programs = product.capabilities.tuning.fp8_split_programs
    if m > 16:
        is_large = n > 8192
        return SplitKConfig(64, 128 if is_large else 256, splits_for(n, most, programs // 2), 6 if is_large else 4, 512)
    return SplitKConfig(64, 256, splits_for(n, most, programs), 3 if 64 * 88 < n <= 8192 else 4, 512)


def gemm_fp8_split(
    rows: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, config: SplitKConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply rows of two planes by a matrix [num_out, num_in] → [R, num_out]."""
    is_even = rows.planes.shape[2] % config.stride == 0
    return launch_fp8_split(_gemm_fp8_split, rows, matrix.values, matrix.scales, bias, config, dtype, is_even)


def launch_fp8_split(
    kernel: Kernel,
    rows: Fp8Rows,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    config: SplitKConfig,
    dtype: torch.dtype,
    *format_args: bool,
) -> torch.Tensor:
    num_rows, _, num_in = rows.planes.shape
    num_out, device = len(values), values.device
    padded = max(8, next_power_of_2(num_rows))
    matrix_tiles = cdiv(num_out, config.tile_n)
    out = torch.empty(num_rows, num_out, dtype=dtype, device=device)
    parts, arrived = room_for_splits(matrix_tiles, config.splits, config.tile_n * padded, out)
    has_even_splits = num_in % (config.splits * config.stride) == 0 and num_in // config.splits >= config.fetched
    kernel[(matrix_tiles, config.splits)](
        rows.planes, values, rows.scales, scales, bias if bias is not None else out, out, parts, arrived,
        num_rows, num_out, num_in, padded, config.tile_n, config.stride, config.splits, 32 * config.warps,
        config.fetched if has_even_splits else 0, bias is not None, *format_args,
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out


FP8_SPLIT = GemmKernel(pick_fp8_split_config, gemm_fp8_split)
