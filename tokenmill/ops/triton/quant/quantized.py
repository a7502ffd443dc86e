"""Quantised weight matrices: their storage formats and how they are made. `gemm/select.py` lists the kernels that
multiply by them.

Made from unquantised matrices at load:

fp8     e4m3 values, one float32 scale per row; half the bytes of bfloat16
int4    values of -8 to 7 in groups of 128 columns with a scale each; a quarter of the bytes
int8    values of -127 to 127 in groups of 32 columns, which is Q8_0; half the bytes

A checkpoint's quantised blocks become packed integers without requantisation (`packed_from_blocks`), and its fp8 values
are kept (`fp8_from_blocks`, `fp8_blocks_from_blocks`); `arch/packed_formats.py` lists the formats that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenmill.arch.block_formats import BLOCK, BLOCK_TYPES
from tokenmill.arch.packed_formats import FP8_GROUP, INT4_GROUP, INT8_GROUP, PackedIntFormat
from tokenmill.ops.blocks import FORMATS as BLOCK_FORMATS
from tokenmill.ops.cpu.packing import quantized_q8
from tokenmill.ops.triton.gemm.product import FP8 as FP8_FORMS
from tokenmill.ops.triton.gemm.product import FP8_BLOCKS, FP8_SQUARES, INTERLEAVE, WeightForm, int_form
from tokenmill.ops.triton.quant.packed_int import dequantize_packed, pack_ints, paired, unpack_ints, unpaired

FP8 = torch.float8_e4m3fn
INT4_INTERLEAVES = (INTERLEAVE, 16)
NUM_CODES = {
    "Q4_1": 16,
    "Q4_K": 16,
    "Q5_1": 32,
    "Q5_K": 32,
    "G4": 16,
    "G8": 256,
}  # number of codes of formats with minima or zero points


@dataclass(frozen=True)
class Fp8Matrix:
    values: torch.Tensor  # fp8 [rows, columns]
    scales: torch.Tensor  # float32 [rows]

    def form(self, dtype: torch.dtype) -> WeightForm:
        """Form of this matrix in products with activations of `dtype`."""
        return FP8_FORMS[dtype]


@dataclass(frozen=True)
class Fp8BlockMatrix:
    """A matrix, or the stacked matrices of all experts, with a scale per row and 128 columns. A file's scale per 128 x
    128 block is repeated for each row: 3 % more bytes, but any rows can be stacked."""

    values: torch.Tensor  # fp8 [rows, columns]
    scales: torch.Tensor  # float32 [columns / 128, rows]
    has_squares: bool = False  # the scales are those of 128 x 128 blocks

    @property
    def num_columns(self) -> int:
        return self.values.shape[1]

    def form(self, dtype: torch.dtype) -> WeightForm:
        """Form of this matrix in products with activations of `dtype`."""
        return FP8_SQUARES[dtype] if self.has_squares else FP8_BLOCKS[dtype]


@dataclass(frozen=True)
class PackedIntMatrix:
    """4-bit or 8-bit integers in 32-bit words, and their scales, with or without minima (see `packed_int`)."""

    words: torch.Tensor  # int32 [rows, columns * bits / 32]
    scales: torch.Tensor  # [groups, rows]
    interleave: int  # words whose i-th values are neighbouring columns
    bits: int
    dtype: torch.dtype = torch.bfloat16  # of looked-up rows
    row_scales: torch.Tensor | None = None  # [rows, groups]: a copy of the scales in the order that the GEMV reads

    @property
    def num_columns(self) -> int:
        return self.words.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale"""
        return self.num_columns // len(self.scales)

    def form(self, dtype: torch.dtype) -> WeightForm:
        """Form of this matrix in products with activations of `dtype`."""
        return int_form(dtype, self.bits, self.interleave)


@dataclass(frozen=True)
class OrderedMatrix:
    """A matrix with reordered columns, so that those of a quantisation group are neighbours (act order). Products
    reorder the columns of their inputs in the same way."""

    matrix: PackedIntMatrix
    order: torch.Tensor  # int32 [columns]: the original column of each stored column


def to_fp8(matrix: torch.Tensor) -> Fp8Matrix:
    scales = (matrix.abs().amax(dim=1).float() / 448.0).clamp_(min=1e-12)
    values = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    for part in _parts(len(matrix)):
        values[part] = (matrix[part].float() / scales[part, None]).clamp_(-448, 448).to(FP8)
    return Fp8Matrix(values, scales)


