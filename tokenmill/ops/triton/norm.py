"""RMSNorm with the residual addition before it: one program a row, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous


@triton.jit
def _norm_rows(
    x, residual, weight, out, total, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the stream is stored, so that the norm sees what the next layer will.
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    tl.store(out + start + columns, (values * inverse * scale).to(out.dtype.element_ty), mask=inside)


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
        block = triton.next_power_of_2(size)
        warps = 4 if block <= 2048 else 8
        _norm_rows[(num_rows,)](
            x, residual, weight, out, total, size, eps, has_residual, block, num_warps=warps, **launch_options()
        )
