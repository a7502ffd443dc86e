"""The gate and norm after a recurrent mixer: norm(o) * silu(z), norm(o * silu(z)) or norm(o) * sigmoid(z), per group of
values."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import GATE_FIRST, NO_NORM, silu
from tokenmill.ops.triton.recurrent.sizes import Sizes, gate_numbers

MAX_TILE = 1024  # values per program


@kernel_unspecialized("num_tokens")
def _gate_and_norm(
    mixed, projected, weight, out, num_tokens, width, gate_at, eps, gate_scale, out_scale, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, NORM_IS_SHARED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Each program computes some groups, of one token or several."""
    launch_dependents(OVERLAPS)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, group = (number // GROUPS).to(tl.int64), number % GROUPS
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (columns < SIZE) & (number < num_tokens * GROUPS)[:, None]
    values = group[:, None] * SIZE + columns
    scale = tl.load(weight + (columns if NORM_IS_SHARED else values), mask=inside, other=1.0) if NORM else 1.0
    wait_for_previous(OVERLAPS)
    at = token[:, None] * (GROUPS * SIZE) + values
    x = tl.load(mixed + at, mask=inside, other=0.0)
    z = tl.load(projected + token[:, None] * width + gate_at + values, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z * gate_scale) if IS_SIGMOID else silu(z * gate_scale)
    if NORM == GATE_FIRST:
        x = x * gate
    if NORM != NO_NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * scale
    if NORM != GATE_FIRST:
        x = x * gate
    tl.store(out + at, (x * out_scale).to(out.dtype.element_ty), mask=inside)


def gate_and_norm(mixed: torch.Tensor, projected: torch.Tensor, args: RecurrentArgs) -> torch.Tensor:
    """Outputs of the recurrence [T, values], float32, and the stacked projections → [T, values]"""
    out = torch.empty_like(mixed, dtype=projected.dtype)
    spec, sizes = args.spec, Sizes.of(args)
    groups = spec.value_heads if spec.norm is None else spec.norm.groups
    size, num_tokens = spec.values_size // groups, len(mixed)
    block = next_power_of_2(size)
    rows = max(1, MAX_TILE // block)
    _gate_and_norm[(cdiv(num_tokens * groups, rows),)](
        mixed, projected, sizes.or_any(args.weights.norm), out, num_tokens, projected.shape[1], spec.conv_size,
        args.weights.eps, *gate_numbers(spec), groups, size, block, rows, sizes.norm, sizes.norm_is_shared,
        spec.gates_by_sigmoid, num_warps=4 if block <= 4096 else 8, **launch_options(),
    )  # fmt: skip
    return out
