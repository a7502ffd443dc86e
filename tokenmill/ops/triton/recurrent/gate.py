"""The gate and norm behind a recurrent mixer, where a group of the norm is more than a head, or a head comes in
parts."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs
from tokenmill.ops.triton.launch.kernel import kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import gated
from tokenmill.ops.triton.recurrent.sizes import Sizes, gate_numbers


@kernel
def _gate_and_norm(
    mixed, projected, weight, out, width, gate_at, eps, gate_scale, out_scale, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NORM_IS_SHARED: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = group * SIZE + columns
    scale = tl.load(weight + (columns if NORM_IS_SHARED else values), mask=inside, other=1.0) if NORM else 1.0
    wait_for_previous(OVERLAPS)
    x = tl.load(mixed + token * (GROUPS * SIZE) + values, mask=inside, other=0.0)
    z = tl.load(projected + token * width + gate_at + values, mask=inside, other=0.0).to(tl.float32) * gate_scale
    result = gated(x, z, scale, eps, NORM, SIZE) * out_scale
    tl.store(out + token * (GROUPS * SIZE) + values, result.to(out.dtype.element_ty), mask=inside)


def gate_and_norm(mixed: torch.Tensor, projected: torch.Tensor, args: RecurrentArgs, out: torch.Tensor) -> None:
    """Outputs of the recurrence [T, values], float32, and the joint projections → out [T, values]"""
    spec, sizes = args.spec, Sizes.of(args)
    groups = spec.value_heads if spec.norm is None else spec.norm.groups
    size = spec.values_size // groups
    block = next_power_of_2(size)
    _gate_and_norm[(len(mixed), groups)](
        mixed, projected, sizes.or_any(args.weights.norm), out, projected.shape[1], spec.conv_size, args.weights.eps,
        *gate_numbers(spec), groups, size, block, sizes.norm, sizes.norm_is_shared,
        num_warps=1 if block <= 256 else 4 if block <= 2048 else 8, **launch_options(),
    )  # fmt: skip
