"""Linear layers on a GPU: packing of matrices, and products by the kernel that `gemm/select.py` chooses.

Matrices that are quantised in the checkpoint are used without requantisation. Stacked matrices of different formats (a
mixed file's q and k in Q4_K, v in Q6_K) are several pieces, whose results are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from tokenmill.arch.packed_formats import INT4_GROUP, UNQUANTIZED, PackedIntFormat, StoredFormat, packed_int_format
from tokenmill.arch.spec import Activation
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import Dense, ExpertsWeight, LinearWeight
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton.elementwise.activation import FUSED_KINDS, act_mul
from tokenmill.ops.triton.elementwise.gather import reorder_columns
from tokenmill.ops.triton.gemm.product import PLAIN, Epilogue
from tokenmill.ops.triton.gemm.select import Choice, choose
from tokenmill.ops.triton.launch.capabilities import capabilities_of, has_fp8, keeps_fp4_on
from tokenmill.ops.triton.quant.fp4 import (
    BLOCK_BYTES,
    Fp4Matrix,
    fp4_from_blocks,
    has_fitting_scales,
    interleaved_fp4,
)
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows, quantize_rows
from tokenmill.ops.triton.quant.gemv_int4 import Fp16PairRow
from tokenmill.ops.triton.quant.packed_fp4 import packed_fp4_from_blocks, stacked_packed_fp4
from tokenmill.ops.triton.quant.packed_table import stacked_tables, table_from_blocks
from tokenmill.ops.triton.quant.quantized import (
    Fp8BlockMatrix,
    Fp8Matrix,
    OrderedMatrix,
    PackedIntMatrix,
    fp8_blocks_from_blocks,
    fp8_from_blocks,
    interleaved,
    interleaved_fp8,
    is_of_one_form,
    joined,
    packed_from_blocks,
    stacked_fp8_blocks,
    to_fp8,
    to_int4,
    to_int8,
)


class PackLinear:
    """Packs matrices, stacked by rows. Matrices quantised in the checkpoint stay quantised (`keeps_blocks`), except for
    float32 computation; others are quantised if `quantization` says so."""

    def __init__(self, quantization: str, *, keeps_blocks: bool = True) -> None:
        self._quantization = quantization
        self._keeps_blocks = keeps_blocks

    def __call__(self, parts: Sequence[RawTensor], bias: torch.Tensor | None, dense: Dense) -> LinearWeight:
        like = dense(RawTensor("", (0,), torch.empty(0)))
        runs = [(form, list(run)) for (form, _), run in groupby(parts, lambda part: self._form_and_order(part, like))]
        pieces = [self._piece(form, run, like, dense) for form, run in runs]
        if len(pieces) == 1:
            return replace(pieces[0], bias=bias)
        if bias is not None:
            split = bias.split([piece.rows for piece in pieces])
            pieces = [replace(piece, bias=one) for piece, one in zip(pieces, split, strict=True)]
        return LinearWeight(sum(piece.rows for piece in pieces), pieces[0].columns, tuple(pieces))

    def embedding(self, raw: RawTensor, dense: Dense) -> LinearWeight:
        like = dense(RawTensor("", (0,), torch.empty(0)))
        form = self._form(raw, like)
        is_looked_up = form is not None and not form.is_fp8 and not form.column_bytes
        return self._piece(form, [raw], like, dense) if is_looked_up else _whole(dense(raw))

    def experts(
        self,
        gate: RawTensor | None,
        up: RawTensor,
        down: RawTensor,
        dense: Dense,
        shared: tuple[RawTensor, RawTensor, RawTensor] | None = None,
    ) -> ExpertsWeight:
        """Pack experts with gate rows stacked above up rows, or separately if their forms differ. A shared expert is
        appended to the routed ones if all are unquantised."""
        if gate is None:
            packed = self._of_experts(up, dense), self._of_experts(down, dense)
            return ExpertsWeight(up.shape[0], packed, is_gated=False)
        gates, ups, downs = (self._of_experts(raw, dense) for raw in (gate, up, down))
        num_shared, inter = 0, gate.shape[1]
        is_divided = shared is not None and shared[0].shape[0] % inter == 0  # also for a rank's part of both
        if shared is not None and is_divided and self._are_plain((gate, up, down, *shared)):
            num_shared = shared[0].shape[0] // inter
            more_gates, more_ups, more_downs = map(dense, shared)
            more_downs = more_downs.view(-1, num_shared, inter).transpose(0, 1)
            more = more_gates.view(num_shared, inter, -1), more_ups.view(num_shared, inter, -1), more_downs
            routed = (one for one in (gates, ups, downs) if isinstance(one, torch.Tensor))
            gates, ups, downs = (torch.cat(both) for both in zip(routed, more, strict=True))
        gate_up: Any = gates, ups
        if isinstance(gates, torch.Tensor) and isinstance(ups, torch.Tensor):
            gate_up = torch.cat(gate_up, dim=1)
        elif isinstance(gates, PackedIntMatrix) and isinstance(ups, PackedIntMatrix) and is_of_one_form(gates, ups):
            gate_up = interleaved(gates, ups, gate.shape[0])
        elif isinstance(gates, Fp4Matrix) and isinstance(ups, Fp4Matrix) and gates.group == ups.group:
            gate_up = interleaved_fp4(gates, ups, gate.shape[0])
        elif isinstance(gates, Fp8BlockMatrix) and isinstance(ups, Fp8BlockMatrix):
            gate_up = interleaved_fp8(gates, ups, gate.shape[0])
        return ExpertsWeight(gate.shape[0] + num_shared, (gate_up, downs), num_shared=num_shared)

    def _are_plain(self, raws: Sequence[RawTensor]) -> bool:
        return self._quantization == "none" and all(raw.quant is None for raw in raws)

    def _of_experts(self, raw: RawTensor, dense: Dense) -> torch.Tensor | PackedIntMatrix | Fp4Matrix | Fp8BlockMatrix:
        """Return an unquantised tensor [experts, rows, columns], or a packed matrix of all experts' rows."""
        like = dense(RawTensor("", (0,), torch.empty(0)))
        form = self._form(raw, like)
        if form is not None and form.is_fp4:
            return fp4_from_blocks(raw.data.to(like.device).flatten(0, 1), str(raw.quant))
        if form is not None and form.is_fp8:
            return fp8_blocks_from_blocks(raw.data.to(like.device).flatten(0, 1))
        if form is not None:
            return packed_from_blocks(raw.data.to(like.device).flatten(0, 1), str(raw.quant), form, like.dtype)
        matrices = dense(raw).contiguous()  # a transposed tensor is a view
        if self._quantization == "none" or raw.shape[-1] % INT4_GROUP:
            return matrices
        made = OF_EXPERTS[self._quantization](matrices.flatten(0, 1))
        return replace(made, scales=made.scales.to(torch.float16), row_scales=None)

    def _form(self, part: RawTensor, like: torch.Tensor) -> PackedIntFormat | None:
        """Return the packed form of a tensor; None: it is expanded, or not quantised."""
        is_exact = like.dtype == torch.float32 and self._quantization == "none"
        if not self._keeps_blocks or is_exact:
            return None
        if part.ordered is not None:
            blocks = part.ordered.blocks
            stored = StoredFormat(str(blocks.quant), blocks.blocks_per_scale, is_ordered=True)
            return packed_int_format(part.name, part.shape, stored)
        if part.quant is None:
            return None
        is_widened = not keeps_fp4_on(like.device, like.dtype)
        form = packed_int_format(part.name, part.shape, StoredFormat(part.quant, part.blocks_per_scale, is_widened))
        if form is not None and form.is_fp4:
            return form if has_fitting_scales(part.data, part.quant) else None
        if form is not None and part.quant == "MXFP4":
            return form if _has_moderate_scales(part) else None
        return None if form is not None and form.is_fp8 and not has_fp8(like.device) else form

    def _form_and_order(self, part: RawTensor, like: torch.Tensor) -> tuple[PackedIntFormat | None, bytes]:
        """Return the key by which neighbouring matrices are joined to one: form and column order."""
        form = self._form(part, like)
        is_ordered = form is not None and part.ordered is not None
        return form, part.ordered.order.numpy().tobytes() if is_ordered and part.ordered is not None else b""

    def _piece(
        self, form: PackedIntFormat | None, parts: Sequence[RawTensor], like: torch.Tensor, dense: Dense
    ) -> LinearWeight:
        if form is None:
            matrix = dense(parts[0]) if len(parts) == 1 else torch.cat([dense(part) for part in parts])
            return LinearWeight(len(matrix), matrix.shape[1], self._packed(matrix, parts[0].name))
        if form.is_fp4:
            made = [packed_fp4_from_blocks(part.data.to(like.device), str(part.quant)) for part in parts]
            fp4 = stacked_packed_fp4(made)
            return LinearWeight(len(fp4.words), fp4.num_columns, fp4)
        if form.table:
            codes = [table_from_blocks(part.data.to(like.device), form) for part in parts]
            table = stacked_tables(codes)
            return LinearWeight(len(table.words), table.num_columns, table)
        if form.is_fp8 and form.group < parts[0].shape[-1]:
            fp8 = stacked_fp8_blocks([fp8_blocks_from_blocks(part.data.to(like.device)) for part in parts])
            return LinearWeight(len(fp8.values), fp8.num_columns, fp8)
        if form.is_fp8:
            return _stacked_fp8([fp8_from_blocks(part.data.to(like.device)) for part in parts])
        if form.column_bytes:
            orders = [part.ordered for part in parts if part.ordered is not None]
            blocks = [ordered.blocks for ordered in orders]
            order = orders[0].order.to(like.device, torch.int32)
            return LinearWeight(
                sum(raw.shape[0] for raw in blocks), len(order), OrderedMatrix(_joined(blocks, form, like), order)
            )
        return LinearWeight(sum(part.shape[0] for part in parts), parts[0].shape[1], _joined(parts, form, like))

    def _packed(self, matrix: torch.Tensor, name: str) -> torch.Tensor | Fp8Matrix | PackedIntMatrix:
        if self._quantization == "none" or name.endswith(UNQUANTIZED) or matrix.shape[1] % INT4_GROUP:
            return matrix
        return QUANTISERS[self._quantization](matrix)


