"""Regions of a layer composed of small ops: the default of every backend, which may replace them by fused kernels.

The residual stream and the last region's output are passed on separately, so that the next norm can fuse the addition:

    Stream(residual, delta) ─► residual + delta, normed ─► projection ─► attend ─► projection ─► Stream(residual, delta)
                               └──────────── norm_project ──────────┘              └──────── project_add ────────────┘

`choose_regions` selects the implementation of every region when a model is loaded, for each layer and batch class: a
range of row counts between two of the backend's borders, launched eagerly or captured into a graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tokenmill.arch.spec import Activation, AttentionGate, Gqa
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import (
    AttendInputs,
    BatchClass,
    FeedWeights,
    GatedLinear,
    GatedMlpWeights,
    InputWeights,
    LayerWeights,
    LinearWeight,
    MoeWeights,
    Norm,
    Ops,
    ProjectionWeights,
    Regions,
    SharedExpert,
    SideBySideWeights,
)
from tokenmill.ops.xielu import xielu

MAX_ROWS = 1 << 62  # upper end of the last batch class: no limit
MODES: tuple[Mode, ...] = ("eager", "captured")


class PlainStream(NamedTuple):
    """The residual stream as residual + delta; the next norm performs the addition."""

    residual: torch.Tensor  # [T, H]
    delta: torch.Tensor | None = None  # [T, H]


class ComposedRegions:
    """The regions for one mode, as methods over `ops`."""

    def __init__(self, ops: Ops, mode: Mode, gated_linear: GatedLinear | None = None, adapters: Any = None) -> None:
        """`gated_linear`: a fused product with activation. `adapters`: one step's adapter plan (`LowRankOps.plan`)."""
        self.ops = ops
        self.mode = mode
        self.gated_linear = gated_linear or self._gated_linear
        self.adapters = adapters

    def table(self) -> Regions:
        return Regions(
            begin=PlainStream,
            norm_project=self.norm_project,
            project=self.linear,
            attend=self.attend,
            gather=gather,
            project_add=self.project_add,
            gated_mlp=self.gated_mlp,
            experts=self.experts,
            side_by_side=self.side_by_side,
            project_and_feed=self.project_and_feed,
            add_input=self.add_input,
            gated_input=self.gated_input,
            whole=self.whole,
            added=added,
            scale=self.scale,
            finish=self.finish,
        )

    def norm_project(
        self, stream: PlainStream, norm: Norm | None, projection: ProjectionWeights
    ) -> tuple[torch.Tensor, PlainStream]:
        normed, stream = self.normed(stream, norm)
        return self.linear(normed, projection), stream

    def linear(self, x: torch.Tensor, projection: ProjectionWeights) -> torch.Tensor:
        return projection(x, self.mode, self.adapters)

    def attend(self, inputs: AttendInputs) -> torch.Tensor:
        if inputs.spec is not None:
            return attend_variant(self.ops, inputs, inputs.spec)
        qkv, cache, slots, norms, eps, cos_sin, plan, args = inputs[:8]
        _, kv_heads, _, dim = cache.keys.shape
        heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
        queries, keys, values = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            queries, keys = self.ops.rms_norm(queries, norms[0], eps), self.ops.rms_norm(keys, norms[1], eps)
        if cos_sin is not None:
            queries, keys = self.ops.rotate(queries, *cos_sin), self.ops.rotate(keys, *cos_sin)
        self.ops.write_kv(cache, keys, values, slots)
        return self.ops.attention(queries, cache, plan, args)

    def project_add(
        self,
        x: torch.Tensor,
        projection: ProjectionWeights,
        stream: PlainStream,
        post_norm: Norm | None,
        scale: float = 1.0,
    ) -> PlainStream:
        return self.added(self.linear(x, projection), stream, post_norm, scale)

    def gated_mlp(self, stream: PlainStream, mlp: GatedMlpWeights) -> PlainStream:
        normed, stream = self.normed(stream, mlp.norm)
        return self.added(self._mlp(normed, mlp), stream, mlp.post_norm, mlp.scale)

    def experts(self, stream: PlainStream, moe: MoeWeights) -> PlainStream:
        normed, stream = self.normed(stream, moe.norm)
        return self.added(self._experts(normed, stream.residual, moe), stream, moe.post_norm, moe.scale)

    def side_by_side(self, stream: PlainStream, feeds: SideBySideWeights) -> PlainStream:
        normed, stream = self.normed(stream, feeds.mlp.norm)
        first = self.after(self._mlp(normed, feeds.mlp), feeds.mlp.post_norm)
        normed, _ = self.normed(stream, feeds.experts.norm)
        second = self.after(self._experts(normed, stream.residual, feeds.experts), feeds.experts.post_norm)
        return self.added(first + second, stream, feeds.post_norm, feeds.scale)

    def project_and_feed(
        self, x: torch.Tensor, projection: ProjectionWeights, stream: PlainStream, feed: FeedWeights, scale: float = 1.0
    ) -> PlainStream:
        assert stream.delta is None and not isinstance(feed, SideBySideWeights)
        mixed = self.after(self.linear(x, projection), None, scale)
        normed, stream = self.normed(stream, feed.norm)
        if isinstance(feed, GatedMlpWeights):
            result = self._mlp(normed, feed)
        else:
            result = self._experts(normed, stream.residual, feed)
        return PlainStream(stream.residual, mixed + self.after(result, feed.post_norm, feed.scale))

    def add_input(self, stream: PlainStream, embedded: torch.Tensor, weights: InputWeights) -> PlainStream:
        total = self.whole(stream)
        return PlainStream(total, self.gated_input(total, embedded, weights))

    def gated_input(self, x: torch.Tensor, embedded: torch.Tensor, weights: InputWeights) -> torch.Tensor:
        gate = self.linear(x, weights.gate)
        inner = self.ops.act_mul(torch.cat((gate, embedded), dim=-1), weights.activation)
        return self.after(self.linear(inner, weights.up), weights.norm)

    def scale(self, stream: PlainStream, factor: torch.Tensor) -> PlainStream:
        return PlainStream((self.whole(stream) * factor).to(stream.residual.dtype))

    def finish(self, stream: PlainStream, norm: Norm) -> torch.Tensor:
        return self.normed(stream, norm)[0]

    def whole(self, stream: PlainStream) -> torch.Tensor:
        return stream.residual if stream.delta is None else stream.residual + stream.delta

    def normed(self, stream: PlainStream, norm: Norm | None) -> tuple[torch.Tensor, PlainStream]:
        """Return norm(residual + delta) [T, H], and the stream with the addition done."""
        if norm is None or not norm.is_rms:
            total = self.whole(stream)
            return total if norm is None else self.norm(total, norm), PlainStream(total)
        if stream.delta is None:
            return self.ops.rms_norm(stream.residual, norm.weight, norm.eps), stream
        normed, total = self.ops.add_rms_norm(stream.delta, stream.residual, norm.weight, norm.eps)
        return normed, PlainStream(total)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.is_rms:
            return self.ops.rms_norm(x, norm.weight, norm.eps)
        return self.ops.layer_norm(x, norm.weight, norm.bias, norm.eps)

    def added(
        self, delta: torch.Tensor, stream: PlainStream, post_norm: Norm | None, scale: float = 1.0
    ) -> PlainStream:
        """Return the stream with `delta` pending; where a layer has two mixers, their deltas are summed."""
        delta = self.after(delta, post_norm, scale)
        return PlainStream(stream.residual, delta if stream.delta is None else stream.delta + delta)

    def after(self, result: torch.Tensor, post_norm: Norm | None, scale: float = 1.0) -> torch.Tensor:
        """Apply the post-norm and the residual scale to a result before it is added to the stream."""
        if post_norm is not None:
            result = self.norm(result, post_norm)
        return result if scale == 1.0 else result * scale

    def _mlp(self, normed: torch.Tensor, mlp: GatedMlpWeights | SharedExpert) -> torch.Tensor:
        """[T, H] → [T, H]"""
        if isinstance(mlp, GatedMlpWeights) and mlp.curve is not None:
            inner = xielu(self.linear(normed, mlp.gate_up), mlp.curve)
        elif not mlp.is_gated:
            inner = self.ops.activate(self.linear(normed, mlp.gate_up), mlp.activation)
        elif isinstance(mlp, GatedMlpWeights) and mlp.cutoff is not None:
            inner = self.ops.cut_act_mul(self.linear(normed, mlp.gate_up), mlp.activation, mlp.cutoff)
        elif self.adapters is None or not mlp.gate_up.is_adapted:
            inner = self.gated_linear(normed, mlp.gate_up.weight, mlp.activation, self.mode)
        else:
            inner = mlp.gate_up.gated(normed, mlp.activation, self.mode, self.adapters)
        return self.linear(inner, mlp.down)

    def _experts(self, normed: torch.Tensor, residual: torch.Tensor, moe: MoeWeights) -> torch.Tensor:
        """[T, H] → [T, H]; `residual` is the stream before the norm"""
        router_input = normed if moe.router_norm is None else self.norm(residual, moe.router_norm)
        weights, ids = self.ops.route(self.linear(router_input, moe.router), moe.routing)
        inputs = normed if moe.latent is None else self.linear(normed, moe.latent[0])
        if moe.routing.spec.weights_input:
            inputs, weights = (inputs * weights).to(inputs.dtype), torch.ones_like(weights)
        activation = moe.spec.expert.activation
        if self.adapters is None or moe.adapters is None:
            result = self.ops.experts(inputs, weights, ids, moe.experts, activation)
        else:
            result = moe.adapters.run(inputs, weights, ids, moe.experts, activation, self.adapters)
        if moe.experts.sum_out is not None:
            result = moe.experts.sum_out(result)
        if moe.latent is not None:
            result = self.linear(result, moe.latent[1])
        return result if moe.shared is None else result + self.shared_expert(normed, moe.shared)

    def _gated_linear(
        self, x: torch.Tensor, weight: LinearWeight, activation: Activation, mode: Mode = "eager"
    ) -> torch.Tensor:
        return self.ops.act_mul(self.ops.linear(x, weight, mode), activation)

    def shared_expert(self, x: torch.Tensor, shared: SharedExpert) -> torch.Tensor:
        """[T, H] → [T, H], each token's result times the sigmoid of its gate, if there is one"""
        result = self._mlp(x, shared)
        if shared.gate is None:
            return result
        return self.ops.gate_rows(result, x, shared.gate)


