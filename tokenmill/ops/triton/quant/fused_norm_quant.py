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
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import FusedNormOps, LinearWeight
from tokenmill.ops.triton.elementwise.activation import activate
from tokenmill.ops.triton.gemm.linear import fp8_gemm, fp8_linear, gemv_int4_linear
from tokenmill.ops.triton.gemm.product import FP8
from tokenmill.ops.triton.gemm.select import choose
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import kernel
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.launch.sizes import cdiv, next_power_of_2
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows, empty_planes, quantize_rows, store_fp8_rows
from tokenmill.ops.triton.quant.gemv_int4 import Fp16PairRow, empty_fp16_pairs, store_fp16_pairs
from tokenmill.ops.triton.quant.quantized import Fp8Matrix, PackedIntMatrix, has_gemv_int4

HALVES = 0  # in the place of a number of planes


class QuantizedStream(NamedTuple):
    total: torch.Tensor  # [T, H]
    normed: Fp8Rows | Fp16PairRow


class QuantizedGate(NamedTuple):
    rows: Fp8Rows | Fp16PairRow
    dtype: torch.dtype  # of what they were made of


@triton.jit
def _store(values, rows, scales, row, first, size, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    if PLANES == 0:
        store_fp16_pairs(values, rows, scales, first, size, BLOCK)
    else:
        store_fp8_rows(values, rows, scales, row, size, PLANES, BLOCK)


@kernel
def _join(
    x, residual, weight, total, rows, scales, size, eps,
    HAS_RESIDUAL: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gains = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        # Fp8Rows as the stream is stored, so that the norm sees what the next layer will.
        values = values.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * size + columns, values.to(total.dtype.element_ty), mask=inside)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / size + eps) * gains
    _store(normed, rows, scales, row, 0, size, PLANES, BLOCK)


@kernel
def _gate(
    gate_up, rows, scales, inter,
    KIND: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < inter
    start = gate_up + row * 2 * inter + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + inter, mask=inside, other=0.0).to(tl.float32)
    _store(activate(gate, KIND) * up, rows, scales, row, first, inter, PLANES, BLOCK)


def _empty(num_rows: int, size: int, device: torch.device, *, in_halves: bool) -> tuple[Fp8Rows | Fp16PairRow, int]:
    if in_halves:
        return empty_fp16_pairs(size, device), HALVES
    rows = empty_planes(num_rows, size, device)
    return rows, rows.planes.shape[1]


def join(
    x: torch.Tensor, stream: QuantizedStream | None, weight: torch.Tensor, eps: float, *, in_halves: bool
) -> QuantizedStream:
    """The stream with x [T, H] added to it; x alone where there is none yet"""
    num_rows, size = x.shape
    x = x.contiguous()
    total = x if stream is None else torch.empty_like(x)
    normed, num_planes = _empty(num_rows, size, x.device, in_halves=in_halves)
    _join[(num_rows,)](
        x, x if stream is None else stream.total, weight, total, *normed, size, eps,
        stream is not None, num_planes, next_power_of_2(size), num_warps=8, **launch_options(),
    )  # fmt: skip
    return QuantizedStream(total, normed)


def _product(rows: Fp8Rows | Fp16PairRow, weight: LinearWeight, dtype: torch.dtype, mode: Mode) -> torch.Tensor:
    if isinstance(rows, Fp16PairRow):
        return gemv_int4_linear(rows, weight.packed, weight.bias, dtype)
    return fp8_gemm(rows, weight.packed, weight.bias, dtype, mode)


def normed_linear(stream: QuantizedStream, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
    return _product(stream.normed, weight, stream.total.dtype, mode)


def gated_linear(
    stream: QuantizedStream, weight: LinearWeight, activation: Activation, mode: Mode = "eager"
) -> QuantizedGate:
    if gated := _wide_gated(stream, weight, activation, mode):
        return gated
    gate_up = normed_linear(stream, weight, mode)
    num_rows, inter = len(gate_up), gate_up.shape[1] // 2
    rows, num_planes = _empty(num_rows, inter, gate_up.device, in_halves=isinstance(stream.normed, Fp16PairRow))
    # Halves have a scale for few columns, so that several programs can share the row.
    block, warps = (1024, 4) if num_planes == HALVES else (next_power_of_2(inter), 16)
    _gate[(num_rows, cdiv(inter, block))](
        gate_up, *rows, inter, activation, num_planes, block, num_warps=warps, **launch_options()
    )
    return QuantizedGate(rows, gate_up.dtype)


def _wide_gated(
    stream: QuantizedStream, weight: LinearWeight, activation: Activation, mode: Mode
) -> QuantizedGate | None:
    """Dozens of rows: the product applies its gates itself."""
    rows, dtype = stream.normed, stream.total.dtype
    if isinstance(rows, Fp16PairRow):
        return None
    gpu = capabilities_of(rows.planes.device)
    choice = choose(len(rows.planes), weight.rows, weight.columns, FP8[dtype], gpu, mode, "gated")
    if choice is None:
        return None
    return QuantizedGate(quantize_rows(choice.run(rows, weight.packed, weight.bias, dtype, activation)), dtype)


def any_linear(x: torch.Tensor | QuantizedGate, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
    if isinstance(x, QuantizedGate):
        return _product(x.rows, weight, x.dtype, mode)
    if isinstance(weight.packed, Fp8Matrix):
        return fp8_linear(x, weight.packed, weight.bias, mode)
    return gemv_int4_linear(x, weight.packed, weight.bias, x.dtype)  # values weighted by attention: of moderate size


IN_PLANES = FusedNormOps(
    can_multiply=lambda weight: isinstance(weight.packed, Fp8Matrix),
    takes=lambda num_tokens: num_tokens > 0,
    join=partial(join, in_halves=False),
    normed_linear=normed_linear,
    gated_linear=gated_linear,
    any_linear=any_linear,
)
IN_HALVES = FusedNormOps(
    can_multiply=lambda weight: isinstance(weight.packed, PackedIntMatrix) and has_gemv_int4(weight.packed),
    takes=lambda num_tokens: num_tokens == 1,
    join=partial(join, in_halves=True),
    normed_linear=normed_linear,
    gated_linear=gated_linear,
    any_linear=any_linear,
)
STREAMS: dict[str, FusedNormOps] = {"fp8": IN_PLANES, "int4": IN_HALVES}
