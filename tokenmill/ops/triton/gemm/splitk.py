"""Split-K: products of a few rows with a large matrix on tensor cores, bound by reading the matrix once.

A program computes a tile of matrix rows and a range of their columns. The tile is the left factor and the few inputs
are the right one, so that only the inputs are padded:

    tile [TILE_N, columns] · inputs [columns, ROWS] → sums [TILE_N, ROWS]

If a matrix has too few tiles to fill the device, its columns are split too. The last program to end adds the sums of
all splits, in their order. Matrices of 4 or 8 bits are expanded in registers.

The first columns are prefetched before the kernel that computes the inputs has ended (see `launch/pdl.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.launch.kernel import Kernel, cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import (
    fetch_early,
    is_last_to_arrive,
    launch_dependents,
    launch_options,
    room_for_splits,
    wait_for_previous,
)
from tokenmill.ops.triton.quant.packed_int import expand_values, has_ptx, minimum_of, scale_of
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix


@dataclass(frozen=True)
class SplitKConfig:
    """The tile configuration of a product."""

    tile_n: int
    stride: int  # columns per iteration
    splits: int
    stages: int
    fetched: int = 0  # bytes of each matrix row to prefetch
    warps: int = 4


@triton.jit
def split_of_tile(num_columns, TILE_N: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr):
    """Return a program's tile, its matrix rows, and its range [low, high) of columns, in whole strides."""
    matrix_tile = tl.program_id(0)
    split_size = tl.cdiv(num_columns, SPLITS * STRIDE) * STRIDE
    low = tl.program_id(1) * split_size
    return matrix_tile, matrix_tile * TILE_N + tl.arange(0, TILE_N), low, tl.minimum(low + split_size, num_columns)