def attend_variant(ops: Ops, inputs: AttendInputs, spec: Gqa) -> torch.Tensor:
    """Attention with every option of the spec (norms, gates, scales, shared caches), composed of small ops."""
    parts = [spec.q_size, *((spec.kv_size, spec.v_size) if spec.has_own_kv else ()), spec.gate_size]
    queries, *others = torch.split(inputs.qkv, parts, dim=1)
    if spec.qkv_clip is not None:
        queries = queries.clamp(-spec.qkv_clip, spec.qkv_clip)
        others[:2] = [part.clamp(-spec.qkv_clip, spec.qkv_clip) for part in others[:2]]
    queries = _norm_rope_heads(ops, queries, spec.num_heads, 0, inputs, spec)
    if inputs.growth is not None:
        queries = (queries * inputs.growth.view(-1, 1, 1)).to(queries.dtype)
    if spec.has_own_kv:
        keys = _norm_rope_heads(ops, others[0], spec.num_kv_heads, 1, inputs, spec)
        values = others[1].reshape(len(queries), spec.num_kv_heads, -1)
        if spec.has_value_norm:
            values = ops.rms_norm(values, torch.ones(values.shape[-1], device=values.device), inputs.eps)
        if spec.value_scale != 1.0:
            values = values * spec.value_scale
        ops.write_kv(inputs.cache, keys, values, inputs.slots)
    mixed = ops.attention(queries, inputs.cache, inputs.plan, inputs.args)
    return mixed if spec.gate is None else gate_heads(mixed, others[-1], spec.gate)


