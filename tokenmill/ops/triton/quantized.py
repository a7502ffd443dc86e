"""Matrices quantised while they are loaded, and the products with them.

fp8     e4m3 values, one float32 scale a row; half the bytes of bfloat16
int4    values of -8 to 7 in groups of 128 columns with a scale each; a quarter of the bytes. What a file holds as such
        in groups of 32 (Q4_0; GPTQ's, see `weights/group_quantized.py`) stays as it is
int8    values of -127 to 127 in groups of 32, which is Q8_0; half the bytes

A few rows are multiplied in their own precision while the matrix streams through: fp8 by splitting the rows (see
`planes`), the others by expanding the matrix on its way (see `strips`, and `halves` for a single row and 4 bits).
Many rows: fp8 rounds the rows too and takes the fp8 matrix units; the other matrices are expanded first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenmill.ops.cpu.packing import quantized_q8
from tokenmill.ops.triton import halves, planes
from tokenmill.ops.triton.halves import Halves
from tokenmill.ops.triton.planes import FP8, Rounded
from tokenmill.ops.triton.strips import expanding_strip_linear, words_cut_for
from tokenmill.ops.triton.words import expand_words, packed_words, unpacked_words

GROUP_SIZE = 128  # columns that share a scale in the 4-bit format
INT4_SPANS = (32, 16)
Q8_COLUMNS, Q8_BYTES = 32, 34  # of a Q8_0 block: a scale, then its values


@dataclass(frozen=True)
class Fp8Matrix:
    values: torch.Tensor  # fp8 [rows, columns]
    scales: torch.Tensor  # float32 [rows]


@dataclass(frozen=True)
class WordMatrix:
    """Values of 4 or 8 bits as words (see `words`), and their scales."""

    words: torch.Tensor  # int32 [rows, columns * bits / 32]
    scales: torch.Tensor  # [rows, groups]
    span: int
    bits: int

    @property
    def num_columns(self) -> int:
        return self.words.shape[1] * 32 // self.bits


def to_fp8(matrix: torch.Tensor) -> Fp8Matrix:
    scales = (matrix.abs().amax(dim=1).float() / 448.0).clamp_(min=1e-12)
    values = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    for part in _parts(len(matrix)):
        values[part] = (matrix[part].float() / scales[part, None]).clamp_(-448, 448).to(FP8)
    return Fp8Matrix(values, scales)


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
        words[part] = packed_words(codes.flatten(1), span, 4)
        scales[part] = scale.squeeze(2)
    return WordMatrix(words, scales, span, 4)


def kept_int4(blocks: torch.Tensor) -> WordMatrix:
    """uint8 [rows, bytes] of a file's Q4_0 blocks (a scale, then 32 values: first halves low, second halves high)"""
    parts = blocks.view(len(blocks), -1, 18)
    scales = parts[:, :, :2].contiguous().view(torch.float16).squeeze(2)
    codes = torch.cat((parts[:, :, 2:] & 15, parts[:, :, 2:] >> 4), dim=2).flatten(1)
    span = _int4_span(codes.shape[1])
    return WordMatrix(packed_words(codes, span, 4), scales, span, 4)


def to_int8(matrix: torch.Tensor) -> WordMatrix:
    parts = [kept_int8(quantized_q8(matrix[part].float())) for part in _parts(len(matrix))]
    words, scales = torch.cat([part.words for part in parts]), torch.cat([part.scales for part in parts])
    return WordMatrix(words, scales, Q8_COLUMNS, 8)


def kept_int8(blocks: torch.Tensor) -> WordMatrix:
    """uint8 [rows, bytes] of a file's Q8_0 blocks. The i-th values of a span's words are its i-th block."""
    parts = blocks.view(len(blocks), -1, Q8_BYTES)
    scales = parts[:, :, :2].contiguous().view(torch.float16).squeeze(2)
    stored = (parts[:, :, 2:] ^ 128).flatten(1)  # from 0 to 255
    return WordMatrix(packed_words(stored, Q8_COLUMNS, 8), scales, Q8_COLUMNS, 8)


def _int4_span(num_columns: int) -> int:
    return next(span for span in INT4_SPANS if num_columns % (8 * span) == 0)


def _parts(num_rows: int) -> list[slice]:
    """float32 copies are made of some rows at a time."""
    return [slice(start, start + 8192) for start in range(0, num_rows, 8192)]


def expanded(matrix: Fp8Matrix | WordMatrix) -> torch.Tensor:
    """[rows, columns] in the scales' dtype, in plain torch: what the kernels are held against"""
    if isinstance(matrix, Fp8Matrix):
        return matrix.values.to(matrix.scales.dtype) * matrix.scales.unsqueeze(1)
    values = unpacked_words(matrix.words, matrix.span, matrix.bits)
    groups = values.view(*matrix.scales.shape, -1).to(matrix.scales.dtype) - (1 << (matrix.bits - 1))
    return (groups * matrix.scales.unsqueeze(2)).flatten(1)


def rounded_product(rows: Rounded, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows as planes → [R, num_out]"""
    if rows.planes.shape[1] == 2:
        return planes.two_planes_product(rows, matrix.values, matrix.scales, bias, dtype)
    return torch._scaled_mm(
        rows.planes.squeeze(1), matrix.values.t(), rows.scales, matrix.scales.unsqueeze(0), bias=bias, out_dtype=dtype
    )  # fmt: skip


def fp8_linear(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    return rounded_product(planes.rounded_rows(x), matrix, bias, x.dtype)


def has_halves(matrix: WordMatrix) -> bool:
    """Whether a single row in halves can be multiplied with it"""
    has_groups = matrix.num_columns == matrix.scales.shape[1] * halves.GROUP
    return matrix.bits == 4 and matrix.span == halves.SPAN and has_groups


def halves_linear(
    row: Halves | torch.Tensor, matrix: WordMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return halves.halves_product(row, matrix.words, matrix.scales, bias, dtype)


def word_linear(x: torch.Tensor, matrix: WordMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    if cut := words_cut_for(len(x), *matrix.words.shape, matrix.span, matrix.bits):
        return expanding_strip_linear(x, matrix.words, matrix.scales, matrix.bits, bias, cut)
    return functional.linear(x, expand_words(matrix.words, matrix.scales, matrix.span, matrix.bits, x.dtype), bias)
