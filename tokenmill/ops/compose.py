"""Regions of a layer composed of small ops: what every backend computes unless it has something faster.

The residual stream and what was last computed for it travel apart, so that the addition is part of the norm that
follows:

    Stream(residual, delta) ─► residual + delta, normed ─► projection ─► attend ─► projection ─► Stream(residual, delta)
                               └──────────── norm_project ──────────┘              └──────── project_add ────────────┘

Which implementation of a region runs is settled here when a model is loaded (`choose_regions`), one for each layer and
class of batches: numbers of rows between two of a backend's borders, launched one by one or captured into a graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch

from tokenmill.arch.spec import Activation
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import (
    AttendInputs,
    BatchClass,
    GatedLinear,
    GatedMlpWeights,
    LayerWeights,
    LinearWeight,
    MoeWeights,
    Norm,
    Ops,
    ProjectionWeights,
    Regions,
    SharedExpert,
)

MAX_ROWS = 1 << 62  # of the last class: no limit
MODES: tuple[Mode, ...] = ("eager", "captured")


class PlainStream(NamedTuple):
    """The residual stream; `delta` is still to be added, which the next norm does."""

    residual: torch.Tensor  # [T, H]
    delta: torch.Tensor | None = None  # [T, H]


class ComposedRegions:
    """The regions for one mode; `gated_linear` in the place of a product and the activation behind it."""

    def __init__(self, ops: Ops, mode: Mode, gated_linear: GatedLinear | None = None) -> None:
        self.ops = ops
        self.mode = mode
        self.gated_linear = gated_linear or self._gated_linear

    def table(self) -> Regions:
        return Regions(
            begin=PlainStream,
            norm_project=self.norm_project,
            attend=self.attend,
            gather=gather,
            project_add=self.project_add,
            gated_mlp=self.gated_mlp,
            experts=self.experts,
            finish=self.finish,
        )

    def norm_project(
        self, stream: PlainStream, norm: Norm, projection: ProjectionWeights
    ) -> tuple[torch.Tensor, PlainStream]:
        normed, stream = self.normed(stream, norm)
        return self.ops.linear(normed, projection.weight, self.mode), stream

    def attend(self, inputs: AttendInputs) -> torch.Tensor:
        qkv, cache, slots, norms, eps, cos_sin, plan, args = inputs
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
        self, x: torch.Tensor, projection: ProjectionWeights, stream: PlainStream, post_norm: Norm | None
    ) -> PlainStream:
        return self.added(self.ops.linear(x, projection.weight, self.mode), stream, post_norm)

    def gated_mlp(self, stream: PlainStream, mlp: GatedMlpWeights) -> PlainStream:
        normed, stream = self.normed(stream, mlp.norm)
        inner = self.gated_linear(normed, mlp.gate_up.weight, mlp.activation, self.mode)
        return self.project_add(inner, mlp.down, stream, mlp.post_norm)

    def experts(self, stream: PlainStream, moe: MoeWeights) -> PlainStream:
        normed, stream = self.normed(stream, moe.norm)
        logits = self.ops.linear(normed, moe.router.weight, self.mode)
        chosen = self.ops.route(logits, moe.spec.num_active, moe.spec.renormalize)
        result = self.ops.experts(normed, *chosen, moe.experts, moe.spec.expert.activation)
        if moe.shared is not None:
            result = result + self._shared_expert(normed, moe.shared)
        return self.added(result, stream, moe.post_norm)

    def finish(self, stream: PlainStream, norm: Norm) -> torch.Tensor:
        return self.normed(stream, norm)[0]

    def normed(self, stream: PlainStream, norm: Norm) -> tuple[torch.Tensor, PlainStream]:
        """norm(residual + delta) [T, H], and the stream with nothing left to be added"""
        if stream.delta is None:
            return self.ops.rms_norm(stream.residual, norm.weight, norm.eps), stream
        normed, total = self.ops.add_rms_norm(stream.delta, stream.residual, norm.weight, norm.eps)
        return normed, PlainStream(total)

    def added(self, delta: torch.Tensor, stream: PlainStream, post_norm: Norm | None) -> PlainStream:
        """The stream with `delta` to be added"""
        assert stream.delta is None, "a norm comes between two results that are added"
        if post_norm is not None:
            delta = self.ops.rms_norm(delta, post_norm.weight, post_norm.eps)
        return PlainStream(stream.residual, delta)

    def _gated_linear(
        self, x: torch.Tensor, weight: LinearWeight, activation: Activation, mode: Mode = "eager"
    ) -> torch.Tensor:
        return self.ops.act_mul(self.ops.linear(x, weight, mode), activation)

    def _shared_expert(self, x: torch.Tensor, shared: SharedExpert) -> torch.Tensor:
        """[T, H] → [T, H], each token's result times its gate"""
        inner = self.gated_linear(x, shared.gate_up.weight, shared.activation, self.mode)
        result = self.ops.linear(inner, shared.down.weight, self.mode)
        if shared.gate is None:
            return result
        return result * torch.sigmoid(x.float() @ shared.gate).to(x.dtype).unsqueeze(1)


def gather(stream: PlainStream, rows: torch.Tensor) -> PlainStream:
    return PlainStream(stream.residual[rows], None if stream.delta is None else stream.delta[rows])


def composed(ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
    """The choice of a backend without fused regions"""
    return [ComposedRegions(ops, batch.mode).table()] * len(layers)


class BatchClasses:
    """All classes of batches of a device: the numbers of rows between two borders, in each mode, gathering or not"""

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
    """For each layer its regions for every class of batches"""
    found: list[dict[BatchClass, Regions]] = [{} for _ in layers]
    for batch in classes.every():
        for table, regions in zip(found, ops.choose_regions(ops, layers, batch), strict=True):
            table[batch] = regions
    return list(found)
