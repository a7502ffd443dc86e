"""Norms and gated activations fused with the quantisation of their results, for layers whose matrices all have the same
form: fp8 rows (see `gemm_fp8_split`), or, for a single row and 4-bit matrices, float16 pairs (see `gemv_int4`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.batch import Mode
from tokenmill.ops.compose import ComposedRegions, PlainStream
from tokenmill.ops.interface import (
    BatchClass,
    GatedMlpWeights,
    LayerWeights,
    LinearWeight,
    Norm,
    ProjectionWeights,
    SideBySideWeights,
)
from tokenmill.ops.triton.elementwise.activation import FUSED_KINDS, activate
from tokenmill.ops.triton.gemm.linear import fp8_gemm, fp8_linear, gemv_int4_linear
from tokenmill.ops.triton.gemm.select import choose
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows, empty_planes, quantize_rows, store_fp8_rows
from tokenmill.ops.triton.quant.gemv_int4 import Fp16PairRow, empty_fp16_pairs, store_fp16_pairs
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix, Fp8Matrix, PackedIntMatrix, has_gemv_int4

FP16_PAIRS = 0  # instead of a number of fp8 planes
FP8_MATRICES = (Fp8Matrix, Fp8BlockMatrix)
RowKind = Literal["fp8", "fp16_pairs"]
QuantizedRows = Fp8Rows | Fp16PairRow


@triton.jit
def _store(values, rows, scales, row, first, size, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    if PLANES == 0:
        store_fp16_pairs(values, rows, scales, first, size, BLOCK)
    else:
        store_fp8_rows(values, rows, scales, row, size, PLANES, BLOCK)


@kernel
def _norm_and_quantize(
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
        # Rounded as the stream is stored, so that the norm sees the same values as the next layer.
        values = values.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * size + columns, values.to(total.dtype.element_ty), mask=inside)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / size + eps) * gains
    _store(normed, rows, scales, row, 0, size, PLANES, BLOCK)


@kernel
def _gate_and_quantize(
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


def quantized_rows_for(layers: Sequence[LayerWeights], batch: BatchClass) -> RowKind | None:
    """Return the quantised form in which all layers can compute such batches, or None. The last layer, which continues
    with some of its rows only, is composed of small ops."""
    if batch.gathers or batch.min_rows == 0:
        return None
    if _all_are(layers, lambda weight: isinstance(weight.packed, FP8_MATRICES)):
        return "fp8"
    if batch.max_rows == 1 and _all_are(layers, _takes_fp16_pairs):
        return "fp16_pairs"
    return None


def _all_are(layers: Sequence[LayerWeights], accepts: Callable[[LinearWeight], bool]) -> bool:
    for layer in layers:
        if not isinstance(layer.feed, GatedMlpWeights) or not is_plain_layer(layer):
            return False
        projections = (layer.project_in, layer.project_out, layer.feed.gate_up, layer.feed.down)
        if not all(each.is_self_contained and accepts(each.weight) for each in projections):
            return False
    return True


def is_plain_layer(layer: LayerWeights) -> bool:
    """Return whether a layer has RMS norms before one mixer and an MLP or experts, in sequence."""
    feed = layer.feed
    if feed is None or isinstance(feed, SideBySideWeights) or layer.is_parallel or layer.side_out is not None:
        return False
    is_usual = not isinstance(feed, GatedMlpWeights) or (
        feed.is_gated and feed.activation in FUSED_KINDS and feed.cutoff is None
    )
    return is_usual and all(norm is not None and norm.is_rms for norm in (layer.norm, feed.norm))


def _takes_fp16_pairs(weight: LinearWeight) -> bool:
    return isinstance(weight.packed, PackedIntMatrix) and has_gemv_int4(weight.packed)


class QuantizedRegions:
    """Regions of layers for which `quantized_rows_for` returned a form."""

    def __init__(self, composed: ComposedRegions, kind: RowKind) -> None:
        self._composed = composed
        self._mode = composed.mode
        self._kind = kind

    def norm_project(
        self, stream: PlainStream, norm: Norm | None, projection: ProjectionWeights
    ) -> tuple[torch.Tensor, PlainStream]:
        assert norm is not None, "see `is_plain_layer`"
        rows, stream = norm_and_quantize(stream, norm, self._kind)
        return _product(rows, projection.weight, stream.residual.dtype, self._mode), stream

    def project_add(
        self,
        x: torch.Tensor,
        projection: ProjectionWeights,
        stream: PlainStream,
        post_norm: Norm | None,
        scale: float = 1.0,
    ) -> PlainStream:
        weight = projection.weight
        if isinstance(weight.packed, FP8_MATRICES):
            delta = fp8_linear(x, weight.packed, weight.bias, self._mode)
        else:  # attention outputs have moderate magnitudes, which fit in float16
            delta = gemv_int4_linear(x, weight.packed, weight.bias, x.dtype)
        return self._composed.added(delta, stream, post_norm, scale)

    def gated_mlp(self, stream: PlainStream, mlp: GatedMlpWeights) -> PlainStream:
        assert mlp.norm is not None, "see `is_plain_layer`"
        rows, stream = norm_and_quantize(stream, mlp.norm, self._kind)
        dtype = stream.residual.dtype
        gated = gated_rows(rows, mlp.gate_up.weight, mlp.activation, dtype, self._mode)
        delta = _product(gated, mlp.down.weight, dtype, self._mode)
        return self._composed.added(delta, stream, mlp.post_norm, mlp.scale)


def norm_and_quantize(stream: PlainStream, norm: Norm, kind: RowKind) -> tuple[QuantizedRows, PlainStream]:
    """Return norm(residual + delta) as quantised rows, and the stream with the addition done."""
    x = stream.residual if stream.delta is None else stream.delta
    num_rows, size = x.shape
    x = x.contiguous()
    total = x if stream.delta is None else torch.empty_like(x)
    rows, num_planes = _empty(num_rows, size, x.device, kind)
    _norm_and_quantize[(num_rows,)](
        x, stream.residual, norm.weight, total, *rows, size, norm.eps,
        stream.delta is not None, num_planes, next_power_of_2(size), num_warps=8, **launch_options(),
    )  # fmt: skip
    return rows, PlainStream(total)


def gated_rows(
    rows: QuantizedRows, weight: LinearWeight, activation: Activation, dtype: torch.dtype, mode: Mode
) -> QuantizedRows:
    """Multiply rows by a matrix of gate rows above up rows, and return act(gate) * up, quantised like the rows."""
    if isinstance(rows, Fp8Rows):
        gpu = capabilities_of(rows.planes.device)
        choice = choose(len(rows.planes), weight.rows, weight.columns, weight.packed.form(dtype), gpu, mode, "gated")
        if choice is not None:
            return quantize_rows(choice.run(rows, weight.packed, weight.bias, dtype, activation))
    gate_up = _product(rows, weight, dtype, mode)
    num_rows, inter = len(gate_up), gate_up.shape[1] // 2
    kind: RowKind = "fp8" if isinstance(rows, Fp8Rows) else "fp16_pairs"
    gated, num_planes = _empty(num_rows, inter, gate_up.device, kind)
    # Float16 pairs have a scale per few columns, so that several programs can share the row.
    block, warps = (1024, 4) if kind == "fp16_pairs" else (next_power_of_2(inter), 16)
    _gate_and_quantize[(num_rows, cdiv(inter, block))](
        gate_up, *gated, inter, activation, num_planes, block, num_warps=warps, **launch_options()
    )
    return gated


def _empty(num_rows: int, size: int, device: torch.device, kind: RowKind) -> tuple[QuantizedRows, int]:
    if kind == "fp16_pairs":
        return empty_fp16_pairs(size, device), FP16_PAIRS
    rows = empty_planes(num_rows, size, device)
    return rows, rows.planes.shape[1]


def _product(rows: QuantizedRows, weight: LinearWeight, dtype: torch.dtype, mode: Mode) -> torch.Tensor:
    if isinstance(rows, Fp16PairRow):
        return gemv_int4_linear(rows, weight.packed, weight.bias, dtype)
    return fp8_gemm(rows, weight.packed, weight.bias, dtype, mode)
