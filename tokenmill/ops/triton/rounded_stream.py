"""Steps with quantised matrices as what happens to the residual stream: the norm, and the gate, leave their results in
the form that the product behind them multiplies: planes of fp8 (see `planes`), or, of a single row for matrices of
4 bits, halves (see `halves`)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import LinearWeight, StreamOps
from tokenmill.ops.triton.activation import activate
from tokenmill.ops.triton.halves import Halves, empty_halves, store_halves
from tokenmill.ops.triton.kernel import kernel
from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous
from tokenmill.ops.triton.planes import Rounded, empty_planes, rounded_rows, store_rounded
from tokenmill.ops.triton.quantized import Fp8Matrix, WordMatrix, fp8_linear, halves_linear, has_halves, rounded_product
from tokenmill.ops.triton.sizes import cdiv, next_power_of_2
from tokenmill.ops.triton.wide_cuts import is_wide, wide_linear

HALVES = 0  # in the place of a number of planes


class RoundedStream(NamedTuple):
    total: torch.Tensor  # [T, H]
    normed: Rounded | Halves


class RoundedGate(NamedTuple):
    rows: Rounded | Halves
    dtype: torch.dtype  # of what they were made of


@triton.jit
def _store(values, rows, scales, row, first, size, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    if PLANES == 0:
        store_halves(values, rows, scales, first, size, BLOCK)
    else:
        store_rounded(values, rows, scales, row, size, PLANES, BLOCK)


@kernel
def _join(
    x, residual, weight, total, rows, scales, size, eps,
    HAS_RESIDUAL: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gains = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the stream is stored, so that the norm sees what the next layer will.
        values = values.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * size + columns, values.to(total.dtype.element_ty), mask=inside)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / size + eps) * gains
    _store(normed, rows, scales, row, 0, size, PLANES, BLOCK)


@kernel
def _gate(
    gate_up, rows, scales, inter,
    KIND: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < inter
    start = gate_up + row * 2 * inter + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + inter, mask=inside, other=0.0).to(tl.float32)
    _store(activate(gate, KIND) * up, rows, scales, row, first, inter, PLANES, BLOCK)


def _empty(num_rows: int, size: int, device: torch.device, *, in_halves: bool) -> tuple[Rounded | Halves, int]:
    if in_halves:
        return empty_halves(size, device), HALVES
    rows = empty_planes(num_rows, size, device)
    return rows, rows.planes.shape[1]


def join(
    x: torch.Tensor, stream: RoundedStream | None, weight: torch.Tensor, eps: float, *, in_halves: bool
) -> RoundedStream:
    """The stream with x [T, H] added to it; x alone where there is none yet"""
    num_rows, size = x.shape
    x = x.contiguous()
    total = x if stream is None else torch.empty_like(x)
    normed, num_planes = _empty(num_rows, size, x.device, in_halves=in_halves)
    _join[(num_rows,)](
        x, x if stream is None else stream.total, weight, total, *normed, size, eps,
        stream is not None, num_planes, next_power_of_2(size), num_warps=8, **launch_options(),
    )  # fmt: skip
    return RoundedStream(total, normed)


def _product(rows: Rounded | Halves, weight: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(rows, Halves):
        return halves_linear(rows, weight.packed, weight.bias, dtype)
    return rounded_product(rows, weight.packed, weight.bias, dtype)


def normed_linear(stream: RoundedStream, weight: LinearWeight) -> torch.Tensor:
    return _product(stream.normed, weight, stream.total.dtype)


def gated_linear(stream: RoundedStream, weight: LinearWeight, activation: Activation) -> RoundedGate:
    if gated := _wide_gated(stream, weight, activation):
        return gated
    gate_up = normed_linear(stream, weight)
    num_rows, inter = len(gate_up), gate_up.shape[1] // 2
    rows, num_planes = _empty(num_rows, inter, gate_up.device, in_halves=isinstance(stream.normed, Halves))
    # Halves have a scale for few columns, so that several programs can share the row.
    block, warps = (1024, 4) if num_planes == HALVES else (next_power_of_2(inter), 16)
    _gate[(num_rows, cdiv(inter, block))](
        gate_up, *rows, inter, activation, num_planes, block, num_warps=warps, **launch_options()
    )
    return RoundedGate(rows, gate_up.dtype)


def _wide_gated(stream: RoundedStream, weight: LinearWeight, activation: Activation) -> RoundedGate | None:
    """Dozens of rows: the product applies its gates itself."""
    rows, matrix, dtype = stream.normed, weight.packed, stream.total.dtype
    if isinstance(rows, Halves) or rows.planes.shape[1] != 1 or not is_wide(rows.planes[:, 0], matrix.values):
        return None
    options = {"activation": activation, "row_scales": rows.scales, "scales": matrix.scales, "dtype": dtype}
    gated = wide_linear(rows.planes[:, 0], matrix.values, weight.bias, **options)
    return RoundedGate(rounded_rows(gated), dtype)


def any_linear(x: torch.Tensor | RoundedGate, weight: LinearWeight) -> torch.Tensor:
    if isinstance(x, RoundedGate):
        return _product(x.rows, weight, x.dtype)
    if isinstance(weight.packed, Fp8Matrix):
        return fp8_linear(x, weight.packed, weight.bias)
    return halves_linear(x, weight.packed, weight.bias, x.dtype)  # values weighted by attention: of moderate size


IN_PLANES = StreamOps(
    can_multiply=lambda weight: isinstance(weight.packed, Fp8Matrix),
    takes=lambda num_tokens: num_tokens > 0,
    join=partial(join, in_halves=False),
    normed_linear=normed_linear,
    gated_linear=gated_linear,
    any_linear=any_linear,
)
IN_HALVES = StreamOps(
    can_multiply=lambda weight: isinstance(weight.packed, WordMatrix) and has_halves(weight.packed),
    takes=lambda num_tokens: num_tokens == 1,
    join=partial(join, in_halves=True),
    normed_linear=normed_linear,
    gated_linear=gated_linear,
    any_linear=any_linear,
)
STREAMS: dict[str, StreamOps] = {"fp8": IN_PLANES, "int4": IN_HALVES}
