"""Matrices of 4-bit codes that index a table of 16 values, with a scale per group of columns: bitsandbytes' nf4 and
fp4, GGUF's IQ4_NL and IQ4_XS. All have the same form and differ in the 16 values only.

A row is cut into spans of 128 columns: 16 words of 32 bits, eight codes each, ordered by lane as in `packed_fp4.py`.
Word 4 lane + group has columns of one group of 32, in pairs of neighbouring columns, whose values a thread passes to
the tensor cores together:

    word 4 lane + group:   columns 32 group + 2 lane + (0, 1, 8, 9, 16, 17, 24, 25), from the lowest bits on

Scales are the file's, [rows, groups], in float32 or float16.

On Hopper values are looked up without memory: one instruction selects four of eight bytes by the lower three bits of
four codes, for the lower and for the upper half of the table, and a third one selects between both by the fourth bit;
the same is done for the upper bytes of the values, which are bfloat16 there. fp4's (as multiples of 1/12) and IQ4's
values are bfloat16 numbers; nf4's are rounded, as multiples of the factor with the smallest rounding error. When a
matrix is expanded, and in the plain Triton kernel, values are the table's float32 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tokenmill.arch.block_formats import BLOCK, BLOCK_TYPES
from tokenmill.arch.packed_formats import FP4_SPAN, TABLE_SCALE_BYTES, PackedIntFormat
from tokenmill.ops.blocks import TABLES, table_parts
from tokenmill.ops.triton.gemm.product import TABLE_FORMS, WeightForm
from tokenmill.ops.triton.launch.kernel import cdiv, kernel

SPAN_WORDS = tl.constexpr(FP4_SPAN // 8)
BYTE_PLANES = 8  # words of a table: lower bytes of codes 0 to 3, 4 to 7, …, then the upper ones
FLOATS = tl.constexpr(8)  # index of the 16 values as float32, which are followed by the factor of sums
FACTOR = 24
ROWS_AT_ONCE = 8192
FACTORS = {"NF4": 1.43701171875, "FP4": 12.0, "IQ4_NL": 1.0, "IQ4_XS": 1.0}
"""The values times these factors are bfloat16 numbers, or (nf4) closest to them: 0.06 % root mean square error instead
of 0.11 %."""


@dataclass(frozen=True)
class TableMatrix:
    """Codes in 32-bit words, their scales, and the name of the table (a key of `TABLES`)."""

    words: torch.Tensor  # int32 [rows, columns / 8]
    scales: torch.Tensor  # float32 or float16 [rows, groups]
    quant: str

    @property
    def num_columns(self) -> int:
        return 8 * self.words.shape[1]

    @property
    def group(self) -> int:
        """Columns that share a scale"""
        return self.num_columns // self.scales.shape[1]

    @property
    def table(self) -> torch.Tensor:
        """Return the table, int32 [25]: bytes of the values for the Hopper kernel, the values, and the factor of
        sums."""
        return table_of(self.quant, self.words.device)

    def form(self, dtype: torch.dtype) -> WeightForm:
        """Form of this matrix in products with activations of `dtype`."""
        return TABLE_FORMS[self.quant, dtype]


@cache
def table_of(quant: str, device: torch.device) -> torch.Tensor:
    values = torch.tensor(TABLES[quant], dtype=torch.float32)
    halves = (values * FACTORS[quant]).to(torch.bfloat16).view(torch.uint8).view(16, 2)
    planes = halves.t().contiguous().view(torch.int32).flatten()
    factor = torch.tensor([1 / FACTORS[quant]], dtype=torch.float32)
    return torch.cat((planes, values.view(torch.int32), factor.view(torch.int32))).to(device)


def table_from_blocks(blocks: torch.Tensor, form: PackedIntFormat) -> TableMatrix:
    """Pack a file's blocks, uint8 [rows, bytes]."""
    quant, block_bytes = form.table, BLOCK_TYPES[form.table].block_bytes
    num_rows, num_columns = len(blocks), blocks.shape[1] // block_bytes * BLOCK_TYPES[quant].block_size
    dtype = torch.float16 if TABLE_SCALE_BYTES[quant] == 2 else torch.float32
    words = torch.empty(num_rows, num_columns // 8, dtype=torch.int32, device=blocks.device)
    scales = torch.empty(num_rows, num_columns // form.group, dtype=dtype, device=blocks.device)
    for first in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        codes, found = table_parts(quant, blocks[part].reshape(-1, block_bytes))
        scales[part] = found.reshape(-1, num_columns // BLOCK)[
            :, :: form.group // BLOCK
        ]  # blocks of a group share their scale
        words[part] = _words_of(codes.reshape(len(words[part]), num_columns))
    return TableMatrix(words, scales, quant)


def _words_of(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes: uint8 [rows, columns] → int32 [rows, columns / 8]."""
    spans = codes.view(len(codes), -1, 4, 4, 4, 2)  # [rows, spans, group, i, lane, neighbour]
    ordered = spans.permute(0, 1, 4, 2, 3, 5)  # [rows, spans, lane, group, i, neighbour]
    packed = ordered[..., 0] | (ordered[..., 1] << 4)
    return packed.contiguous().view(torch.int32).flatten(1)


def stacked_tables(matrices: Sequence[TableMatrix]) -> TableMatrix:
    """Stack matrices of one kind by rows."""
    words, scales = [one.words for one in matrices], [one.scales for one in matrices]
    return TableMatrix(torch.cat(words), torch.cat(scales), matrices[0].quant)


@triton.jit
def code_columns():
    """Return the columns of the first codes of a span's words; code i is i % 2 + i // 2 * 8 columns later."""
    words = tl.arange(0, SPAN_WORDS)
    return words % 4 * 32 + words // 4 * 2


@triton.jit
def scale_columns(GROUP: tl.constexpr):
    """Return the index of the scale of each of a span's words, within the span."""
    return tl.arange(0, SPAN_WORDS) % 4 * 32 // GROUP


@triton.jit
def value_of(words, table, NUMBER: tl.constexpr):
    """Look up value NUMBER of each word, float32, unscaled."""
    found = tl.load(table + FLOATS + ((words >> (4 * NUMBER)) & 15))
    return found.to(tl.float32, bitcast=True)


@kernel
def _dequantize_table(words, scales, table, out, num_out, num_spans, ROWS: tl.constexpr, GROUP: tl.constexpr) -> None:
    """One span of ROWS rows per program; rows beyond the last are clamped."""
    each: tl.constexpr = 8 * SPAN_WORDS
    rows, span = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    read = (rows % num_out).to(tl.int64)[:, None] * num_spans + span
    found = tl.load(words + read * SPAN_WORDS + tl.arange(0, SPAN_WORDS)[None, :])
    own = tl.load(scales + read * (each // GROUP) + scale_columns(GROUP)[None, :]).to(tl.float32)
    a, b = (
        tl.join(value_of(found, table, 0) * own, value_of(found, table, 1) * own),
        tl.join(value_of(found, table, 2) * own, value_of(found, table, 3) * own),
    )
    c, d = (
        tl.join(value_of(found, table, 4) * own, value_of(found, table, 5) * own),
        tl.join(value_of(found, table, 6) * own, value_of(found, table, 7) * own),
    )
    joined = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, 4, 4, 2, 2, 2))  # lane, group, neighbour, ...
    values = tl.reshape(tl.permute(joined, (0, 2, 5, 4, 1, 3)), (ROWS, each))
    target = out + (rows.to(tl.int64)[:, None] * num_spans + span) * each + tl.arange(0, each)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=(rows < num_out)[:, None])


def dequantize_table(matrix: TableMatrix, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Expand some rows of a matrix to `dtype`, [rows, columns]."""
    words, scales = matrix.words[part], matrix.scales[part]
    out = torch.empty(len(words), matrix.num_columns, dtype=dtype, device=words.device)
    num_spans = matrix.num_columns // FP4_SPAN
    _dequantize_table[(cdiv(len(words), 32), num_spans)](
        words, scales, matrix.table, out, len(words), num_spans, 32, matrix.group, num_warps=1
    )
    return out
