"""Matrices quantised while they are loaded, and the products with them.

fp8     e4m3 values, one float32 scale a row; half the bytes of bfloat16
int4    values of -8 to 7 in groups of 128 columns with a scale each; a quarter of the bytes. What a file holds as such
        in groups of 32 (Q4_0; GPTQ's, see `weights/group_quantized.py`) stays as it is

A few rows are multiplied while the matrix streams through (see `strips`), in the activations' precision. Many rows:
fp8 rounds the activations too, row by row, and takes the fp8 matrix units; 4-bit matrices are expanded first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tokenmill.ops.triton.kernel import kernel
from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous
from tokenmill.ops.triton.skinny import one_row_fp8_linear
from tokenmill.ops.triton.strips import expanding_strip_linear, words_cut_for
from tokenmill.ops.triton.words import expand_4bit, packed_words, unpacked_words

FP8 = torch.float8_e4m3fn
FP8_MAX = tl.constexpr(448.0)
FP8_SPAN = 32
GROUP_SIZE = 128  # columns that share a scale in the 4-bit format
INT4_SPANS = (32, 16)


@dataclass(frozen=True)
class WordMatrix:
    """Values as words (see `words`), and their scales."""

    words: torch.Tensor  # int32 [rows, columns * bits / 32]
    scales: torch.Tensor  # float32 [rows]; of 4 bits [rows, groups]
    bits: int
    span: int


def to_fp8(matrix: torch.Tensor) -> WordMatrix:
    num_rows, num_columns = matrix.shape
    scales = (matrix.abs().amax(dim=1).float() / 448.0).clamp_(min=1e-12)
    words = torch.empty(num_rows, num_columns // 4, dtype=torch.int32, device=matrix.device)
    for part in _parts(num_rows):
        values = (matrix[part].float() / scales[part, None]).clamp_(-448, 448).to(FP8)
        words[part] = packed_words(values.view(torch.uint8), 8, FP8_SPAN)
    return WordMatrix(words, scales, 8, FP8_SPAN)


def to_int4(matrix: torch.Tensor) -> WordMatrix:
    num_rows, num_columns = matrix.shape
    span = _int4_span(num_columns)
    words = torch.empty(num_rows, num_columns // 8, dtype=torch.int32, device=matrix.device)
    scales = torch.empty(num_rows, num_columns // GROUP_SIZE, dtype=matrix.dtype, device=matrix.device)
    for part in _parts(num_rows):
        groups = matrix[part].float().view(-1, num_columns // GROUP_SIZE, GROUP_SIZE)
        # The value of largest magnitude becomes -8: that end of the range reaches one further.
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale = (extreme / -8.0).to(matrix.dtype)
        safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        codes = ((groups / safe).round().clamp_(-8, 7) + 8).to(torch.uint8)
        words[part] = packed_words(codes.flatten(1), 4, span)
        scales[part] = scale.squeeze(2)
    return WordMatrix(words, scales, 4, span)


def kept_int4(blocks: torch.Tensor) -> WordMatrix:
    """uint8 [rows, bytes] of a file's Q4_0 blocks (a scale, then 32 values: first halves low, second halves high)"""
    parts = blocks.view(len(blocks), -1, 18)
    scales = parts[:, :, :2].contiguous().view(torch.float16).squeeze(2)
    codes = torch.cat((parts[:, :, 2:] & 15, parts[:, :, 2:] >> 4), dim=2).flatten(1)
    span = _int4_span(codes.shape[1])
    return WordMatrix(packed_words(codes, 4, span), scales, 4, span)


def _int4_span(num_columns: int) -> int:
    return next(span for span in INT4_SPANS if num_columns % (8 * span) == 0)


def _parts(num_rows: int) -> list[slice]:
    """float32 copies are made of some rows at a time."""
    return [slice(start, start + 8192) for start in range(0, num_rows, 8192)]


def expanded(matrix: WordMatrix) -> torch.Tensor:
    """[rows, columns] in the scales' dtype, in plain torch: what the kernels are held against"""
    values = unpacked_words(matrix.words, matrix.bits, matrix.span)
    if matrix.bits == 8:
        return values.view(FP8).to(matrix.scales.dtype) * matrix.scales.unsqueeze(1)
    groups = values.view(*matrix.scales.shape, -1).to(matrix.scales.dtype) - 8
    return (groups * matrix.scales.unsqueeze(2)).flatten(1)


@kernel
def _quantize_rows(x, out, scales, size, SPAN: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < size
    columns = places // (4 * SPAN) * (4 * SPAN) + places % 4 * SPAN + places % (4 * SPAN) // 4
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / FP8_MAX, 1e-12)
    tl.store(out + row * size + places, (values / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantized_rows(x: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 [T, columns], the columns in the order of a matrix's bytes, and the scale of each row, float32 [T, 1]"""
    num_rows, size = x.shape
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    _quantize_rows[(num_rows,)](
        x.contiguous(), out, scales, size, span, triton.next_power_of_2(size), num_warps=8, **launch_options()
    )  # fmt: skip
    return out, scales


def word_linear(x: torch.Tensor, matrix: WordMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    if len(x) == 1 and matrix.bits == 8:
        return one_row_fp8_linear(x, matrix.words, matrix.scales, matrix.span, bias)
    if cut := words_cut_for(len(x), *matrix.words.shape, matrix.bits, matrix.span):
        return expanding_strip_linear(x, matrix.words, matrix.scales, bias, cut)
    if matrix.bits == 4:
        return functional.linear(x, expand_4bit(matrix.words, matrix.scales, matrix.span, x.dtype), bias)
    values, scales = quantized_rows(x, matrix.span)
    return torch._scaled_mm(
        values, matrix.words.view(FP8).t(), scales, matrix.scales.unsqueeze(0), bias=bias, out_dtype=x.dtype
    )  # fmt: skip