@triton.jit
def join_splits(sums, parts, arrived, matrix_tile, TILE_N: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Return the sums of all splits, and True, in the last program to arrive; in others the program's own sums."""
    return join_split(sums, tl.program_id(1), parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)


@triton.jit
def join_split(
    sums, own_split, parts, arrived, matrix_tile, TILE_N: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Do the same in the program of split `own_split`."""
    tile = tl.arange(0, TILE_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    first = parts + matrix_tile.to(tl.int64) * SPLITS * TILE_N * ROWS + tile
    tl.store(first + own_split * TILE_N * ROWS, sums)
    is_last = is_last_to_arrive(arrived + matrix_tile, SPLITS)
    if is_last:
        sums = tl.zeros((TILE_N, ROWS), tl.float32)
        for split in tl.static_range(SPLITS):
            sums += tl.load(first + split * TILE_N * ROWS, cache_modifier=".cg")
    return sums, is_last


@triton.jit
def store_tile(sums, bias, out, matrix_rows, rows, num_rows, num_out, HAS_BIAS: tl.constexpr):
    is_matrix_row = matrix_rows < num_out
    if HAS_BIAS:
        sums += tl.load(bias + matrix_rows, mask=is_matrix_row, other=0.0).to(tl.float32)[:, None]
    target = out + rows[None, :] * num_out + matrix_rows[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[None, :] & is_matrix_row[:, None])


@triton.jit
def prefetch_tile(
    weight, low, num_out, row_size, BYTES_EACH: tl.constexpr, FETCHED: tl.constexpr, TILE_N: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch FETCHED bytes of each of the tile's rows from element `low` on, one chunk per thread."""
    chunks: tl.constexpr = THREADS // TILE_N
    thread = tl.arange(0, THREADS)
    matrix_rows = (tl.program_id(0) * TILE_N + thread // chunks) % num_out
    begins = weight.to(tl.int64) + (matrix_rows.to(tl.int64) * row_size + low) * BYTES_EACH
    fetch_early(begins + thread % chunks * (FETCHED // chunks), FETCHED // chunks)


@kernel_unspecialized("num_rows")
def _splitk_kernel(
    x, weight, scales, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply an unquantised matrix, STRIDE columns per iteration."""
    launch_dependents(OVERLAPS)
    matrix_tile, matrix_rows, low, high = split_of_tile(num_in, TILE_N, STRIDE, SPLITS)
    columns, rows = tl.arange(0, STRIDE), tl.arange(0, ROWS)
    # Matrix rows and inputs beyond the last are clamped, so that loads need no mask.
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * num_in + columns[None, :]
    inputs = x + (rows % num_rows)[:, None] * num_in + columns[None, :]
    if FETCHED and OVERLAPS:
        prefetch_tile(weight, low, num_out, num_in, 2, FETCHED, TILE_N, THREADS)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, ROWS), tl.float32)
    for start in range(low, high, STRIDE):
        sums = tl.dot(tl.load(matrix + start), tl.trans(tl.load(inputs + start)), sums)
    is_last = True
    if SPLITS > 1:
        sums, is_last = join_splits(sums, parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)
    if is_last:
        store_tile(sums, bias, out, matrix_rows, rows, num_rows, num_out, HAS_BIAS)


@triton.jit
def scales_from(scale_pointers, stride, GROUPS: tl.constexpr):
    """Load the scales of GROUPS consecutive groups, one tensor each."""
    found = (tl.load(scale_pointers),)
    for i in tl.static_range(1, GROUPS):
        found = found + (tl.load(scale_pointers + i * stride),)  # type: ignore[assignment]
    return found


@triton.jit
def packed_tile_sums(
    matrix, inputs, scale_pointers, stride, low, high, ROWS: tl.constexpr, TILE_N: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Multiply words [low, high) of each matrix row by the inputs, WORDS per iteration: [TILE_N, ROWS]
    (`quant/packed_int.py`). `matrix` [TILE_N, WORDS] and `inputs` [ROWS, WORDS] point at the first word of each matrix
    row and input, `scale_pointers` [TILE_N] at the scales of the first groups; `stride` is the distance between groups.

    GROUP columns share a scale. Scales are loaded one iteration ahead, which the compiler does for the factors of
    products only. A group's minimum is multiplied by the sum of its inputs, computed as a product with ones, because
    tensor cores have spare capacity. Groups shorter than WORDS are multiplied one by one, with other inputs zeroed."""
    values_each: tl.constexpr = 32 // BITS
    columns = tl.arange(0, WORDS)
    sums = tl.zeros((TILE_N, ROWS), tl.float32)
    groups: tl.constexpr = WORDS * values_each // GROUP
    has_minima: tl.constexpr = scale_pointers.dtype.element_ty == tl.int32
    # The scale is applied to the sums of a group or, if there are more sums than values, to the values.
    scales_values: tl.constexpr = ROWS >= 2 * GROUP or (has_minima and ROWS >= 64)
    ones = tl.full((TILE_N, WORDS), 1.0, inputs.dtype.element_ty)
    # A split may be empty; then its scales are not used, but must be readable.
    scales_here = scales_from(scale_pointers + tl.minimum(low, high - WORDS) // WORDS * groups * stride, stride, groups)
    for start in range(low, high, WORDS):
        turn = tl.minimum(start + WORDS, high - WORDS) // WORDS
        scales_next = scales_from(scale_pointers + turn * groups * stride, stride, groups)
        values = expand_values(tl.load(matrix + start), BITS, inputs.dtype.element_ty, HAS_PTX)
        first = start * values_each
        part = tl.zeros((TILE_N, ROWS), tl.float32)
        whole = tl.zeros((TILE_N, ROWS), tl.float32)
        for i in tl.static_range(values_each):
            chunk = inputs + first + i * WORDS
            if GROUP < WORDS:
                for number in tl.static_range(WORDS // GROUP):
                    right = tl.trans(tl.load(chunk, mask=(columns // GROUP == number)[None, :], other=0.0))
                    scale = scale_of(scales_here[i * (WORDS // GROUP) + number])[:, None]
                    sums += tl.dot(values[i], right, tl.zeros((TILE_N, ROWS), tl.float32)) * scale
            else:
                found = scales_here[i * WORDS // GROUP]
                scale = scale_of(found)[:, None]
                right = tl.trans(tl.load(chunk))
                if scales_values:
                    left = values[i].to(tl.float32) * scale
                    if has_minima:
                        left += minimum_of(found)[:, None]
                    sums = tl.dot(left.to(inputs.dtype.element_ty), right, sums)
                else:
                    part = tl.dot(values[i], right, part)
                    if has_minima:
                        whole = tl.dot(ones, right, whole)
                    if (i + 1) * WORDS % GROUP == 0:  # end of a group
                        sums += part * scale
                        part = tl.zeros((TILE_N, ROWS), tl.float32)
                        if has_minima:
                            sums += whole * minimum_of(found)[:, None]
                            whole = tl.zeros((TILE_N, ROWS), tl.float32)
        scales_here = scales_next
    return sums


@kernel_unspecialized("num_rows")
def _packed_splitk_kernel(
    x, weight, scales, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_PTX: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a matrix of packed integers, WORDS per iteration."""
    launch_dependents(OVERLAPS)
    values_each: tl.constexpr = 32 // BITS
    row_words = num_in // values_each
    matrix_tile, matrix_rows, low, high = split_of_tile(row_words, TILE_N, WORDS, SPLITS)
    columns, rows = tl.arange(0, WORDS), tl.arange(0, ROWS)
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * row_words + columns[None, :]
    inputs = x + (rows % num_rows)[:, None] * num_in + columns[None, :]
    if FETCHED and OVERLAPS:
        prefetch_tile(weight, low, num_out, row_words, 4, FETCHED, TILE_N, THREADS)
    wait_for_previous(OVERLAPS)
    sums = packed_tile_sums(
        matrix, inputs, scales + matrix_rows % num_out, num_out, low, high, ROWS, TILE_N, WORDS, GROUP, BITS, HAS_PTX
    )
    is_last = True
    if SPLITS > 1:
        sums, is_last = join_splits(sums, parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)
    if is_last:
        store_tile(sums, bias, out, matrix_rows, rows, num_rows, num_out, HAS_BIAS)


def pick_splitk_config(product: Product) -> SplitKConfig:
    """Return the configuration with enough splits to fill the device, but no more programs than run at once if that is
    possible. Timed on an H200, where 264 run at once: 1280 × 8192 with 8 rows takes 12.5 us in 320 programs and 8.3 in
    260."""
    tuning, tiles = product.capabilities.tuning, cdiv(product.n, 64)
    most, at_once = splits_for(product.n, product.k // 128, tuning.gemm_splitk_programs), 2 * tuning.multiprocessors
    fitting = at_once // tiles
    is_better = at_once < tiles * most <= 2 * at_once and tiles * fitting >= tuning.gemm_splitk_programs
    splits = fitting if is_better else most
    return SplitKConfig(64, 128, splits, 4, 512)


def pick_splitk_int_config(product: Product) -> SplitKConfig:
    """Return the configuration for packed integers: tiles of 64 matrix rows for few rows, of 128 for more."""
    m, n, form, tuning = product.m, product.n, product.form, product.capabilities.tuning
    words = form.interleave
    most = product.k * form.bits // 32 // words
    if m > tuning.gemm_splitk_max_rows:
        return SplitKConfig(128, words, splits_for(n, most, tuning.int4_splitk_programs), 2, 0, 8)
    if form.bits == 8:
        return SplitKConfig(64, words, splits_for(n, most, tuning.int8_splitk_programs), 3, 256)
    least, stages = (2, 3) if m <= 8 else (1, 4)
    return SplitKConfig(64, words, splits_for(n, most, tuning.int4_splitk_programs, least), stages, 256)


def splits_for(num_out: int, most: int, programs: int, least: int = 1) -> int:
    splits = min(least, most)
    while num_out // 64 * splits < programs and splits < most:
        splits *= 2
    return splits


def splitk_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: SplitKConfig, _dtype: object = None
) -> torch.Tensor:
    """x [rows, num_in], weight [num_out, num_in] → [rows, num_out]"""
    assert x.shape[1] % config.stride == 0, "the number of columns must be a multiple of the stride"
    return _launch(_splitk_kernel, x, weight, bias, None, config, 16)


def splitk_int_linear(
    x: torch.Tensor, matrix: PackedIntMatrix, bias: torch.Tensor | None, config: SplitKConfig, _dtype: object = None
) -> torch.Tensor:
    """x [rows, num_in], matrix [num_out, num_in] in spans of `config.stride` words → [rows, num_out]"""
    return _launch(
        _packed_splitk_kernel, x, matrix.words, bias, matrix.scales, config, 8, matrix.group, matrix.bits, has_ptx()
    )


def _launch(
    kernel: Kernel,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: SplitKConfig,
    min_rows: int,
    *format_args: int,
) -> torch.Tensor:
    x = x.contiguous()
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    padded = max(min_rows, next_power_of_2(num_rows))
    matrix_tiles = cdiv(num_out, config.tile_n)
    out = x.new_empty(num_rows, num_out)
    parts, arrived = room_for_splits(matrix_tiles, config.splits, config.tile_n * padded, out)
    split_size = cdiv(weight.shape[1], config.splits * config.stride) * config.stride
    shortest = weight.shape[1] - (config.splits - 1) * split_size  # the last split
    fetched = config.fetched if shortest * weight.element_size() >= config.fetched else 0
    kernel[(matrix_tiles, config.splits)](
        x, weight, scales if scales is not None else x, bias if bias is not None else x, out, parts, arrived,
        num_rows, num_out, num_in, padded, config.tile_n, config.stride, config.splits, 32 * config.warps, fetched,
        bias is not None, *format_args, num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out


SPLITK = GemmKernel(pick_splitk_config, splitk_linear)
SPLITK_INT = GemmKernel(pick_splitk_int_config, splitk_int_linear)
