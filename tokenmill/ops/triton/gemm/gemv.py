"""GEMV: a single row times a large matrix, bound by reading the matrix once.

A program computes a tile of matrix rows by streaming along them, with ordinary multiply-adds. It prefetches the first
part of the tile before the kernel that computes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


@kernel
def _gemv_kernel(
    x, weight, bias, out, num_out, num_in,
    TILE_N: tl.constexpr, STRIDE: tl.constexpr, NEAR: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_row = rows < num_out
    columns = tl.arange(0, STRIDE)
    matrix = weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    part = tl.load(matrix, mask=is_row[:, None] & (columns < num_in)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, STRIDE // NEAR), tl.float32)  # first sum NEAR columns, which one thread loads together
    for start in range(0, num_in, STRIDE):
        factors = tl.load(x + start + columns, mask=start + columns < num_in, other=0.0)
        products = part.to(tl.float32) * factors.to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(products, (TILE_N, STRIDE // NEAR, NEAR)), axis=2)
        following = start + STRIDE + columns
        part = tl.load(matrix + start + STRIDE, mask=is_row[:, None] & (following < num_in)[None, :], other=0.0)
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@dataclass(frozen=True)
class GemvConfig:
    """The tile configuration: matrix rows per program, columns per iteration."""

    tile_n: int
    stride: int
    warps: int
    near: int = 1  # columns loaded together by a thread whose products it sums first
    stages: int = 3


def pick_gemv_config(product: Product) -> GemvConfig:
    """Return the fastest configuration on an H200."""
    n, k = product.n, product.k
    if n >= 16384 or (n * k < 1 << 24 and k > 2048):
        return GemvConfig(2, 2048, 4, near=8)
    return GemvConfig(8, 512, 4) if n > 4096 and k > 2048 else GemvConfig(4, 512, 4)


def gemv_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: GemvConfig, _dtype: object = None
) -> torch.Tensor:
    """x [1, num_in], weight [num_out, num_in] → [1, num_out]"""
    x = x.contiguous()
    num_out, num_in = weight.shape
    out = x.new_empty(1, num_out)
    _gemv_kernel[(cdiv(num_out, config.tile_n),)](
        x, weight, bias if bias is not None else x, out, num_out, num_in, config.tile_n, config.stride, config.near,
        bias is not None,
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out


GEMV = GemmKernel(pick_gemv_config, gemv_linear)
