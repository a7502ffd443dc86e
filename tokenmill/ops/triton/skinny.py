"""Products of a few rows with a big matrix: the time is what reading the matrix once takes.

One program owns a strip of matrix rows and streams along them. With one input row the products are plain
multiply-adds; with more the matrix units take a tile of 16 to 64 rows, of which the missing ones are zero. Quantised
matrices are expanded in registers, on their way from memory to the product. The first part of the strip is fetched
before the kernel that computes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous

MAX_ROWS = 16
GROUP = tl.constexpr(128)  # columns that share a scale in the 4-bit format


@triton.jit
def _one_row(
    x, weight, scales, bias, out, num_out, num_in,
    STRIP: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
    if IS_SCALED:
        result *= tl.load(scales + rows, mask=is_row, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _few_rows(
    x, weight, scales, bias, out, num_rows, num_out, num_in,
    ROWS: tl.constexpr, STRIP: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SCALED: tl.constexpr,
    COMPUTE: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    inputs = tl.arange(0, ROWS)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row, is_input = rows < num_out, inputs < num_rows
    columns = tl.arange(0, STRIDE)
    lines = weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    sources = x + inputs[:, None] * num_in + columns[None, :]
    inside = (columns < num_in)[None, :]
    part = tl.load(lines, mask=is_row[:, None] & inside, other=0.0)
    wait_for_previous(OVERLAPS)
    factors = tl.load(sources, mask=is_input[:, None] & inside, other=0.0).to(COMPUTE)
    sums = tl.dot(factors, tl.trans(part.to(COMPUTE)))
    for start in range(STRIDE, num_in, STRIDE):
        inside = (start + columns < num_in)[None, :]
        factors = tl.load(sources + start, mask=is_input[:, None] & inside, other=0.0).to(COMPUTE)
        part = tl.load(lines + start, mask=is_row[:, None] & inside, other=0.0)
        sums = tl.dot(factors, tl.trans(part.to(COMPUTE)), sums)
    if IS_SCALED:
        sums *= tl.load(scales + rows, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + inputs[:, None] * num_out + rows[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_input[:, None] & is_row[None, :])


@triton.jit
def _one_row_fp8(
    x, weight, scales, bias, out, num_out, num_in,
    STRIP: tl.constexpr, WORDS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Four values a word. Moved into the right bits they are float32 values, all too small by the same 2 ** 120."""
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
        inside = start + places < num_words
        for byte in tl.static_range(4):
            factors = tl.load(x + (start + places) * 4 + byte, mask=inside, other=0.0).to(tl.float32)
            moved = ((words << (24 - 8 * byte)) >> 4) & -0x78100000  # sign and the seven bits after four more of it
            sums += moved.to(tl.float32, bitcast=True) * factors[None, :]
        following = start + WORDS
        inside = is_row[:, None] & (following + places < num_words)[None, :]
        words = tl.load(lines + following, mask=inside, other=0)
    result = tl.sum(sums, axis=1) * (tl.load(scales + rows, mask=is_row, other=0.0) * 1.329227995784916e36)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _one_row_4bit(
    x, weight, scales, bias, out, num_out, num_in,
    STRIP: tl.constexpr, WORDS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Bits [4i, 4i + 4) of word w in a group are its column 16i + w, so that neighbouring words need neighbouring
    columns. Put behind the exponent of 1 the bits are 1 + value / 16."""
    let_next_begin(OVERLAPS)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row = rows < num_out
    places = tl.arange(0, WORDS)
    num_words = num_in // 8
    words_a_group: tl.constexpr = GROUP // 8
    lines = weight + rows.to(tl.int64)[:, None] * num_words + places[None, :]
    scale_lines = scales + rows.to(tl.int64)[:, None] * (num_in // GROUP) + (places // words_a_group)[None, :]
    inside = is_row[:, None] & (places < num_words)[None, :]
    words = tl.load(lines, mask=inside, other=0)
    scale = tl.load(scale_lines, mask=inside, other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((STRIP, WORDS), tl.float32)
    for start in range(0, num_words, WORDS):
        is_place = start + places < num_words
        part = tl.zeros((STRIP, WORDS), tl.float32)
        here = (start + places) // words_a_group * GROUP + (start + places) % words_a_group
        for i in tl.static_range(8):
            factors = tl.load(x + here + 16 * i, mask=is_place, other=0.0).to(tl.float32)
            moved = (words << (19 - 4 * i)) if i < 5 else (words >> (4 * i - 19))
            value = ((moved & 0x00780000) | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
            part += value * factors[None, :]
        sums += part * scale.to(tl.float32)
        following = start + WORDS
        inside = is_row[:, None] & (following + places < num_words)[None, :]
        words = tl.load(lines + following, mask=inside, other=0)
        scale = tl.load(scale_lines + following // words_a_group, mask=inside, other=0.0)
    result = tl.sum(sums, axis=1) * 16.0
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _few_rows_4bit(
    x, weight, scales, bias, out, num_rows, num_out, num_in,
    ROWS: tl.constexpr, STRIP: tl.constexpr, WORDS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The i-th values of all words are one tile of the matrix, and their columns one tile of x."""
    let_next_begin(OVERLAPS)
    words_a_group: tl.constexpr = GROUP // 8
    inputs = tl.arange(0, ROWS)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row, is_input = rows < num_out, inputs < num_rows
    places = tl.arange(0, WORDS)
    num_words = num_in // 8
    lines = weight + rows.to(tl.int64)[:, None] * num_words + places[None, :]
    scale_lines = scales + rows.to(tl.int64)[:, None] * (num_in // GROUP) + (places // words_a_group)[None, :]
    sources = x + inputs[:, None] * num_in + (places // words_a_group * GROUP + places % words_a_group)[None, :]
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS, STRIP), tl.float32)
    for start in range(0, num_words, WORDS):
        inside = (start + places < num_words)[None, :]
        words = tl.load(lines + start, mask=is_row[:, None] & inside, other=0)
        scale = tl.load(scale_lines + start // words_a_group, mask=is_row[:, None] & inside, other=0.0)
        scale = scale.to(tl.float16)
        for i in tl.static_range(8):
            factors = tl.load(sources + start * 8 + 16 * i, mask=is_input[:, None] & inside, other=0.0)
            # Put behind the bits of 1024 the value is 1024 more than it was.
            moved = (((words >> (4 * i)) & 15) | 0x6400).to(tl.int16)
            value = (moved.to(tl.float16, bitcast=True) - 1032.0).to(tl.float16) * scale
            sums = tl.dot(factors.to(tl.float16), tl.trans(value), sums)
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + inputs[:, None] * num_out + rows[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_input[:, None] & is_row[None, :])


@triton.jit
def _expand_4bit(weight, scales, out, num_in, WORDS: tl.constexpr) -> None:
    words_a_group: tl.constexpr = GROUP // 8
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = places < num_in // 8
    words = tl.load(weight + row * (num_in // 8) + places, mask=inside, other=0)
    scale = tl.load(scales + row * (num_in // GROUP) + places // words_a_group, mask=inside, other=0.0).to(tl.float32)
    columns = places // words_a_group * GROUP + places % words_a_group
    for i in tl.static_range(8):
        value = (((words >> (4 * i)) & 15) - 8).to(tl.float32) * scale
        tl.store(out + row * num_in + columns + 16 * i, value.to(out.dtype.element_ty), mask=inside)


def expand_4bit(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[num_out, num_in] in the scales' dtype"""
    num_out, num_in = weight.shape[0], weight.shape[1] * 2
    out = torch.empty(num_out, num_in, dtype=scales.dtype, device=weight.device)
    grid = (num_out, triton.cdiv(num_in // 8, 512))
    _expand_4bit[grid](weight.view(torch.int32), scales, out, num_in, 512, num_warps=4)
    return out


# fp8 turns into float16 in one instruction, into anything else in several.
COMPUTE_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Shape:
    """How a strip is cut: matrix rows a program owns, columns it takes at a time."""

    strip: int
    stride: int
    warps: int
    stages: int = 3


def shape_for(num_rows: int, num_out: int, num_in: int) -> Shape:
    """As measured on an H200."""
    if num_rows == 1:
        if num_out >= 16384:
            return Shape(2, 2048, 4)
        return Shape(8, 512, 4) if num_out > 4096 else Shape(4, 512, 4)
    return Shape(32, 128, 4, 6)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [1 to 64, num_in], weight [num_out, num_in] plain or fp8 with a float32 scale a row → [rows, num_out]"""
    x = x.contiguous()
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, num_out)
    cut = shape or shape_for(num_rows, num_out, num_in)
    grid = (triton.cdiv(num_out, cut.strip),)
    given, scale = bias if bias is not None else x, scales if scales is not None else x
    flags = (bias is not None, scales is not None)
    if num_rows == 1 and scales is not None:
        cut = shape or (Shape(8, 256, 4) if num_out > 4096 else Shape(4, 512, 4))
        _one_row_fp8[(triton.cdiv(num_out, cut.strip),)](
            x, weight.view(torch.int32), scale, given, out, num_out, num_in, cut.strip, cut.stride, bias is not None,
            num_warps=cut.warps, **launch_options(),
        )  # fmt: skip
    elif num_rows == 1:
        _one_row[grid](
            x, weight, scale, given, out, num_out, num_in, cut.strip, cut.stride, *flags,
            num_warps=cut.warps, num_stages=cut.stages, **launch_options(),
        )  # fmt: skip
    else:
        tile = max(16, triton.next_power_of_2(num_rows))
        _few_rows[grid](
            x, weight, scale, given, out, num_rows, num_out, num_in, tile, cut.strip, cut.stride, *flags,
            COMPUTE_TYPES[x.dtype if scales is None else torch.float16],
            num_warps=cut.warps, num_stages=cut.stages, **launch_options(),
        )  # fmt: skip
    return out


def skinny_linear_4bit(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """weight uint8 [num_out, num_in / 2], scales [num_out, num_in / 128]"""
    x = x.contiguous()
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, num_out)
    given = bias if bias is not None else x
    if num_rows == 1:
        cut = shape or Shape(8, 256, 4)
        _one_row_4bit[(triton.cdiv(num_out, cut.strip),)](
            x, weight.view(torch.int32), scales, given, out, num_out, num_in, cut.strip, cut.stride, bias is not None,
            num_warps=cut.warps, **launch_options(),
        )  # fmt: skip
    else:
        cut = shape or Shape(32, 64, 4, 3)
        tile = max(16, triton.next_power_of_2(num_rows))
        _few_rows_4bit[(triton.cdiv(num_out, cut.strip),)](
            x, weight.view(torch.int32), scales, given, out, num_rows, num_out, num_in, tile, cut.strip, cut.stride,
            bias is not None,
            num_warps=cut.warps, num_stages=cut.stages, **launch_options(),
        )  # fmt: skip
    return out