def fp8_from_blocks(blocks: torch.Tensor) -> Fp8Matrix:
    """Convert F8 blocks, uint8 [rows, bytes], with one scale per row."""
    each = blocks.view(len(blocks), -1, BLOCK_TYPES["F8"].block_bytes)
    return Fp8Matrix(each[:, :, 4:].flatten(1).view(FP8), each[:, 0, :4].contiguous().view(torch.float32).view(-1))


def fp8_blocks_from_blocks(blocks: torch.Tensor) -> Fp8BlockMatrix:
    """Convert F8 blocks, uint8 [rows, bytes], with one scale per 128 columns."""
    each = blocks.view(len(blocks), -1, BLOCK_TYPES["F8"].block_bytes)
    every = FP8_GROUP // BLOCK
    scales = each[:, ::every, :4].contiguous().view(torch.float32).squeeze(2).t().contiguous()
    return Fp8BlockMatrix(each[:, :, 4:].flatten(1).view(FP8), scales, _has_squares(scales))


def _has_squares(scales: torch.Tensor) -> bool:
    """Return whether scales [groups, rows] are the same for each 128 rows."""
    if scales.shape[1] % FP8_GROUP:
        return False
    squares = scales.unflatten(1, (-1, FP8_GROUP))
    return bool((squares == squares[..., :1]).all())


def stacked_fp8_blocks(matrices: Sequence[Fp8BlockMatrix]) -> Fp8BlockMatrix:
    values, scales = [one.values for one in matrices], [one.scales for one in matrices]
    return Fp8BlockMatrix(torch.cat(values), torch.cat(scales, dim=1), all(one.has_squares for one in matrices))