QUANTISERS: dict[str, Callable[[torch.Tensor], Fp8Matrix | PackedIntMatrix]] = {
    "fp8": to_fp8,
    "int4": to_int4,
    "int8": to_int8,
}
OF_EXPERTS: dict[str, Callable[[torch.Tensor], PackedIntMatrix]] = {"fp8": to_int8, "int4": to_int4, "int8": to_int8}
"""Experts have no kernels for fp8 with row scales: int8 with a scale per 32 columns is used instead."""


def _joined(parts: Sequence[RawTensor], form: PackedIntFormat, like: torch.Tensor) -> PackedIntMatrix:
    kept = [packed_from_blocks(part.data.to(like.device), str(part.quant), form, like.dtype) for part in parts]
    return joined(kept)


def _stacked_fp8(matrices: Sequence[Fp8Matrix]) -> LinearWeight:
    values = torch.cat([one.values for one in matrices])
    scales = torch.cat([one.scales for one in matrices])
    return LinearWeight(len(values), values.shape[1], Fp8Matrix(values, scales))


def _whole(matrix: torch.Tensor) -> LinearWeight:
    return LinearWeight(len(matrix), matrix.shape[1], matrix)


def linear(x: torch.Tensor, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
    """x [T, columns] → [T, rows], by the kernel that `select` chooses for the matrix and the number of rows"""
    matrix = weight.packed
    if not len(x):  # a chunk of a prompt whose outputs are not needed
        return x.new_empty(0, weight.rows)
    if isinstance(matrix, tuple):
        return torch.cat([linear(x, piece, mode) for piece in matrix], dim=1)
    if isinstance(matrix, Fp8Matrix | Fp8BlockMatrix):
        return fp8_linear(x, matrix, weight.bias, mode)
    if isinstance(matrix, OrderedMatrix):
        x, matrix = reorder_columns(x, matrix.order), matrix.matrix
    form = PLAIN[matrix.dtype] if isinstance(matrix, torch.Tensor) else matrix.form(x.dtype)
    choice = choose(len(x), weight.rows, weight.columns, form, capabilities_of(x.device), mode)
    assert choice is not None, "every product without an epilogue has a kernel"
    return choice.run(x, matrix, weight.bias, x.dtype)


def fp8_linear(
    x: torch.Tensor, matrix: Fp8Matrix | Fp8BlockMatrix, bias: torch.Tensor | None, mode: Mode
) -> torch.Tensor:
    return fp8_gemm(quantize_rows(x), matrix, bias, x.dtype, mode)


def fp8_gemm(
    rows: Fp8Rows, matrix: Fp8Matrix | Fp8BlockMatrix, bias: torch.Tensor | None, dtype: torch.dtype, mode: Mode
) -> torch.Tensor:
    """Multiply quantised rows → [R, rows of the matrix] of `dtype`."""
    gpu = capabilities_of(rows.planes.device)
    choice = choose(len(rows.planes), *matrix.values.shape, matrix.form(dtype), gpu, mode)
    assert choice is not None
    return choice.run(rows, matrix, bias, dtype)


def gemv_int4_linear(
    row: Fp16PairRow | torch.Tensor, matrix: PackedIntMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply one row, as float16 pairs or as it is (of moderate magnitude), by a 4-bit matrix → [1, rows]."""
    form, gpu = matrix.form(torch.float16), capabilities_of(matrix.words.device)
    choice = choose(1, len(matrix.words), matrix.num_columns, form, gpu)
    assert choice is not None
    return choice.run(row, matrix, bias, dtype)


def _has_moderate_scales(part: RawTensor) -> bool:
    """Return whether all scales of an MXFP4 matrix fit in float16, as packed integers require."""
    exponents = part.data.view(*part.data.shape[:-1], -1, BLOCK_BYTES)[..., 0]
    return bool((exponents >= 128 - 24).all()) and bool((exponents <= 128 + 15).all())


def gated_linear(x: torch.Tensor, weight: LinearWeight, activation: Activation, mode: Mode = "eager") -> torch.Tensor:
    """Return act_mul(linear(x)), by a fused kernel if there is one for the matrix and the number of rows."""
    choice = _fused_choice(weight, len(x), mode, "gated") if activation in FUSED_KINDS else None
    if choice is None:
        return act_mul(linear(x, weight, mode), activation)
    return choice.run(x, weight.packed, weight.bias, x.dtype, activation)


def can_add(weight: LinearWeight, num_rows: int, mode: Mode) -> bool:
    """Return whether `add_linear` supports this matrix and number of rows."""
    return _fused_choice(weight, num_rows, mode, "add") is not None


def add_linear(x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor, mode: Mode = "eager") -> torch.Tensor:
    """Return residual + linear(x), which overwrites the residual."""
    choice = _fused_choice(weight, len(x), mode, "add")
    assert choice is not None, "see `can_add`"
    return choice.run(x, weight.packed, None, x.dtype, residual)


def _fused_choice(weight: LinearWeight, num_rows: int, mode: Mode, epilogue: Epilogue) -> Choice | None:
    """Return the kernel that multiplies and applies the epilogue; None if there is none."""
    matrix = weight.packed
    if not isinstance(matrix, torch.Tensor) or not num_rows:
        return None
    gpu, has_bias = capabilities_of(matrix.device), weight.bias is not None
    return choose(num_rows, weight.rows, weight.columns, PLAIN[matrix.dtype], gpu, mode, epilogue, has_bias)