def _norm_rope_heads(
    ops: Ops, x: torch.Tensor, num_heads: int, which: int, inputs: AttendInputs, spec: Gqa
) -> torch.Tensor:
    """Norm and rotate queries (which = 0) or keys (1): [T, heads * D] → [T, heads, D]."""
    weight = None if inputs.norms is None else inputs.norms[which]
    if spec.qk_norm == "all" and weight is not None:
        x = ops.rms_norm(x, weight, inputs.eps)
    heads = x.reshape(len(x), num_heads, spec.head_dim)
    if spec.qk_norm == "head" and weight is not None:
        heads = ops.rms_norm(heads, weight, inputs.eps)
    if inputs.cos_sin is not None:
        heads = ops.rotate(heads, *inputs.cos_sin)
    if spec.qk_norm in ("head_after_rope", "l2_after_rope"):
        ones = torch.ones(spec.head_dim, device=x.device) if weight is None else weight
        heads = ops.rms_norm(heads, ones, inputs.eps)
    return heads


def gate_heads(mixed: torch.Tensor, gate: torch.Tensor, spec: AttentionGate) -> torch.Tensor:
    """Multiply attention outputs [T, heads * D] by a gate [T, heads] or [T, heads * D]."""
    weights = torch.sigmoid(gate.float()) if spec.function == "sigmoid" else functional.softplus(gate.float())
    if not spec.is_per_head:
        return (mixed * weights).to(mixed.dtype)
    heads = mixed.view(*weights.shape, -1) * weights.unsqueeze(2)
    return heads.flatten(1).to(mixed.dtype)


