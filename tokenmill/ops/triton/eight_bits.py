"""Matrices of 8 bits a value, in blocks of 32 columns with a scale each: Q8_0, as files hold it and as plain matrices
are rounded to it on any device.

A few rows are multiplied in their own precision while the matrix is expanded on its way to the matrix units, a strip
of its lines a program (see `strips`). For many rows it is expanded first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch.nn import functional

from tokenmill.ops.cpu.packing import quantized_q8
from tokenmill.ops.triton.kernel import kernel, kernel_for_any
from tokenmill.ops.triton.overlap import let_next_begin, wait_for_previous
from tokenmill.ops.triton.strips import (
    MAX_ROWS,
    Cut,
    fetch_strip,
    join_splits,
    launch_strips,
    share_of_strip,
    splits_for,
    store_strip,
)

BLOCK = 32  # columns that share a scale
BLOCK_BYTES = 2 + BLOCK
STRIDE = 128
EXPANDED = 1024  # columns that a program expands


@dataclass(frozen=True)
class ByteMatrix:
    values: torch.Tensor  # int8 [rows, columns]
    scales: torch.Tensor  # float16 [rows, columns / 32]


def kept_int8(blocks: torch.Tensor) -> ByteMatrix:
    """uint8 [rows, bytes] of Q8_0 blocks: a scale, then 32 values"""
    parts = blocks.view(len(blocks), -1, BLOCK_BYTES)
    scales = parts[:, :, :2].contiguous().view(torch.float16).squeeze(2)
    return ByteMatrix(parts[:, :, 2:].contiguous().view(torch.int8).flatten(1), scales)


def to_int8(matrix: torch.Tensor, rows_at_once: int = 8192) -> ByteMatrix:
    """float32 copies are made of some rows at a time."""
    parts = [kept_int8(quantized_q8(part.float())) for part in matrix.split(rows_at_once)]
    return ByteMatrix(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


@kernel_for_any("num_rows")
def _byte_strips(
    x, weight, scales, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, STRIP: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    strip, lines, low, high = share_of_strip(num_in, STRIP, STRIDE, SPLITS)
    columns, rows = tl.arange(0, STRIDE), tl.arange(0, ROWS)
    blocks = tl.arange(0, STRIDE // BLOCK)
    line = (lines % num_out).to(tl.int64)[:, None]
    matrix = weight + line * num_in + columns[None, :]
    scale_of = scales + line * (num_in // BLOCK) + blocks[None, :]
    inputs = x + (rows % num_rows)[:, None] * num_in + columns[None, :]
    if FETCHED and OVERLAPS:
        fetch_strip(weight, low, num_out, num_in, 1, FETCHED, STRIP, THREADS)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((STRIP, ROWS), tl.float32)
    for start in range(low, high, STRIDE):
        values = tl.reshape(tl.load(matrix + start).to(tl.float32), (STRIP, STRIDE // BLOCK, BLOCK))
        scaled = values * tl.load(scale_of + start // BLOCK).to(tl.float32)[:, :, None]
        expanded = tl.reshape(scaled, (STRIP, STRIDE)).to(x.dtype.element_ty)
        sums = tl.dot(expanded, tl.trans(tl.load(inputs + start)), sums)
    is_last = True
    if SPLITS > 1:
        sums, is_last = join_splits(sums, parts, arrived, strip, STRIP, ROWS, SPLITS)
    if is_last:
        store_strip(sums, bias, out, lines, rows, num_rows, num_out, HAS_BIAS)


@kernel
def _expand_bytes(values, scales, out, num_in, COLUMNS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_in
    value = tl.load(values + row * num_in + columns, mask=is_column, other=0).to(tl.float32)
    scale = tl.load(scales + row * (num_in // BLOCK) + columns // BLOCK, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * num_in + columns, (value * scale).to(out.dtype.element_ty), mask=is_column)


def expand_bytes(matrix: ByteMatrix, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] in `dtype`, for products of many rows"""
    num_out, num_in = matrix.values.shape
    out = torch.empty(num_out, num_in, dtype=dtype, device=matrix.values.device)
    _expand_bytes[(num_out, -(-num_in // EXPANDED))](
        matrix.values, matrix.scales, out, num_in, EXPANDED, BLOCK, num_warps=4
    )
    return out


def cut_for(num_rows: int, num_out: int, num_in: int) -> Cut | None:
    """None where the matrix is better expanded first."""
    if num_rows > MAX_ROWS or num_in % STRIDE:
        return None
    return Cut(64, STRIDE, splits_for(num_out, num_in // STRIDE, 256), 4, 256)


def byte_linear(x: torch.Tensor, matrix: ByteMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, num_in] → [rows, num_out]"""
    if cut := cut_for(len(x), *matrix.values.shape):
        return launch_strips(_byte_strips, x, matrix.values, bias, matrix.scales, cut, 16, BLOCK)
    return functional.linear(x, expand_bytes(matrix, x.dtype), bias)