def to_int4(matrix: torch.Tensor) -> PackedIntMatrix:
    num_rows, num_columns = matrix.shape
    interleave = _int4_interleave(num_columns)
    words = torch.empty(num_rows, num_columns // 8, dtype=torch.int32, device=matrix.device)
    scales = torch.empty(num_rows, num_columns // INT4_GROUP, dtype=matrix.dtype, device=matrix.device)
    for part in _parts(num_rows):
        groups = matrix[part].float().view(-1, num_columns // INT4_GROUP, INT4_GROUP)
        # The value of largest magnitude becomes -8, since the negative end of the range is larger.
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale = (extreme / -8.0).to(matrix.dtype)
        safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        codes = ((groups / safe).round().clamp_(-8, 7) + 8).to(torch.uint8)
        words[part] = pack_ints(codes.flatten(1), interleave, 4)
        scales[part] = scale.squeeze(2)
    return _with_row_scales(PackedIntMatrix(words, scales.t().contiguous(), interleave, 4))


def to_int8(matrix: torch.Tensor) -> PackedIntMatrix:
    form = PackedIntFormat(8, INT8_GROUP, has_minima=False, span=32)
    made = [_pack_rows(quantized_q8(matrix[part].float()), "Q8_0", form) for part in _parts(len(matrix))]
    return joined([PackedIntMatrix(words, scales, form.span, form.bits) for words, scales in made])


def packed_from_blocks(
    blocks: torch.Tensor, quant: str, form: PackedIntFormat, dtype: torch.dtype = torch.bfloat16
) -> PackedIntMatrix:
    """Pack a file's blocks, uint8 [rows, bytes], without requantisation."""
    made = [_pack_rows(blocks[part], quant, form) for part in _parts(len(blocks))]
    matrix = joined([PackedIntMatrix(words, scales, form.span, form.bits, dtype) for words, scales in made])
    return matrix if form.is_of_experts else _with_row_scales(matrix)


def _with_row_scales(matrix: PackedIntMatrix) -> PackedIntMatrix:
    is_plain = has_gemv_int4(matrix) and matrix.group == INT4_GROUP and matrix.scales.dtype != torch.int32
    return replace(matrix, row_scales=matrix.scales.t().contiguous()) if is_plain else matrix


def joined(matrices: Sequence[PackedIntMatrix]) -> PackedIntMatrix:
    """Stack matrices of one form by rows."""
    if len(matrices) == 1:
        return matrices[0]
    words, scales = [one.words for one in matrices], [one.scales for one in matrices]
    of_rows = [one.row_scales for one in matrices if one.row_scales is not None]
    return replace(
        matrices[0],
        words=torch.cat(words),
        scales=torch.cat(scales, dim=1),
        row_scales=torch.cat(of_rows) if of_rows else None,
    )


def is_of_one_form(one: PackedIntMatrix, other: PackedIntMatrix) -> bool:
    forms = {(matrix.bits, matrix.interleave, matrix.group, matrix.scales.dtype) for matrix in (one, other)}
    return len(forms) == 1


def interleaved(first: PackedIntMatrix, second: PackedIntMatrix, num_parts: int) -> PackedIntMatrix:
    """Interleave two matrices in parts of rows, alternately: gates and ups of experts."""
    words, scales = mixed(first.words, second.words, num_parts), mixed(first.scales, second.scales, num_parts, dim=1)
    return replace(first, words=words, scales=scales)


def interleaved_fp8(first: Fp8BlockMatrix, second: Fp8BlockMatrix, num_parts: int) -> Fp8BlockMatrix:
    """Interleave two fp8 matrices as `interleaved` does."""
    values = mixed(first.values.view(torch.uint8), second.values.view(torch.uint8), num_parts).view(FP8)
    return Fp8BlockMatrix(values, mixed(first.scales, second.scales, num_parts, dim=1))


def mixed(one: torch.Tensor, other: torch.Tensor, num_parts: int, dim: int = 0) -> torch.Tensor:
    """Interleave two tensors in `num_parts` parts of rows (or columns), alternately."""
    parts = (one.unflatten(dim, (num_parts, -1)), other.unflatten(dim, (num_parts, -1)))
    return torch.cat(parts, dim=dim + 1).flatten(dim, dim + 1)


def _pack_rows(blocks: torch.Tensor, quant: str, form: PackedIntFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and scales. 4-bit values are -8 to 7 also for unsigned codes, whose minimum is shifted
    accordingly."""
    parts = BLOCK_FORMATS[quant](blocks.reshape(-1, BLOCK_TYPES[quant].block_bytes))
    codes = parts.codes.reshape(len(blocks), -1)
    every = form.group // parts.codes.shape[2]  # neighbouring groups share their scales
    scales = parts.scales.view(len(blocks), -1)[:, ::every]
    zero = parts.zero
    minima = parts.minima if parts.zeros is None else -parts.scales * parts.zeros
    if minima is not None:
        zero = NUM_CODES[quant] // 2
        scales = paired(scales, minima.view(len(blocks), -1)[:, ::every] + zero * scales)
    stored = codes + ((1 << (form.bits - 1)) - zero)
    scales = scales if minima is not None else scales.to(torch.float16)
    return pack_ints(stored, form.span, form.bits), scales.t().contiguous()


def _int4_interleave(num_columns: int) -> int:
    return next(words for words in INT4_INTERLEAVES if num_columns % (8 * words) == 0)


def _parts(num_rows: int) -> list[slice]:
    """Return slices of rows, to limit the size of float32 copies."""
    return [slice(start, start + 8192) for start in range(0, num_rows, 8192)]


def expanded(matrix: Fp8Matrix | Fp8BlockMatrix | PackedIntMatrix) -> torch.Tensor:
    """Expand a matrix to the scales' dtype [rows, columns], in plain torch: the reference for the kernels."""
    if isinstance(matrix, Fp8BlockMatrix):
        return matrix.values.float() * matrix.scales.t().repeat_interleave(FP8_GROUP, dim=1)
    if isinstance(matrix, Fp8Matrix):
        return matrix.values.to(matrix.scales.dtype) * matrix.scales.unsqueeze(1)
    values = unpack_ints(matrix.words, matrix.interleave, matrix.bits)
    scales, minima = unpaired(matrix.scales.t())
    groups = (values.view(*scales.shape, -1).to(scales.dtype) - (1 << (matrix.bits - 1))) * scales.unsqueeze(2)
    return (groups if minima is None else groups + minima.unsqueeze(2)).flatten(1)


def has_gemv_int4(matrix: PackedIntMatrix) -> bool:
    """Return whether the GEMV for 4-bit matrices supports this one."""
    return matrix.bits == 4 and matrix.interleave == INTERLEAVE


def dequantized_rows(matrix: PackedIntMatrix, part: slice, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_packed(matrix.words[part], matrix.scales[:, part], matrix.interleave, matrix.bits, dtype)


def rows_of(matrix: PackedIntMatrix, row_ids: torch.Tensor) -> torch.Tensor:
    """Look up and expand rows: [row_ids, columns]."""
    words, scales = matrix.words[row_ids], matrix.scales[:, row_ids]
    return dequantize_packed(words, scales, matrix.interleave, matrix.bits, matrix.dtype)
