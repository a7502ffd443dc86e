"""A single row times a big matrix: the time is what reading the matrix once takes.

One program owns a strip of matrix rows and streams along them; the products are plain multiply-adds. The first part of
the strip is fetched before the kernel that computes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import kernel
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.launch.sizes import cdiv


@kernel
def _gemv_kernel(
    x, weight, bias, out, num_out, num_in,
    STRIP: tl.constexpr, STRIDE: tl.constexpr, NEAR: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    rows = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    is_row = rows < num_out
    columns = tl.arange(0, STRIDE)
    lines = weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    part = tl.load(lines, mask=is_row[:, None] & (columns < num_in)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros(
        (STRIP, STRIDE // NEAR), tl.float32
    )  # NEAR columns, which a thread loads together, it adds up itself
    for start in range(0, num_in, STRIDE):
        factors = tl.load(x + start + columns, mask=start + columns < num_in, other=0.0)
        products = part.to(tl.float32) * factors.to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(products, (STRIP, STRIDE // NEAR, NEAR)), axis=2)
        following = start + STRIDE + columns
        part = tl.load(lines + start + STRIDE, mask=is_row[:, None] & (following < num_in)[None, :], other=0.0)
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@dataclass(frozen=True)
class GemvConfig:
    """How a strip is cut: matrix rows a program owns, columns it takes at a time."""

    strip: int
    stride: int
    warps: int
    near: int = 1  # columns, of those that a thread loads together, whose products it adds up at once
    stages: int = 3


def pick_gemv_config(num_out: int, num_in: int) -> GemvConfig:
    """As measured on an H200."""
    if num_out >= 16384 or (num_out * num_in < 1 << 24 and num_in > 2048):
        return GemvConfig(2, 2048, 4, near=8)
    return GemvConfig(8, 512, 4) if num_out > 4096 and num_in > 2048 else GemvConfig(4, 512, 4)


def gemv_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: GemvConfig | None = None
) -> torch.Tensor:
    """x [1, num_in], weight [num_out, num_in] → [1, num_out]"""
    x = x.contiguous()
    num_out, num_in = weight.shape
    out = x.new_empty(1, num_out)
    cut = shape or pick_gemv_config(num_out, num_in)
    _gemv_kernel[(cdiv(num_out, cut.strip),)](
        x, weight, bias if bias is not None else x, out, num_out, num_in, cut.strip, cut.stride, cut.near,
        bias is not None,
        num_warps=cut.warps, num_stages=cut.stages, **launch_options(),
    )  # fmt: skip
    return out
