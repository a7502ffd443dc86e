"""Matrices on a GPU: cuBLAS, and for a few rows kernels of our own that read the matrix at the memory's speed.

What a file has quantised is computed with as it is. Stacked matrices of which one is quantised otherwise than its
neighbour (a mixed file's q and k in Q4_K, v in Q6_K) are several pieces, whose results lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

from tokenmill.arch.packed_formats import INT4_GROUP, UNQUANTIZED, PackedIntFormat, Stored, packed_int_format
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import Dense, ExpertsWeight, LinearWeight
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton.gemm import splitk
from tokenmill.ops.triton.gemm.gemv import gemv_linear
from tokenmill.ops.triton.gemm.hopper_select import hopper_linear, takes_hopper_gemm
from tokenmill.ops.triton.quant.quantized import (
    Fp8Matrix,
    PackedIntMatrix,
    fp8_linear,
    interleaved,
    is_of_one_form,
    joined,
    packed_from_blocks,
    packed_int_linear,
    to_fp8,
    to_int4,
    to_int8,
)


class PackLinear:
    """Stacks matrices by rows. What a file has quantised stays so (`keeps_blocks`), but not for plain float32, whose
    users want every bit; other matrices are quantised if that is asked for."""

    def __init__(self, quantization: str, *, keeps_blocks: bool = True) -> None:
        self._quantization = quantization
        self._keeps_blocks = keeps_blocks

    def __call__(self, parts: Sequence[RawTensor], bias: torch.Tensor | None, dense: Dense) -> LinearWeight:
        like = dense(RawTensor("", (0,), torch.empty(0)))
        runs = [(form, list(run)) for form, run in groupby(parts, lambda part: self._form(part, like.dtype))]
        pieces = [self._piece(form, run, like, dense) for form, run in runs]
        if len(pieces) == 1:
            return replace(pieces[0], bias=bias)
        if bias is not None:
            split = bias.split([piece.rows for piece in pieces])
            pieces = [replace(piece, bias=one) for piece, one in zip(pieces, split, strict=True)]
        return LinearWeight(sum(piece.rows for piece in pieces), pieces[0].columns, tuple(pieces))

    def embedding(self, raw: RawTensor, dense: Dense) -> LinearWeight:
        like = dense(RawTensor("", (0,), torch.empty(0)))
        form = self._form(raw, like.dtype)
        return self._piece(form, [raw], like, dense) if form else _whole(dense(raw))

    def experts(self, gate: RawTensor, up: RawTensor, down: RawTensor, dense: Dense) -> ExpertsWeight:
        """Gates and ups of each expert one below the other; apart where they are not of one form"""
        gates, ups, downs = (self._of_experts(raw, dense) for raw in (gate, up, down))
        gate_up: Any = gates, ups
        if isinstance(gates, torch.Tensor) and isinstance(ups, torch.Tensor):
            gate_up = torch.cat(gate_up, dim=1)
        elif isinstance(gates, PackedIntMatrix) and isinstance(ups, PackedIntMatrix) and is_of_one_form(gates, ups):
            gate_up = interleaved(gates, ups, gate.shape[0])
        return ExpertsWeight(gate.shape[0], (gate_up, downs))

    def _of_experts(self, raw: RawTensor, dense: Dense) -> torch.Tensor | PackedIntMatrix:
        """Plain [experts, lines, columns], or words with all lines one below the other"""
        like = dense(RawTensor("", (0,), torch.empty(0)))
        form = self._form(raw, like.dtype)
        if form is not None:
            return packed_from_blocks(raw.data.to(like.device).flatten(0, 1), str(raw.quant), form, like.dtype)
        matrices = dense(raw)
        if self._quantization == "none" or raw.shape[-1] % INT4_GROUP:
            return matrices
        made = OF_EXPERTS[self._quantization](matrices.flatten(0, 1))
        return replace(made, scales=made.scales.to(torch.float16), row_scales=None)

    def _form(self, part: RawTensor, dtype: torch.dtype) -> PackedIntFormat | None:
        """None: expanded, or plain to begin with"""
        if part.quant is None or not self._keeps_blocks or (dtype == torch.float32 and self._quantization == "none"):
            return None
        return packed_int_format(part.name, part.shape, Stored(part.quant, part.same_scales))

    def _piece(
        self, form: PackedIntFormat | None, parts: Sequence[RawTensor], like: torch.Tensor, dense: Dense
    ) -> LinearWeight:
        if form is None:
            matrix = dense(parts[0]) if len(parts) == 1 else torch.cat([dense(part) for part in parts])
            return LinearWeight(*matrix.shape, self._packed(matrix, parts[0].name))
        kept = [packed_from_blocks(part.data.to(like.device), str(part.quant), form, like.dtype) for part in parts]
        return LinearWeight(sum(part.shape[0] for part in parts), parts[0].shape[1], joined(kept))

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
"""Experts have no products with fp8 matrices: they take 8 bits with a scale for every 32 columns instead."""


def _whole(matrix: torch.Tensor) -> LinearWeight:
    return LinearWeight(*matrix.shape, matrix)


def linear(x: torch.Tensor, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
    matrix = weight.packed
    if not len(x):  # a chunk of a prompt whose results nobody looks at
        return x.new_empty(0, weight.rows)
    if isinstance(matrix, PackedIntMatrix):
        return packed_int_linear(x, matrix, weight.bias)
    if isinstance(matrix, Fp8Matrix):
        return fp8_linear(x, matrix, weight.bias, mode)
    if isinstance(matrix, tuple):
        return torch.cat([linear(x, piece, mode) for piece in matrix], dim=1)
    if len(x) == 1 and matrix.dtype != torch.float32:
        return gemv_linear(x, matrix, weight.bias)
    if cut := splitk.pick_splitk_config(len(x), *matrix.shape, matrix.dtype):
        return splitk.splitk_linear(x, matrix, weight.bias, cut)
    if takes_hopper_gemm(x, matrix, mode):
        return hopper_linear(x, matrix, weight.bias)
    return functional.linear(x, matrix, weight.bias)
