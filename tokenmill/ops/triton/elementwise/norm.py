"""RMSNorm with the preceding residual addition: one program per row, one pass over memory.

For a few rows followed by a narrow matrix (a router), the product is fused: each program norms its row again, which is
cheaper than another kernel. For a single row this also holds for matrices of a few megabytes, which are prefetched
before the row is known.
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


@kernel
def _norm_rows(
    x, residual, weight, out, total, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the stream is stored, so that the norm sees the same values as the next layer.
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    tl.store(out + start + columns, (values * inverse * scale).to(out.dtype.element_ty), mask=inside)


@kernel
def _norm_and_multiply(
    x, residual, weight, matrix, out, normed, total, size, num_out, eps, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one output of one row per program; the first program of a row also stores the norm and the sum."""
    launch_dependents(OVERLAPS)
    line, row = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factors = tl.load(matrix + line * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    at = row * size + columns
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    result = (values * inverse * scale).to(normed.dtype.element_ty)
    if line == 0:
        if HAS_RESIDUAL:
            tl.store(total + at, rounded, mask=inside)
        tl.store(normed + at, result, mask=inside)
    product = tl.sum(result.to(tl.float32) * factors, axis=0)
    tl.store(out + row * num_out + line, product.to(out.dtype.element_ty))


@kernel
def _norm_gemv(
    x, residual, weight, matrix, bias, out, total, size, num_out, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute TILE_N outputs of one row; the first program also stores the sum."""
    launch_dependents(OVERLAPS)
    rows, columns = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, BLOCK)
    is_row, inside = rows < num_out, columns < size
    source = matrix + rows[:, None] * size + columns[None, :]
    part = tl.load(source, mask=is_row[:, None] & inside[None, :], other=0.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = (values * inverse * scale).to(out.dtype.element_ty).to(tl.float32)
    result = tl.sum(part.to(tl.float32) * normed[None, :], axis=1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


def norm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [1, H], matrix [N, H] → rms_norm(x + residual) @ matrix.T + bias, x + residual"""
    x, (num_out, size) = x.contiguous(), matrix.shape
    block = next_power_of_2(size)
    out, total, tile = x.new_empty(1, num_out), x if residual is None else torch.empty_like(x), max(1, 8192 // block)
    _norm_gemv[(cdiv(num_out, tile),)](
        x, x if residual is None else residual, weight, matrix, x if bias is None else bias, out, total, size, num_out,
        eps, residual is not None, bias is not None, tile, block, num_warps=4, **launch_options(),
    )  # fmt: skip
    return out, total


def norm_and_multiply(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [R, H], matrix [N, H] → rms_norm(x + residual) @ matrix.T, rms_norm(x + residual), x + residual"""
    x, is_alone = x.contiguous(), residual is None
    added = x if residual is None else residual.contiguous()
    (num_rows, size), num_out = x.shape, len(matrix)
    normed, total = torch.empty_like(x), x if is_alone else torch.empty_like(x)
    out = x.new_empty(num_rows, num_out)
    _norm_and_multiply[(num_out, num_rows)](
        x, added, weight, matrix, out, normed, total, size, num_out, eps, not is_alone, next_power_of_2(size),
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return out, normed, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, x, weight, out, out, eps, has_residual=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, has_residual=True)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows:
        block = next_power_of_2(size)
        warps = 4 if block <= 2048 else 8
        _norm_rows[(num_rows,)](
            x, residual, weight, out, total, size, eps, has_residual, block, num_warps=warps, **launch_options()
        )
