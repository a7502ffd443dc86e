"""Deterministic products: sums do not depend on how many rows are multiplied together (`--deterministic`).

An output is a sum over the matrix's columns, in one or two segments whose border depends on the matrix only (on the
uncut matrix, if it is cut over ranks, so that several ranks compute the same sums as one). Within a segment the tensor
cores add in column order; then the segments' sums are added.

    columns   [ segment 0 | segment 1 ]      out = sum 0 + sum 1

With few rows each segment has its own programs and a second kernel adds their sums; with many rows one program loops
over the segments. Tiles of the matrix are always the left factor, so that the same tensor core instruction is used for
any number of rows: a row is a column of the right factor, and columns are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

TILE_N = 64  # matrix rows per program, for few rows
MIN_MATRIX_TILES = 88  # a matrix with fewer tiles does not fill the device, and is cut into two segments
MIN_COLUMNS = 2048
PROGRAMS_WANTED = 192
LANES = 8  # consecutive tiles of rows that use the same matrix tile, while it is in the L2 cache


@triton.jit
def _segment_sum(
    matrix, inputs, is_row, begin, end, num_in,
    TILE_N: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums [TILE_N, ROWS] over columns [begin, end)."""
    columns = tl.arange(0, STRIDE)
    sums = tl.zeros((TILE_N, ROWS), tl.float32)
    for start in range(begin, end, STRIDE):
        if IS_EVEN:
            left = tl.load(matrix + start)
            right = tl.load(inputs + start, mask=is_row[:, None], other=0.0)
        else:
            inside = (start + columns < num_in)[None, :]
            left = tl.load(matrix + start, mask=inside, other=0.0)
            right = tl.load(inputs + start, mask=is_row[:, None] & inside, other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
    return sums


@kernel_unspecialized("num_rows")
def _deterministic_gemm(
    x, weight, bias, out, kept, num_rows, num_out, num_in, border,
    TILE_N: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, HAS_TWO: tl.constexpr,
    IN_TURN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    num_matrix_tiles, num_tiles = tl.cdiv(num_out, TILE_N), tl.cdiv(num_rows, ROWS)
    number = tl.program_id(0)
    lane = number // (LANES * num_matrix_tiles) * LANES
    lanes = tl.minimum(num_tiles - lane, LANES)
    tile = lane + number % (LANES * num_matrix_tiles) % lanes
    matrix_tile = number % (LANES * num_matrix_tiles) // lanes

    matrix_rows = matrix_tile * TILE_N + tl.arange(0, TILE_N)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, STRIDE)
    is_matrix_row, is_row = matrix_rows < num_out, rows < num_rows
    # Matrix rows beyond the last are clamped, so that loads of the matrix need no mask.
    matrix = weight + (matrix_rows % num_out).to(tl.int64)[:, None] * num_in + columns[None, :]
    inputs = x + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    wait_for_previous(OVERLAPS)
    if HAS_TWO and not IN_TURN:
        begin = tl.program_id(1) * border
        end = tl.where(begin == 0, border, num_in)
        total = _segment_sum(matrix, inputs, is_row, begin, end, num_in, TILE_N, ROWS, STRIDE, IS_EVEN, PRECISION)
    elif HAS_TWO:
        total = _segment_sum(matrix, inputs, is_row, 0, border, num_in, TILE_N, ROWS, STRIDE, IS_EVEN, PRECISION)
        total += _segment_sum(matrix, inputs, is_row, border, num_in, num_in, TILE_N, ROWS, STRIDE, IS_EVEN, PRECISION)
    else:
        total = _segment_sum(matrix, inputs, is_row, 0, num_in, num_in, TILE_N, ROWS, STRIDE, IS_EVEN, PRECISION)
    both = is_row[:, None] & is_matrix_row[None, :]
    targets = rows.to(tl.int64)[:, None] * num_out + matrix_rows[None, :]
    result = tl.trans(total)
    if HAS_TWO and not IN_TURN:
        tl.store(kept + tl.program_id(1).to(tl.int64) * num_rows * num_out + targets, result, mask=both)
    else:
        if HAS_BIAS:
            result += tl.load(bias + matrix_rows, mask=is_matrix_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out + targets, result.to(out.dtype.element_ty), mask=both)


@kernel
def _add_segments(
    kept, bias, out, num_out, size,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    targets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = targets < size
    result = tl.load(kept + targets, mask=inside, other=0.0) + tl.load(kept + size + targets, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + targets % num_out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + targets, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class DeterministicConfig:
    """The tile configuration of a product; it does not affect any sum."""

    tile_n: int
    rows: int
    stride: int
    warps: int
    stages: int


def border_of(num_out: int, num_in: int) -> int:
    """Return the column at which the second segment begins, or num_in; it depends on the matrix only."""
    if -(-num_out // TILE_N) >= MIN_MATRIX_TILES or num_in < MIN_COLUMNS:
        return num_in
    return -(-num_in // 256) * 128


def pick_deterministic_config(num_rows: int, num_out: int, dtype: torch.dtype, *, has_two: bool) -> DeterministicConfig:
    """Return the fastest configuration on an H200. It does not affect sums, so other GPUs compute the same results."""
    if dtype == torch.float32:
        return DeterministicConfig(32, 16, 32, 4, 2)
    if num_rows <= 32:
        return DeterministicConfig(TILE_N, 16 if num_rows <= 16 else 32, 128, 4, 5)
    if num_rows <= 64:
        return DeterministicConfig(TILE_N, 64, 64, 4, 6)
    if num_rows <= 128:
        return DeterministicConfig(TILE_N, 128, 64, 4, 4 if num_out > 8192 else 5)
    if has_two or num_rows * num_out < 128 * 256 * 96:  # two tiles of sums must fit in registers, so tiles are smaller
        return (
            DeterministicConfig(TILE_N, 128, 64, 4, 4) if num_rows <= 512 else DeterministicConfig(128, 128, 64, 8, 4)
        )
    return DeterministicConfig(128, 256, 64, 8, 4)


def deterministic_linear(
    x: torch.Tensor,
    weight: LinearWeight,
    mode: Mode = "eager",
    config: DeterministicConfig | None = None,
    border: int | None = None,
) -> torch.Tensor:
    """[T, columns] → [T, rows]"""
    matrix, x = weight.packed, x.contiguous()
    (num_rows, num_in), num_out = x.shape, matrix.shape[0]
    out = x.new_empty(num_rows, num_out)
    if not num_rows:
        return out
    border = border or border_of(weight.whole_rows or num_out, num_in)
    has_two = border < num_in
    config = config or pick_deterministic_config(num_rows, num_out, x.dtype, has_two=has_two)
    programs = cdiv(num_out, config.tile_n) * cdiv(num_rows, config.rows)
    in_turn = programs >= PROGRAMS_WANTED
    kept = out
    if has_two and not in_turn:
        kept = torch.empty(2, num_rows, num_out, dtype=torch.float32, device=x.device)
    bias, has_bias = weight.bias if weight.bias is not None else x, weight.bias is not None
    _deterministic_gemm[(programs, 2 if has_two and not in_turn else 1)](
        x, matrix, bias, out, kept, num_rows, num_out, num_in, border,
        config.tile_n, config.rows, config.stride, LANES, has_two, in_turn, has_bias,
        num_in % config.stride == 0, precision_of(x),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False, **launch_options(),
    )  # fmt: skip
    if has_two and not in_turn:
        _add_segments[(cdiv(num_rows * num_out, 1024),)](
            kept, bias, out, num_out, num_rows * num_out, 1024, has_bias,
            num_warps=4, enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip
    return out
