"""The regions of a layer on a GPU, chosen at load for each layer and batch class. Fused regions are:

attend          few rows of one query each: one kernel for norms, RoPE, cache write and attention; otherwise attention
                is a separate kernel
norm_project,   fp8 matrices, or 4-bit matrices with a single row: norm and gate also quantise their results for the
gated_mlp       next product (see `quant/fused_norm_quant.py`), in all layers of a model or in none
project_add,    hundreds of rows with unquantised matrices: cuBLAS adds the residual stream (see `gemm/epilogues.py`)
gated_mlp
norm_project    a single row with an unquantised matrix of a few megabytes: one kernel (see `elementwise/norm.py`)
experts         a few tokens: addition, norm, router and the chosen experts in three kernels (see `moe/gemv.py`)

Other regions are composed of small ops, with the activation fused in its product if that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tokenmill.ops.batch import Mode
from tokenmill.ops.compose import ComposedRegions, PlainStream
from tokenmill.ops.interface import (
    AttendInputs,
    BatchClass,
    GatedMlpWeights,
    LayerWeights,
    MoeWeights,
    Norm,
    Ops,
    ProjectionWeights,
    Regions,
)
from tokenmill.ops.triton.attention.decode import fused_decode_attention
from tokenmill.ops.triton.attention.kv_cache import norm_rope_write_kv
from tokenmill.ops.triton.attention.select import takes_fused_decode
from tokenmill.ops.triton.elementwise.norm import norm_gemv
from tokenmill.ops.triton.gemm.linear import add_linear, can_add, gated_linear
from tokenmill.ops.triton.gemm.product import PLAIN
from tokenmill.ops.triton.gemm.select import takes_norm_gemv
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.moe.gemv import add_norm_experts, kind_of
from tokenmill.ops.triton.moe.select import streams_experts
from tokenmill.ops.triton.quant.fused_norm_quant import QuantizedRegions, is_plain_layer, quantized_rows_for


def row_borders(device: torch.device) -> tuple[int, ...]:
    tuning = capabilities_of(device).tuning
    return tuple(sorted({1, 2, tuning.moe_gemv_max_tokens + 1, tuning.gemm_add_min_rows}))


def choose_regions(ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
    fused = FusedRegions(ops, batch.mode)
    kind = quantized_rows_for(layers, batch)
    if kind is None:
        return [fused.choose(layer, batch) for layer in layers]
    quantized = QuantizedRegions(fused.composed, kind)
    table = replace(
        fused.table(),
        norm_project=quantized.norm_project,
        project_add=quantized.project_add,
        gated_mlp=quantized.gated_mlp,
    )
    return [table] * len(layers)


def choose_deterministic(ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
    """Return deterministic regions, composed of small ops whose order of summation does not depend on the batch. Only
    the work before attention is fused, since it is done token by token."""
    table = ComposedRegions(ops, batch.mode).table()
    return [replace(table, attend=FusedRegions(ops, batch.mode).write_and_attend)] * len(layers)


def adapted_regions(ops: Ops, mode: Mode, adapters: Any) -> Regions:
    """Return the regions of a batch in which some tokens use adapters: small ops, so that every product can be
    adapted."""
    return FusedRegions(ops, mode, adapters).table()


def deterministic_adapted_regions(ops: Ops, mode: Mode, adapters: Any) -> Regions:
    table = ComposedRegions(ops, mode, adapters=adapters).table()
    return replace(table, attend=FusedRegions(ops, mode).write_and_attend)


class FusedRegions:
    def __init__(self, ops: Ops, mode: Mode, adapters: Any = None) -> None:
        self.composed = ComposedRegions(ops, mode, gated_linear, adapters)

    def table(self) -> Regions:
        return replace(self.composed.table(), attend=self.attend)

    def choose(self, layer: LayerWeights, batch: BatchClass) -> Regions:
        table, feed = self.table(), layer.feed
        if not is_plain_layer(layer):
            return table
        if batch.max_rows == 1 and _takes_norm_gemv(layer.project_in):
            table = replace(table, norm_project=self.norm_project_row)
        is_added_to = not layer.has_streams
        if is_added_to and layer.scale == 1.0 and _adds_in_place(layer.project_out, layer.post_norm, batch):
            table = replace(table, project_add=self.add_in_place)
        if isinstance(feed, GatedMlpWeights):
            is_added = is_added_to and feed.scale == 1.0 and _adds_in_place(feed.down, feed.post_norm, batch)
            return replace(table, gated_mlp=self.gated_mlp_in_place) if is_added else table
        is_few = isinstance(feed, MoeWeights) and _are_few(feed, batch)
        return replace(table, experts=self.few_experts) if is_few else table

    def attend(self, inputs: AttendInputs) -> torch.Tensor:
        qkv, cache, _, norms, eps, cos_sin, plan, args = inputs[:8]
        if inputs.spec is not None:
            return self.composed.attend(inputs)
        num_tokens, (_, kv_heads, _, dim), gpu = len(qkv), cache.keys.shape, capabilities_of(qkv.device)
        is_decode = plan.num_single == num_tokens
        if is_decode and takes_fused_decode(num_tokens, kv_heads, dim, plan.max_context, gpu):
            return fused_decode_attention(qkv, cache, norms, eps, cos_sin, plan, args)
        return self.write_and_attend(inputs)

    def write_and_attend(self, inputs: AttendInputs) -> torch.Tensor:
        if inputs.spec is not None:
            return self.composed.attend(inputs)
        qkv, cache, slots, norms, eps, cos_sin, plan, args = inputs[:8]
        queries = norm_rope_write_kv(qkv, cache, slots, norms, eps, cos_sin)
        return self.composed.ops.attention(queries, cache, plan, args)

    def norm_project_row(
        self, stream: PlainStream, norm: Norm | None, projection: ProjectionWeights
    ) -> tuple[torch.Tensor, PlainStream]:
        assert norm is not None, "see `is_plain_layer`"
        first, residual = (stream.residual, None) if stream.delta is None else (stream.delta, stream.residual)
        weight = projection.weight
        result, total = norm_gemv(first, residual, norm.weight, norm.eps, weight.packed, weight.bias)
        return result, PlainStream(total)

    def add_in_place(
        self,
        x: torch.Tensor,
        projection: ProjectionWeights,
        stream: PlainStream,
        post_norm: Norm | None,
        scale: float = 1.0,
    ) -> PlainStream:
        """Add a product to the residual stream in place."""
        assert stream.delta is None and post_norm is None and scale == 1.0
        return PlainStream(add_linear(x, projection.weight, stream.residual, self.composed.mode))

    def gated_mlp_in_place(self, stream: PlainStream, mlp: GatedMlpWeights) -> PlainStream:
        normed, stream = self.composed.normed(stream, mlp.norm)
        inner = gated_linear(normed, mlp.gate_up.weight, mlp.activation, self.composed.mode)
        return self.add_in_place(inner, mlp.down, stream, mlp.post_norm)

    def few_experts(self, stream: PlainStream, moe: MoeWeights) -> PlainStream:
        assert moe.norm is not None, "see `is_plain_layer`"
        norm = moe.norm
        first, residual = (stream.residual, None) if stream.delta is None else (stream.delta, stream.residual)
        result, normed, total = add_norm_experts(
            first, residual, norm.weight, norm.eps, moe.router.weight, moe.experts, moe.routing,
            moe.spec.expert.activation,
        )  # fmt: skip
        if moe.experts.sum_out is not None:
            result = moe.experts.sum_out(result)
        if moe.shared is not None:
            result = result + self.composed.shared_expert(normed, moe.shared)
        return self.composed.added(result, PlainStream(total), moe.post_norm, moe.scale)


def _takes_norm_gemv(projection: ProjectionWeights) -> bool:
    matrix = projection.weight.packed
    is_plain = projection.is_self_contained and isinstance(matrix, torch.Tensor)
    return is_plain and takes_norm_gemv(len(matrix), matrix.shape[1], PLAIN[matrix.dtype])


def _adds_in_place(projection: ProjectionWeights, post_norm: Norm | None, batch: BatchClass) -> bool:
    is_whole = post_norm is None and projection.is_self_contained
    return is_whole and can_add(projection.weight, batch.min_rows, batch.mode)


def _are_few(moe: MoeWeights, batch: BatchClass) -> bool:
    if moe.norm is None:
        return False
    gpu, kind = capabilities_of(moe.norm.weight.device), kind_of(moe.experts)
    is_usual = moe.router.is_self_contained and moe.router.weight.bias is None and moe.latent is None
    is_usual = is_usual and not moe.routing.spec.has_input_norm and not moe.routing.spec.weights_input
    has_kernel = (
        moe.experts.is_gated
        and moe.experts.gather_inner is None
        and not moe.experts.has_bias
        and (moe.routing.is_plain or kind in ("plain", "fp4", "fp8_blocks"))
    )
    return is_usual and has_kernel and batch.min_rows > 0 and streams_experts(batch.max_rows, kind, gpu, is_fused=True)
