"""One decoder layer: a short list of regions over the residual stream.

    stream ─► norm_project ─► mixer ─► project_add ─► gated_mlp or experts ─► stream

The list is data (`arch/regions.py`); what a region does is one function of the backend's (`Regions` in
`ops/interface.py`), chosen for this layer's weights and each class of batches when the model was loaded. Only regions
look inside the stream. What happens between tokens is a mixer's: attention, or others that keep what they need of
earlier tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from tokenmill.arch.regions import Experts, Feed, LayerRegions
from tokenmill.arch.spec import Gqa, LayerSpec, ShortConv
from tokenmill.errors import UnsupportedModel
from tokenmill.models.attention import Attention
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.models.short_conv import ShortConvolution
from tokenmill.ops.interface import (
    BatchClass,
    FeedWeights,
    GatedMlpWeights,
    LayerWeights,
    MoeWeights,
    Norm,
    Regions,
    SharedExpert,
    Stream,
)


class Mixer(Protocol):
    """Mixes each token's activations with those of the tokens before it, and keeps what later tokens need."""

    @property
    def kind(self) -> Hashable:
        """The same for two mixers that launch the same kernels."""
        ...

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """[T, rows of the layer's `project_in`] → [T, columns of its `project_out`]"""
        ...


@dataclass(frozen=True)
class Layer:
    spec: LayerSpec
    mixer: Mixer
    weights: LayerWeights
    regions: Mapping[BatchClass, Regions]

    def __call__(self, stream: Stream, step: ForwardContext, output_rows: torch.Tensor | None = None) -> Stream:
        """`output_rows` [L]: the tokens whose results are wanted; behind the mixer the stream has only those."""
        weights = self.weights
        before, after = (step.batch_class,) * 2 if output_rows is None else step.gathering
        regions = self.regions[before]
        projected, stream = regions.norm_project(stream, weights.norm, weights.project_in)
        mixed = self.mixer.attend(projected, step, regions)
        if output_rows is not None:
            mixed, stream = mixed[output_rows], regions.gather(stream, output_rows)
            regions = self.regions[after]
        stream = regions.project_add(mixed, weights.project_out, stream, weights.post_norm)
        if isinstance(weights.feed, GatedMlpWeights):
            return regions.gated_mlp(stream, weights.feed)
        return regions.experts(stream, weights.feed)

    @property
    def kind(self) -> Hashable:
        """The same for two layers that differ in numbers only, and in where their keys and values lie."""
        return self.spec, self.mixer.kind, form_of(self.weights)


def load_mixer(regions: LayerRegions, norm_eps: float, load: Loader) -> Mixer:
    _, attend, _, _ = regions
    match attend.mixer:
        case Gqa() as spec:
            return Attention(spec, attend.name, attend.layer, norm_eps, load)
        case ShortConv() as spec:
            return ShortConvolution(spec, attend.name, attend.layer, load)


def load_weights(regions: LayerRegions, norm_eps: float, load: Loader) -> LayerWeights:
    project, _, add, feed = regions
    return LayerWeights(
        load.norm(project.norm, norm_eps),
        load.projection(project.projection),
        load.projection(add.projection),
        _post_norm(add.post_norm, norm_eps, load),
        load_feed(feed, norm_eps, load),
    )


def load_feed(feed: Feed, norm_eps: float, load: Loader) -> FeedWeights:
    if isinstance(feed, Experts):
        return _load_experts(feed, norm_eps, load)
    return GatedMlpWeights(
        load.norm(feed.norm, norm_eps),
        load.projection(feed.gate_up),
        load.projection(feed.down),
        feed.spec.activation,
        _post_norm(feed.post_norm, norm_eps, load),
    )


def _load_experts(feed: Experts, norm_eps: float, load: Loader) -> MoeWeights:
    if feed.spec.expert.bias:
        raise UnsupportedModel("routed experts with biases are not implemented")
    gate, up, down = (load.source.get(f"{name}.weight") for name in (feed.gates, feed.ups, feed.downs))
    return MoeWeights(
        load.norm(feed.norm, norm_eps),
        load.projection(feed.router),
        load.ops.pack_experts(gate, up, down, load.dense),
        feed.spec,
        _load_shared(feed, load),
        _post_norm(feed.post_norm, norm_eps, load),
    )


def _load_shared(feed: Experts, load: Loader) -> SharedExpert | None:
    if feed.shared is None or feed.spec.shared is None:
        return None
    gate_up, down = map(load.projection, feed.shared)
    gate = None if feed.shared_gate is None else load.vector(f"{feed.shared_gate}.weight").view(-1)
    return SharedExpert(gate_up, down, feed.spec.shared.activation, gate)


def _post_norm(name: str | None, norm_eps: float, load: Loader) -> Norm | None:
    return None if name is None else load.norm(name, norm_eps)


def one_of_each(layers: Sequence[Layer]) -> list[Layer]:
    """One layer of each kind, for a step that shall launch what all layers launch and take the memory they take.

    What a layer meets depends on the one before it too (whether anything is left to be added to the stream), and the
    first and the last one have tasks of their own. So every pair of neighbouring kinds is there once; of equal pairs
    the last, so that the model's last layer is there:

        local  local  local  global  local  local  local  global  local  local         a model
        local                                      local  global  local  local         one of each
    """
    kinds = [layer.kind for layer in layers]
    seconds = {pair: number for number, pair in enumerate(pairwise(kinds), start=1)}
    taken = {0, *(number - 1 for number in seconds.values()), *seconds.values()}
    return [layers[number] for number in sorted(taken)]
