"""Quantised matrices, and the products with them. Made of plain ones while they are loaded:

fp8     e4m3 values, one float32 scale a row; half the bytes of bfloat16
int4    values of -8 to 7 in groups of 128 columns with a scale each; a quarter of the bytes
int8    values of -127 to 127 in groups of 32, which is Q8_0; half the bytes

What a file has quantised already becomes words too, without being rounded again (`kept_words`; `arch/packed_formats.py`
says which formats those are, and in what form).

A few rows are multiplied in their own precision while the matrix streams through: fp8 by splitting the rows (see
`planes`), the others by expanding the matrix on its way (see `strips`, and `halves` for a single row and 4 bits).
Many rows: fp8 rounds the rows too and takes the fp8 matrix units (dozens on Hopper by `wide_products`, others by
cuBLAS); the other matrices are expanded in registers up to some hundred rows on Hopper (see `wide_strips`), and before
the product where there are more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from tokenmill.arch.gguf_types import GGML_TYPE_BY_NAME
from tokenmill.arch.packed_formats import EXPANDED_BYTES, INT4_GROUP, INT8_GROUP, PackedIntFormat
from tokenmill.ops.batch import Mode
from tokenmill.ops.blocks import FORMATS as BLOCK_FORMATS
from tokenmill.ops.cpu.packing import quantized_q8
from tokenmill.ops.triton.gemm import splitk
from tokenmill.ops.triton.gemm.hopper_select import hopper_linear, takes_hopper_gemm
from tokenmill.ops.triton.gemm.splitk import packed_splitk_linear, pick_packed_splitk_config
from tokenmill.ops.triton.launch.capabilities import has_gluon
from tokenmill.ops.triton.quant import gemm_fp8_split, gemv_int4
from tokenmill.ops.triton.quant.gemm_fp8_split import FP8, Fp8Rows
from tokenmill.ops.triton.quant.gemv_int4 import Fp16PairRow
from tokenmill.ops.triton.quant.packed_int import dequantize_packed, pack_ints, paired, unpack_ints, unpaired

MAX_WIDE_ROWS, WIDE_SPAN = 512, 32  # of `wide_strips`
INT4_SPANS = (32, 16)
NUM_CODES = {"Q4_1": 16, "Q4_K": 16, "Q5_1": 32, "Q5_K": 32}  # of formats with minima


@dataclass(frozen=True)
class Fp8Matrix:
    values: torch.Tensor  # fp8 [rows, columns]
    scales: torch.Tensor  # float32 [rows]


@dataclass(frozen=True)
class PackedIntMatrix:
    """Values of 4 or 8 bits as words, and their scales, with minima or without (see `words`)."""

    words: torch.Tensor  # int32 [rows, columns * bits / 32]
    scales: torch.Tensor  # [groups, rows]
    span: int
    bits: int
    dtype: torch.dtype = torch.bfloat16  # of rows that are looked up in it
    row_scales: torch.Tensor | None = None  # [rows, groups]: once more as one row reads them best (see `halves`)

    @property
    def num_columns(self) -> int:
        return self.words.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        return self.num_columns // len(self.scales)


def to_fp8(matrix: torch.Tensor) -> Fp8Matrix:
    scales = (matrix.abs().amax(dim=1).float() / 448.0).clamp_(min=1e-12)
    values = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    for part in _parts(len(matrix)):
        values[part] = (matrix[part].float() / scales[part, None]).clamp_(-448, 448).to(FP8)
    return Fp8Matrix(values, scales)


def to_int4(matrix: torch.Tensor) -> PackedIntMatrix:
    num_rows, num_columns = matrix.shape
    span = _int4_span(num_columns)
    words = torch.empty(num_rows, num_columns // 8, dtype=torch.int32, device=matrix.device)
    scales = torch.empty(num_rows, num_columns // INT4_GROUP, dtype=matrix.dtype, device=matrix.device)
    for part in _parts(num_rows):
        groups = matrix[part].float().view(-1, num_columns // INT4_GROUP, INT4_GROUP)
        # The value of largest magnitude becomes -8: that end of the range reaches one further.
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale = (extreme / -8.0).to(matrix.dtype)
        safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        codes = ((groups / safe).round().clamp_(-8, 7) + 8).to(torch.uint8)
        words[part] = pack_ints(codes.flatten(1), span, 4)
        scales[part] = scale.squeeze(2)
    return _with_row_scales(PackedIntMatrix(words, scales.t().contiguous(), span, 4))


def to_int8(matrix: torch.Tensor) -> PackedIntMatrix:
    form = PackedIntFormat(8, INT8_GROUP, has_minima=False, span=32)
    made = [_pack_rows(quantized_q8(matrix[part].float()), "Q8_0", form) for part in _parts(len(matrix))]
    return joined([PackedIntMatrix(words, scales, form.span, form.bits) for words, scales in made])


def packed_from_blocks(
    blocks: torch.Tensor, quant: str, form: PackedIntFormat, dtype: torch.dtype = torch.bfloat16
) -> PackedIntMatrix:
    """uint8 [rows, bytes] of a file's blocks as they are"""
    made = [_pack_rows(blocks[part], quant, form) for part in _parts(len(blocks))]
    matrix = joined([PackedIntMatrix(words, scales, form.span, form.bits, dtype) for words, scales in made])
    return matrix if form.is_of_experts else _with_row_scales(matrix)