def added(stream: PlainStream) -> torch.Tensor:
    assert stream.delta is not None, "composed regions return their output as `delta`"
    return stream.delta


def gather(stream: PlainStream, rows: torch.Tensor) -> PlainStream:
    return PlainStream(stream.residual[rows], None if stream.delta is None else stream.delta[rows])


def composed(ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
    """Return composed regions for all layers: `choose_regions` of a backend without fused ones."""
    return [ComposedRegions(ops, batch.mode).table()] * len(layers)


def adapted_regions(ops: Ops, mode: Mode, adapters: Any) -> Regions:
    """Return composed regions for a batch in which some tokens use adapters."""
    return ComposedRegions(ops, mode, adapters=adapters).table()


class BatchClasses:
    """The batch classes of a device: ranges of row counts between borders, per mode, with and without a gather."""

    def __init__(self, row_borders: tuple[int, ...]) -> None:
        self._borders = (0, *row_borders, MAX_ROWS)

    def every(self) -> list[BatchClass]:
        spans = [(first, end - 1) for first, end in pairwise(self._borders)]
        return [BatchClass(*span, mode, gathers) for span, mode, gathers in product(spans, MODES, (False, True))]

    def of(self, num_rows: int, mode: Mode, *, gathers: bool = False) -> BatchClass:
        number = bisect_right(self._borders, num_rows)
        return BatchClass(self._borders[number - 1], self._borders[number] - 1, mode, gathers)


def choose_regions(
    ops: Ops, layers: Sequence[LayerWeights], classes: BatchClasses
) -> list[Mapping[BatchClass, Regions]]:
    """Return each layer's regions for every batch class."""
    found: list[dict[BatchClass, Regions]] = [{} for _ in layers]
    for batch in classes.every():
        for table, regions in zip(found, ops.choose_regions(ops, layers, batch), strict=True):
            table[batch] = regions
    return list(found)
