"""The properties of a matrix product that kernel selection uses: activations [m, k] times a weight matrix [n, k].

A weight's form is its storage format, not its values: all products of the same form, shape and number of rows use the
same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from tokenmill.arch.packed_formats import TABLE_SCALE_BYTES
from tokenmill.ops.batch import Mode
from tokenmill.ops.triton.launch.capabilities import Capabilities

Kind = Literal["plain", "fp8", "fp8_blocks", "int", "fp4", "table"]
Epilogue = Literal["none", "gated", "add"]
"""What a kernel does with the product: nothing; act(gate) * up of its two halves; add it to the residual stream"""


class WeightForm(NamedTuple):
    kind: Kind
    dtype: torch.dtype  # of the activations
    bits: int  # per value of the matrix
    interleave: int = 0  # packed integers: number of words whose i-th values are neighbouring columns
    dialect: str = ""  # distinguishes formats that the same kernels multiply

    @property
    def element_size(self) -> int:
        """Return the bytes per value, for forms with whole bytes."""
        return self.bits // 8

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        names = {"plain": dtype, "fp8": "fp8", "fp8_blocks": "fp8 in blocks", "int": f"int{self.bits}"}
        return self.dialect or names[self.kind]


INTERLEAVE = 32  # of packed integers, as all kernels support; 16 if rows are too short
PLAIN = {
    dtype: WeightForm("plain", dtype, 8 * dtype.itemsize) for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
FP8 = {dtype: WeightForm("fp8", dtype, 8) for dtype in PLAIN}
FP8_BLOCKS = {dtype: WeightForm("fp8_blocks", dtype, 8) for dtype in PLAIN}
FP8_SQUARES = {dtype: WeightForm("fp8_blocks", dtype, 8, dialect="fp8 in squares") for dtype in PLAIN}
"""One scale per 128 x 128 block: rows are cut at multiples of 128"""
MXFP4 = {dtype: WeightForm("fp4", dtype, 4, dialect="mxfp4") for dtype in PLAIN}
NVFP4 = {dtype: WeightForm("fp4", dtype, 4, dialect="nvfp4") for dtype in PLAIN}
TABLE_FORMS = {
    (quant, dtype): WeightForm("table", dtype, 4, dialect=quant.lower())
    for quant in TABLE_SCALE_BYTES
    for dtype in PLAIN
}
"""4-bit codes that index a table of values"""


@cache
def int_form(dtype: torch.dtype, bits: int, interleave: int) -> WeightForm:
    return WeightForm("int", dtype, bits, interleave)


class Product(NamedTuple):
    m: int  # rows of activations
    n: int  # rows of the matrix
    k: int  # columns
    form: WeightForm
    capabilities: Capabilities
    mode: Mode = "eager"
    epilogue: Epilogue = "none"
    has_bias: bool = False

    @property
    def is_half(self) -> bool:
        """True if activations have 16 bits."""
        return self.form.dtype != torch.float32


class GemmKernel(NamedTuple):
    """The entry point of a GEMM kernel, which the selection table refers to by name."""

    pick_config: Callable[[Product], Any]
    launch: Callable[..., torch.Tensor]
