"""MXFP4 and NVFP4 matrices other than experts': the file's values and scales, in the order that tensor cores expect.

A row is cut into spans of 128 columns: 32 words of 16 bits, four values each, with the bits as drawn in `fp4.py`. The
words of a span are ordered by lane (four), then by group of 32 columns, then by neighbour (two):

    word 8 lane + 2 group + neighbour:   columns 32 group + 2 lane + neighbour + (0, 8, 16, 24)

A lane reads its 16 bytes at once and has exactly the values that it passes to the tensor cores. All values of a word
belong to one group of 32 columns, which has one scale in MXFP4; in NVFP4 the first two values have one scale and the
last two another. Scales are bytes as in the file, [rows, groups]: a shift and an addition turn each into a bfloat16
number, 2 ** 126 times as large for MXFP4, 2 ** 118 times for NVFP4, where a factor per row compensates for the
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.block_formats import BLOCK_TYPES
from tokenmill.arch.packed_formats import FP4_SPAN, MX_GROUP, NV_GROUP
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.quant.fp4 import (
    GROUPS_OF_16,
    NV_RAISED,
    RAISED,
    ROWS_AT_ONCE,
    Fp4Words,
    encoded_words,
    expand_pairs,
    normal_scales,
)
from tokenmill.ops.triton.quant.packed_int import has_ptx

WORDS = tl.constexpr(FP4_SPAN // 4)


class ScaleBits(NamedTuple):
    """How a one-byte scale becomes a bfloat16 number: a shift, then an addition."""

    shift: int
    added: int


MX_SCALE = ScaleBits(7, RAISED << 7)
NV_SCALE = ScaleBits(4, (NV_RAISED + 127 - 10) << 7)
MX_SHIFT, MX_ADDED = tl.constexpr(MX_SCALE.shift), tl.constexpr(MX_SCALE.added)
NV_SHIFT, NV_ADDED = tl.constexpr(NV_SCALE.shift), tl.constexpr(NV_SCALE.added)


class PackedFp4Matrix(Fp4Words):
    """An MXFP4 or NVFP4 matrix in spans of 128 columns; scales uint8 [rows, columns / group]."""


def packed_fp4_from_blocks(blocks: torch.Tensor, quant: str) -> PackedFp4Matrix:
    """Pack a file's blocks, uint8 [rows, bytes]. NV4: scales are multiplied by the matrix's scale; NV4D: divided by
    it."""
    block_bytes, is_mx = BLOCK_TYPES[quant].block_bytes, quant == "MXFP4"
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] // block_bytes * MX_GROUP
    words = torch.empty(num_rows, num_columns // 4, dtype=torch.int16, device=blocks.device)
    num_groups = num_columns // (MX_GROUP if is_mx else NV_GROUP)
    scales = torch.empty(num_rows, num_groups, dtype=torch.uint8, device=blocks.device)
    table = normal_scales().to(blocks.device)
    for first in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        groups = blocks[part].reshape(-1, num_columns // MX_GROUP, block_bytes)
        if is_mx:
            scales[part] = groups[..., 0]
            words[part] = _words_of(groups[..., 1:])
        else:
            found = groups[..., 4:6] & 127
            scales[part] = table[found.long()].flatten(1)
            # A scale of 0 can't be represented as a normal number: its weights become 0 instead.
            words[part] = _words_of(groups[..., 6:], (found == 0).repeat_interleave(NV_GROUP, dim=2))
    if is_mx:
        return PackedFp4Matrix(words, scales)
    whole = blocks.view(num_rows, -1, block_bytes)[:, 0, :4].contiguous().view(torch.float32).squeeze(1)
    lowered = 2.0 ** (RAISED - NV_RAISED)
    return PackedFp4Matrix(words, scales, lowered / whole if quant == "NV4D" else lowered * whole)


def _words_of(packed: torch.Tensor, is_zero: torch.Tensor | None = None) -> torch.Tensor:
    """Reorder nibbles of blocks of 32 columns, uint8 [rows, blocks, 16] → int16 [rows, words]."""
    codes = torch.cat((packed & 15, packed >> 4), dim=2).to(torch.int16)
    codes = codes if is_zero is None else codes.masked_fill_(is_zero, 0)
    codes = codes.view(len(packed), -1, 4, 4, 4, 2)  # [rows, spans, group, i, lane, neighbour]
    return encoded_words(codes.permute(0, 1, 4, 2, 5, 3).unbind(5)).flatten(1)


def stacked_packed_fp4(matrices: Sequence[PackedFp4Matrix]) -> PackedFp4Matrix:
    """Stack matrices of one kind by rows."""
    factors = [one.row_factors for one in matrices if one.row_factors is not None]
    words, scales = [one.words for one in matrices], [one.scales for one in matrices]
    return PackedFp4Matrix(torch.cat(words), torch.cat(scales), torch.cat(factors) if factors else None)


@triton.jit
def span_columns():
    """Return the columns of the first values of a span's words; the other values are 8, 16 and 24 columns later."""
    words = tl.arange(0, WORDS)
    return words // 2 % 4 * 32 + words // 8 * 2 + words % 2


@triton.jit
def load_scales(scales, GROUP: tl.constexpr):
    """Load the scales of a span's words, [rows, WORDS]: for their first two values and for the others, each twice in 32
    bits; `scales` [rows, 1] points at the first scale of each row."""
    groups = (tl.arange(0, WORDS) // 2 % 4)[None, :]
    if GROUP == GROUPS_OF_16:
        first = ((tl.load(scales + 2 * groups).to(tl.int32) << NV_SHIFT) + NV_ADDED) * 0x10001
        second = ((tl.load(scales + 2 * groups + 1).to(tl.int32) << NV_SHIFT) + NV_ADDED) * 0x10001
    else:
        first = ((tl.load(scales + groups).to(tl.int32) << MX_SHIFT) + MX_ADDED) * 0x10001
        second = first
    return first, second


@kernel
def _dequantize_packed_fp4(
    words, scales, factors, out, num_out, num_spans, ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr
) -> None:
    """One span of ROWS rows per program; rows beyond the last are clamped."""
    rows, span = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    read = (rows % num_out).to(tl.int64)[:, None]
    found = tl.load(words + (read * num_spans + span) * WORDS + tl.arange(0, WORDS)[None, :])
    first, second = load_scales(scales + (read * num_spans + span) * (4 * WORDS // GROUP), GROUP)
    a, b, c, d = expand_pairs(found, first, second, HAS_PTX)
    joined = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, 4, 4, 2, 2, 2))  # lane, group, neighbour, ...
    values = tl.reshape(tl.permute(joined, (0, 2, 5, 4, 1, 3)), (ROWS, 4 * WORDS))
    if GROUP == GROUPS_OF_16:
        values = values.to(tl.float32) * tl.load(factors + read)
    target = out + (rows.to(tl.int64)[:, None] * num_spans + span) * (4 * WORDS) + tl.arange(0, 4 * WORDS)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=(rows < num_out)[:, None])


def dequantize_packed_fp4(matrix: PackedFp4Matrix, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Expand some rows of a matrix to `dtype`, [rows, columns]."""
    words, scales = matrix.words[part], matrix.scales[part]
    factors = words if matrix.row_factors is None else matrix.row_factors[part]
    out = torch.empty(len(words), matrix.num_columns, dtype=dtype, device=words.device)
    _dequantize_packed_fp4[(cdiv(len(words), 32), matrix.num_columns // FP4_SPAN)](
        words, scales, factors, out, len(words), matrix.num_columns // FP4_SPAN, 32, matrix.group, has_ptx(),
        num_warps=1,
    )  # fmt: skip
    return out
