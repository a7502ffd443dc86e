"""Matrices on a GPU: cuBLAS, and for a few rows kernels of our own that read the matrix at the memory's speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    kept_int8,
    to_fp8,
    to_int4,
    to_int8,
    word_linear,
)
from tokenmill.ops.triton.skinny import one_row_linear

KEPT_WHOLE = ("head.weight", "router.weight")  # small, or the last thing that should be rounded


class PackLinear:
    """Stacks matrices by rows and, if asked to, quantises them."""

    def __init__(self, quantization: str) -> None:
        self._quantization = quantization

    def __call__(self, parts: Sequence[RawTensor], bias: torch.Tensor | None, dense: Dense) -> LinearWeight:
        keep = KEPT_AS_THEY_ARE.get(self._quantization)
        if keep is not None and all(_stays(part, keep[0]) for part in parts):
            device = dense(RawTensor("", (0,), torch.empty(0))).device
            blocks = torch.cat([part.data.to(device) for part in parts])
            return LinearWeight(len(blocks), parts[0].shape[1], keep[1](blocks), bias)
        matrix = dense(parts[0]) if len(parts) == 1 else torch.cat([dense(part) for part in parts])
        rows, columns = matrix.shape
        return LinearWeight(rows, columns, self._packed(matrix, parts[0].name), bias)

    def _packed(self, matrix: torch.Tensor, name: str) -> torch.Tensor | Fp8Matrix | WordMatrix:
        if self._quantization == "none" or name.endswith(KEPT_WHOLE) or matrix.shape[1] % GROUP_SIZE:
            return matrix
        return QUANTISERS[self._quantization](matrix)


QUANTISERS: dict[str, Callable[[torch.Tensor], Fp8Matrix | WordMatrix]] = {
    "fp8": to_fp8,
    "int4": to_int4,
    "int8": to_int8,
}
# What a file holds in blocks of the same kind already is not rounded again.
KEPT_AS_THEY_ARE: dict[str, tuple[str, Callable[[torch.Tensor], WordMatrix]]] = {
    "int4": ("Q4_0", kept_int4),
    "int8": ("Q8_0", kept_int8),
}


def _stays(part: RawTensor, quant: str) -> bool:
    """Has these blocks, and is not kept whole."""
    return part.quant == quant and not part.name.endswith(KEPT_WHOLE) and part.shape[-1] % GROUP_SIZE == 0


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
