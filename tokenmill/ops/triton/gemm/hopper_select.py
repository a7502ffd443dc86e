"""Which products go to `wide_products`, and how they are cut into programs. Apart from the kernel, because Gluon takes
0.1 s to import, for which a start need not wait.

Only those of steps that are recorded. A short prompt waits for its launches rather than for its products, and these,
which describe tiles to the unit that copies them, take the host longer: a mixture's first token came twice as late with
them (`docs/experiments/gpu-gemm.md`). A graph does that once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.arch.spec import Activation
from tokenmill.ops.batch import Mode
from tokenmill.ops.triton.launch.capabilities import H200_PROCESSORS, has_gluon
from tokenmill.ops.triton.launch.sizes import cdiv

MIN_ROWS, MAX_ROWS = 33, 128
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
MANY_LINES = 128 * 2 * H200_PROCESSORS
CHUNKS_EACH = 48  # at least, of 128 bytes of a line


@dataclass(frozen=True)
class HopperConfig:
    rows: int
    lines: int
    splits: int
    ring: int  # tiles of each factor
    warps: int = 4


def takes_hopper_gemm(x: torch.Tensor, values: torch.Tensor, mode: Mode) -> bool:
    """Copying a tile needs rows of whole 16 bytes."""
    is_taken = mode == "captured" and MIN_ROWS <= len(x) <= MAX_ROWS and x.dtype == values.dtype and x.dtype in DTYPES
    return is_taken and not values.shape[1] * values.element_size() % 16 and has_gluon(x.device)


def pick_hopper_config(num_rows: int, num_out: int, num_in: int, element_size: int, *, is_gated: bool) -> HopperConfig:
    """As measured on an H200: two programs on a multiprocessor where there are enough for that, otherwise one with as
    much of the matrix on its way. Columns are split only where there are so many that adding up pays."""
    rows = 64 if num_rows <= 64 else 128
    if is_gated or num_out >= MANY_LINES:
        return HopperConfig(rows, 128, 1, 4 if rows == 64 else 3)
    strips, chunks = cdiv(num_out, 64), cdiv(num_in * element_size, 128)
    splits = max(1, min(H200_PROCESSORS // strips, chunks // CHUNKS_EACH))
    return HopperConfig(rows, 64, splits, 12 if rows == 64 else 8)


def hopper_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Activation | None = None,
    row_scales: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [rows, num_in], values [num_out, num_in] → [rows, num_out]; with an activation values are gates above ups, and
    the result is act(gate) * up [rows, num_out / 2]. fp8: both have scales, and the result is of `dtype`"""
    from tokenmill.ops.triton.gemm.hopper import hopper_gemm

    cut = pick_hopper_config(len(x), *values.shape, values.element_size(), is_gated=activation is not None)
    return hopper_gemm(x.contiguous(), row_scales, values, scales, bias, dtype or x.dtype, cut, activation)
