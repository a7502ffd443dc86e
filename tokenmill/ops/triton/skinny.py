"""Products of a few rows with a big matrix: the time is what reading the matrix once takes.

One program owns a strip of matrix rows and streams along them. With one input row the products are plain
multiply-adds; with up to 16 the matrix units take a tile of 16 rows, of which the missing ones are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROWS = 16


@triton.jit
def _one_row(
    x, weight, bias, out, num_out, num_in,
    STRIP: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row = rows < num_out
    columns = tl.arange(0, STRIDE)
    lines = weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    sums = tl.zeros((STRIP, STRIDE), tl.float32)
    for start in range(0, num_in, STRIDE):
        if IS_EVEN:
            factors = tl.load(x + start + columns)
            part = tl.load(lines + start, eviction_policy="evict_first")
        else:
            inside = start + columns < num_in
            factors = tl.load(x + start + columns, mask=inside, other=0.0)
            part = tl.load(lines + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        sums += part.to(tl.float32) * factors.to(tl.float32)[None, :]
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _few_rows(
    x, weight, bias, out, num_rows, num_out, num_in,
    STRIP: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    inputs = tl.arange(0, 16)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row, is_input = rows < num_out, inputs < num_rows
    columns = tl.arange(0, STRIDE)
    lines = weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    sums = tl.zeros((16, STRIP), tl.float32)
    for start in range(0, num_in, STRIDE):
        inside = (start + columns < num_in)[None, :]
        factors = tl.load(
            x + inputs[:, None] * num_in + start + columns[None, :], mask=is_input[:, None] & inside, other=0.0
        )
        part = tl.load(lines + start, mask=is_row[:, None] & inside, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(factors, tl.trans(part), sums)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + inputs[:, None] * num_out + rows[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_input[:, None] & is_row[None, :])


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    strip: int = 8,
    stride: int = 512,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """x [1 to 16, num_in] bf16, weight [num_out, num_in] → [rows, num_out]"""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, num_out)
    grid = (triton.cdiv(num_out, strip),)
    given = bias if bias is not None else x
    if num_rows == 1:
        is_even = num_in % stride == 0 and num_out % strip == 0
        _one_row[grid](
            x, weight, given, out, num_out, num_in, strip, stride, bias is not None, is_even,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        _few_rows[grid](
            x, weight, given, out, num_rows, num_out, num_in, strip, stride, bias is not None,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out
