"""A single row times a big matrix: the time is what reading the matrix once takes.

One program owns a strip of matrix rows and streams along them; the products are plain multiply-adds. The first part of
the strip is fetched before the kernel that computes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.kernel import kernel
from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous


@kernel
def _one_row(
    x, weight, bias, out, num_out, num_in,
    STRIP: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row = rows < num_out
    columns = tl.arange(0, STRIDE)
    lines = weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    part = tl.load(lines, mask=is_row[:, None] & (columns < num_in)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((STRIP, STRIDE), tl.float32)
    for start in range(0, num_in, STRIDE):
        factors = tl.load(x + start + columns, mask=start + columns < num_in, other=0.0)
        sums += part.to(tl.float32) * factors.to(tl.float32)[None, :]
        following = start + STRIDE + columns
        part = tl.load(lines + start + STRIDE, mask=is_row[:, None] & (following < num_in)[None, :], other=0.0)
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@kernel
def _one_row_fp8(
    x, weight, scales, bias, out, num_out, num_in,
    STRIP: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Four values a word (see `words`). Moved to the right bits they are float32 values, too small by 2 ** 120."""
    let_next_begin(OVERLAPS)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row = rows < num_out
    places = tl.arange(0, WORDS)
    num_words = num_in // 4
    lines = weight + rows.to(tl.int64)[:, None] * num_words + places[None, :]
    words = tl.load(lines, mask=is_row[:, None] & (places < num_words)[None, :], other=0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((STRIP, WORDS), tl.float32)
    for start in range(0, num_words, WORDS):
        here = start + places
        columns = here // SPAN * (4 * SPAN) + here % SPAN
        for byte in tl.static_range(4):
            factors = tl.load(x + columns + byte * SPAN, mask=here < num_words, other=0.0).to(tl.float32)
            moved = ((words << (24 - 8 * byte)) >> 4) & -0x78100000  # sign and the seven bits after four more of it
            sums += moved.to(tl.float32, bitcast=True) * factors[None, :]
        following = start + WORDS
        inside = is_row[:, None] & (following + places < num_words)[None, :]
        words = tl.load(lines + following, mask=inside, other=0)
    result = tl.sum(sums, axis=1) * (tl.load(scales + rows, mask=is_row, other=0.0) * 1.329227995784916e36)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@dataclass(frozen=True)
class Shape:
    """How a strip is cut: matrix rows a program owns, columns it takes at a time."""

    strip: int
    stride: int
    warps: int
    stages: int = 3


def shape_for(num_out: int, num_in: int) -> Shape:
    """As measured on an H200."""
    if num_out >= 16384 or num_out * num_in < 1 << 24:
        return Shape(2, 2048, 4)
    return Shape(8, 512, 4) if num_out > 4096 else Shape(4, 512, 4)


def one_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape | None = None
) -> torch.Tensor:
    """x [1, num_in], weight [num_out, num_in] → [1, num_out]"""
    x = x.contiguous()
    num_out, num_in = weight.shape
    out = x.new_empty(1, num_out)
    cut = shape or shape_for(num_out, num_in)
    _one_row[(triton.cdiv(num_out, cut.strip),)](
        x, weight, bias if bias is not None else x, out, num_out, num_in, cut.strip, cut.stride, bias is not None,
        num_warps=cut.warps, num_stages=cut.stages, **launch_options(),
    )  # fmt: skip
    return out


def one_row_fp8_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    span: int,
    bias: torch.Tensor | None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [1, num_in], words int32 [num_out, num_in / 4], scales float32 [num_out] → [1, num_out]"""
    x = x.contiguous()
    num_out = len(words)
    out = x.new_empty(1, num_out)
    cut = shape or (Shape(8, 256, 4) if num_out > 4096 else Shape(4, 512, 4))
    _one_row_fp8[(triton.cdiv(num_out, cut.strip),)](
        x, words, scales, bias if bias is not None else x, out, num_out, x.shape[1], cut.strip, cut.stride, span,
        bias is not None, num_warps=cut.warps, **launch_options(),
    )  # fmt: skip
    return out
