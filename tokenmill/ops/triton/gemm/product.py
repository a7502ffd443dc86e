"""A matrix product as kernel selection sees it: activations [m, k] times the rows of a weight matrix [n, k].

The weight's form is how its numbers are stored, not which numbers they are: every matrix of the same form, shape and
number of rows is multiplied by the same kernel.
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
"""What the same kernel does with the product: nothing; act(gate) * up of two halves; add it to the residual stream"""


class WeightForm(NamedTuple):
    kind: Kind
    dtype: torch.dtype  # of the activations
    bits: int  # of a number of the matrix
    interleave: int = 0  # packed integers: words whose i-th values are neighbouring columns
    dialect: str = ""  # of several that the same kernels multiply

    @property
    def element_size(self) -> int:
        """Bytes of a number of the matrix that has whole bytes"""
        return self.bits // 8

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        names = {"plain": dtype, "fp8": "fp8", "fp8_blocks": "fp8 in blocks", "int": f"int{self.bits}"}
        return self.dialect or names[self.kind]


INTERLEAVE = 32  # of packed integers, where every kernel takes them; 16 where rows are too short for that
PLAIN = {
    dtype: WeightForm("plain", dtype, 8 * dtype.itemsize) for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
FP8 = {dtype: WeightForm("fp8", dtype, 8) for dtype in PLAIN}
FP8_BLOCKS = {dtype: WeightForm("fp8_blocks", dtype, 8) for dtype in PLAIN}
FP8_SQUARES = {dtype: WeightForm("fp8_blocks", dtype, 8, dialect="fp8 in squares") for dtype in PLAIN}
"""128 rows share their scales too, and begin at multiples of 128"""
MXFP4 = {dtype: WeightForm("fp4", dtype, 4, dialect="mxfp4") for dtype in PLAIN}
NVFP4 = {dtype: WeightForm("fp4", dtype, 4, dialect="nvfp4") for dtype in PLAIN}
TABLE_FORMS = {
    (quant, dtype): WeightForm("table", dtype, 4, dialect=quant.lower())
    for quant in TABLE_SCALE_BYTES
    for dtype in PLAIN
}
"""Codes of 4 bits that number the values of a table"""


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
        """True where activations have 16 bits."""
        return self.form.dtype != torch.float32


class GemmKernel(NamedTuple):
    """A kernel that multiplies, as the selection table finds it in its module."""

    pick_config: Callable[[Product], Any]
    launch: Callable[..., torch.Tensor]