def _with_row_scales(matrix: PackedIntMatrix) -> PackedIntMatrix:
    is_plain = has_gemv_int4(matrix) and matrix.group == INT4_GROUP and matrix.scales.dtype != torch.int32
    return replace(matrix, row_scales=matrix.scales.t().contiguous()) if is_plain else matrix


def joined(matrices: Sequence[PackedIntMatrix]) -> PackedIntMatrix:
    """Matrices of one form, stacked by rows"""
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
    forms = {(matrix.bits, matrix.span, matrix.group, matrix.scales.dtype) for matrix in (one, other)}
    return len(forms) == 1


def interleaved(first: PackedIntMatrix, second: PackedIntMatrix, num_parts: int) -> PackedIntMatrix:
    """Both in as many parts of lines, one of the first before one of the second: gates and ups of experts"""

    def mixed(one: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
        parts = (one.unflatten(dim, (num_parts, -1)), other.unflatten(dim, (num_parts, -1)))
        return torch.cat(parts, dim=dim + 1).flatten(dim, dim + 1)

    return replace(first, words=mixed(first.words, second.words, 0), scales=mixed(first.scales, second.scales, 1))


def _pack_rows(blocks: torch.Tensor, quant: str, form: PackedIntFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and scales. Values are -8 to 7 of 4 bits also where codes began at 0: the minimum is the middle's then."""
    parts = BLOCK_FORMATS[quant](blocks.reshape(-1, GGML_TYPE_BY_NAME[quant].block_bytes))
    codes = parts.codes.reshape(len(blocks), -1)
    every = form.group // parts.codes.shape[2]  # neighbouring groups are alike
    scales = parts.scales.view(len(blocks), -1)[:, ::every]
    zero = parts.zero
    if parts.minima is not None:
        zero = NUM_CODES[quant] // 2
        scales = paired(scales, parts.minima.view(len(blocks), -1)[:, ::every] + zero * scales)
    stored = codes + ((1 << (form.bits - 1)) - zero)
    scales = scales if parts.minima is not None else scales.to(torch.float16)
    return pack_ints(stored, form.span, form.bits), scales.t().contiguous()


def _int4_span(num_columns: int) -> int:
    return next(span for span in INT4_SPANS if num_columns % (8 * span) == 0)


def _parts(num_rows: int) -> list[slice]:
    """float32 copies are made of some rows at a time."""
    return [slice(start, start + 8192) for start in range(0, num_rows, 8192)]


def expanded(matrix: Fp8Matrix | PackedIntMatrix) -> torch.Tensor:
    """[rows, columns] in the scales' dtype, in plain torch: what the kernels are held against"""
    if isinstance(matrix, Fp8Matrix):
        return matrix.values.to(matrix.scales.dtype) * matrix.scales.unsqueeze(1)
    values = unpack_ints(matrix.words, matrix.span, matrix.bits)
    scales, minima = unpaired(matrix.scales.t())
    groups = (values.view(*scales.shape, -1).to(scales.dtype) - (1 << (matrix.bits - 1))) * scales.unsqueeze(2)
    return (groups if minima is None else groups + minima.unsqueeze(2)).flatten(1)


def fp8_gemm(
    rows: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, mode: Mode
) -> torch.Tensor:
    """Rows as planes → [R, num_out]"""
    if rows.planes.shape[1] == 2:
        return gemm_fp8_split.gemm_fp8_split(rows, matrix.values, matrix.scales, bias, dtype)
    plane = rows.planes.squeeze(1)
    if takes_hopper_gemm(plane, matrix.values, mode):
        return hopper_linear(plane, matrix.values, bias, row_scales=rows.scales, scales=matrix.scales, dtype=dtype)
    return torch._scaled_mm(
        plane, matrix.values.t(), rows.scales, matrix.scales.unsqueeze(0), bias=bias, out_dtype=dtype
    )  # fmt: skip


def fp8_linear(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, mode: Mode) -> torch.Tensor:
    return fp8_gemm(gemm_fp8_split.quantize_rows(x), matrix, bias, x.dtype, mode)


def has_gemv_int4(matrix: PackedIntMatrix) -> bool:
    """Whether a single row in halves can be multiplied with it"""
    return matrix.bits == 4 and matrix.span == gemv_int4.SPAN


def gemv_int4_linear(
    row: Fp16PairRow | torch.Tensor, matrix: PackedIntMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    scales = matrix.scales if matrix.row_scales is None else matrix.row_scales
    return gemv_int4.gemv_int4(row, matrix.words, scales, matrix.group, bias, dtype)


def packed_int_linear(x: torch.Tensor, matrix: PackedIntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    if len(x) == 1 and has_gemv_int4(matrix) and x.dtype != torch.float32:
        return gemv_int4_linear(x, matrix, bias, x.dtype)
    if _takes_hopper_gemm_int(x, matrix):
        # Gluon takes 0.1 s to import, for which a start without such matrices need not wait.
        from tokenmill.ops.triton.quant.hopper_gemm_int import hopper_int_linear

        return hopper_int_linear(x, matrix.words, matrix.scales, matrix.bits, bias)
    if cut := pick_packed_splitk_config(len(x), *matrix.words.shape, matrix.span, matrix.bits):
        return packed_splitk_linear(x, matrix.words, matrix.scales, matrix.bits, bias, cut)
    lines = max(1, EXPANDED_BYTES // (matrix.num_columns * x.element_size()))
    if len(matrix.words) <= lines:
        return functional.linear(x, dequantized_rows(matrix, slice(None), x.dtype), bias)
    out = x.new_empty(len(x), len(matrix.words))
    for start in range(0, len(matrix.words), lines):
        part = slice(start, start + lines)
        torch.mm(x, dequantized_rows(matrix, part, x.dtype).t(), out=out[:, part])
    return out if bias is None else out.add_(bias)


def _takes_hopper_gemm_int(x: torch.Tensor, matrix: PackedIntMatrix) -> bool:
    is_between = splitk.MAX_ROWS < len(x) <= MAX_WIDE_ROWS
    return is_between and matrix.span == WIDE_SPAN and x.dtype != torch.float32 and has_gluon(x.device)


def dequantized_rows(matrix: PackedIntMatrix, lines: slice, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_packed(matrix.words[lines], matrix.scales[:, lines], matrix.span, matrix.bits, dtype)


def rows_of(matrix: PackedIntMatrix, places: torch.Tensor) -> torch.Tensor:
    """Those rows, expanded: [places, columns]"""
    words, scales = matrix.words[places], matrix.scales[:, places]
    return dequantize_packed(words, scales, matrix.span, matrix.bits, matrix.dtype)
