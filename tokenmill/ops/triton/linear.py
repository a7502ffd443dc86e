"""Matrices on a GPU: cuBLAS, and for a few rows kernels of our own that read the matrix at the memory's speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tokenmill.ops.interface import Dense, LinearWeight
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton import strips
from tokenmill.ops.triton.quantized import (
    GROUP_SIZE,
    Fp8Matrix,
    WordMatrix,
    fp8_linear,
    kept_int4,
    to_fp8,
    to_int4,
    word_linear,
)
from tokenmill.ops.triton.skinny import one_row_linear

KEPT_WHOLE = ("head.weight", "router.weight")  # small, or the last thing that should be rounded


class PackLinear:
    """Stacks matrices by rows and, if asked to, quantises them."""

    def __init__(self, quantization: str) -> None:
        self._quantization = quantization

    def __call__(self, parts: Sequence[RawTensor], bias: torch.Tensor | None, dense: Dense) -> LinearWeight:
        if self._quantization == "int4" and all(_stays(part) for part in parts):
            device = dense(RawTensor("", (0,), torch.empty(0))).device
            kept = kept_int4(torch.cat([part.data.to(device) for part in parts]))
            return LinearWeight(len(kept.words), parts[0].shape[1], kept, bias)
        matrix = dense(parts[0]) if len(parts) == 1 else torch.cat([dense(part) for part in parts])
        rows, columns = matrix.shape
        return LinearWeight(rows, columns, self._packed(matrix, parts[0].name), bias)

    def _packed(self, matrix: torch.Tensor, name: str) -> torch.Tensor | Fp8Matrix | WordMatrix:
        if self._quantization == "none" or name.endswith(KEPT_WHOLE) or matrix.shape[1] % GROUP_SIZE:
            return matrix
        return to_fp8(matrix) if self._quantization == "fp8" else to_int4(matrix)


def _stays(part: RawTensor) -> bool:
    """Has 4 bits already, and is not kept whole."""
    return part.quant == "Q4_0" and not part.name.endswith(KEPT_WHOLE) and part.shape[-1] % GROUP_SIZE == 0


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    matrix = weight.packed
    if not len(x):  # a chunk of a prompt whose results nobody looks at
        return x.new_empty(0, weight.rows)
    if isinstance(matrix, WordMatrix):
        return word_linear(x, matrix, weight.bias)
    if isinstance(matrix, Fp8Matrix):
        return fp8_linear(x, matrix, weight.bias)
    if len(x) == 1 and matrix.dtype != torch.float32:
        return one_row_linear(x, matrix, weight.bias)
    if cut := strips.cut_for(len(x), *matrix.shape, matrix.dtype):
        return strips.strip_linear(x, matrix, weight.bias, cut)
    return functional.linear(x, matrix, weight.bias)
