"""One decoder layer: a short list of regions over the residual stream.

    stream ─► norm_project ─► mixer ─► project_add ─► gated_mlp or experts ─► stream

The list is data (`arch/regions.py`). Each region is one function of the backend (`Regions` in `ops/interface.py`),
chosen at load for this layer's weights and for each batch class. Only regions know the layout of the stream. Mixers
(attention, recurrent layers, convolutions) are the only parts that combine tokens; each caches what later tokens need.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

import torch

from tokenmill.arch.recurrent import InnerProjection, Recurrent
from tokenmill.arch.regions import AddInput, Experts, Feed, GatedMlp, LayerRegions, SideBySide
from tokenmill.arch.spec import RMS_NORM, Gqa, LayerSpec, Mla, NormSpec, ShortConv, WindowedMqa
from tokenmill.models.attention import Attention
from tokenmill.models.compressed_attention import WindowedMixer
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.latent_attention import LatentAttention
from tokenmill.models.linear import Loader, form_of
from tokenmill.models.recurrent import RecurrentMixer
from tokenmill.models.selective_scan import SelectiveScan
from tokenmill.models.short_conv import ShortConvolution
from tokenmill.ops.interface import (
    BatchClass,
    FeedWeights,
    GatedMlpWeights,
    InputWeights,
    LayerWeights,
    MoeWeights,
    Norm,
    Regions,
    SharedExpert,
    SideBySideWeights,
    Stream,
)
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.xielu import xielu_curve
from tokenmill.parallel.group import Sum


class HasKind(Protocol):
    @property
    def kind(self) -> Hashable: ...


AnyLayer = TypeVar("AnyLayer", bound=HasKind)


class Mixer(Protocol):
    """Mixes each token's activations with those of earlier tokens, and caches what later tokens need."""

    @property
    def kind(self) -> Hashable:
        """A key that is equal for two mixers that launch the same kernels."""
        ...

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """[T, rows of the layer's `project_in`] → [T, columns of its `project_out`]"""
        ...


@dataclass(frozen=True)
class SideMixer:
    """A second mixer beside a layer's first (hybrid heads); it reads the last columns of the stacked projections."""

    mixer: RecurrentMixer
    num_inputs: int


@dataclass(frozen=True)
class Layer:
    spec: LayerSpec
    mixer: Mixer
    weights: LayerWeights
    regions: Mapping[BatchClass, Regions]
    number: int = 0
    side: SideMixer | None = None

    def __call__(self, stream: Stream, step: ForwardContext, output_rows: torch.Tensor | None = None) -> Stream:
        """`output_rows` [L]: the tokens whose outputs are needed; after the mixer the stream holds only those."""
        weights = self.weights
        if weights.is_parallel and weights.feed is not None:
            mixed, _, stream, regions = self._run_mixers(stream, step, output_rows)
            stream = regions.project_and_feed(mixed, weights.project_out, stream, weights.feed, weights.scale)
        else:
            stream, regions = self.mix(stream, step, output_rows)
            stream = self.feed_forward(stream, regions, step, output_rows)
        if weights.add_input is not None:
            stream = regions.add_input(stream, step.layer_inputs_of(self.number, output_rows), weights.add_input)
        return stream if weights.stream_scale is None else regions.scale(stream, weights.stream_scale)

    def mix(self, stream: Stream, step: ForwardContext, output_rows: torch.Tensor | None) -> tuple[Stream, Regions]:
        """Run the first half of the layer, the mixer; return the stream and the regions that compute the rest."""
        weights = self.weights
        mixed, beside, stream, regions = self._run_mixers(stream, step, output_rows)
        stream = regions.project_add(mixed, weights.project_out, stream, weights.post_norm, weights.scale)
        if beside is not None and weights.side_out is not None:
            stream = regions.project_add(beside, weights.side_out, stream, weights.post_norm, weights.scale)
        return stream, regions

    def feed_forward(
        self, stream: Stream, regions: Regions, step: ForwardContext, output_rows: torch.Tensor | None
    ) -> Stream:
        """Run the second half of the layer: MLP or experts."""
        feed = self.weights.feed
        if isinstance(feed, MoeWeights) and feed.table is not None:
            ids = step.batch.token_ids if output_rows is None else step.batch.token_ids[output_rows]
            feed = replace(feed, chosen=feed.table[ids])
        return stream if feed is None else _feed_forward(regions, stream, feed)

    def regions_before(self, step: ForwardContext, output_rows: torch.Tensor | None) -> Regions:
        """Return the regions that compute the layer up to its mixer."""
        before = step.batch_class if output_rows is None else step.gathering[0]
        return self.regions[before] if step.adapted is None else step.adapted.regions

    def _run_mixers(
        self, stream: Stream, step: ForwardContext, output_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Stream, Regions]:
        """Return the outputs of both mixers for `output_rows`, their residual stream, and the regions that follow."""
        weights, regions = self.weights, self.regions_before(step, output_rows)
        projected, stream = regions.norm_project(stream, weights.norm, weights.project_in)
        mixed, beside = self._attend(projected, step, regions)
        if output_rows is not None:
            mixed, stream = mixed[output_rows], regions.gather(stream, output_rows)
            beside = None if beside is None else beside[output_rows]
            regions = self.regions[step.gathering[1]] if step.adapted is None else step.adapted.gathered_regions
        return mixed, beside, stream, regions

    def _attend(
        self, projected: torch.Tensor, step: ForwardContext, regions: Regions
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.side is None:
            return self.mixer.attend(projected, step, regions), None
        size = self.side.num_inputs
        own, beside = projected[:, :-size].contiguous(), projected[:, -size:].contiguous()
        return self.mixer.attend(own, step, regions), self.side.mixer.attend(beside, step, regions)

    @property
    def kind(self) -> Hashable:
        """A key that is equal for two layers that differ only in weight values and in their place in the cache."""
        return self.spec, self.mixer.kind, self.side and self.side.mixer.kind, form_of(self.weights)


def _feed_forward(regions: Regions, stream: Stream, feed: FeedWeights) -> Stream:
    match feed:
        case GatedMlpWeights():
            return regions.gated_mlp(stream, feed)
        case MoeWeights():
            return regions.experts(stream, feed)
        case SideBySideWeights():
            return regions.side_by_side(stream, feed)


def load_side_mixer(regions: LayerRegions, norm_eps: float, load: Loader) -> SideMixer | None:
    if regions.side is None:
        return None
    attend, _ = regions.side
    spec = attend.mixer
    assert isinstance(spec, Recurrent), "see `LayerSpec.side_mixer`"
    return SideMixer(RecurrentMixer(spec, attend.name, attend.layer, norm_eps, load), spec.projected_size)


def load_mixer(regions: LayerRegions, norm_eps: float, load: Loader) -> Mixer:
    attend = regions.attend
    match attend.mixer:
        case Gqa() as spec:
            return Attention(spec, attend.name, attend.layer, norm_eps, load)
        case Mla() as spec:
            return LatentAttention(spec, attend.name, attend.layer, load)
        case WindowedMqa() as spec:
            return WindowedMixer(spec, attend.name, attend.layer, load)
        case ShortConv() as spec:
            return ShortConvolution(spec, attend.name, attend.layer, load)
        case Recurrent(inner=InnerProjection() as inner) as spec:
            return SelectiveScan(spec, inner, attend.name, attend.layer, norm_eps, load)
        case Recurrent() as spec:
            return RecurrentMixer(spec, attend.name, attend.layer, norm_eps, load)


@dataclass(frozen=True)
class LayerLoader:
    """Loads the weights that a layer's regions name."""

    load: Loader
    norm_eps: float
    norm: NormSpec = RMS_NORM
    width: int = 0  # of the stream
    has_streams: bool = False

    def weights(self, regions: LayerRegions) -> LayerWeights:
        project, add = regions.project, regions.add
        return LayerWeights(
            self._norm(project.norm),
            self.load.projection(project.projection),
            self.load.projection(add.projection),
            self._norm(add.post_norm),
            None if regions.feed is None else self.feed(regions.feed),
            add.scale,
            regions.is_parallel,
            self._input(regions.add_input),
            None if regions.scale is None else self.load.vector(regions.scale),
            None if regions.side is None else self.load.projection(regions.side[1].projection),
            self.has_streams,
        )

    def feed(self, feed: Feed) -> FeedWeights:
        match feed:
            case SideBySide():
                mlp, experts = self._mlp(feed.mlp), self._experts(feed.experts)
                return SideBySideWeights(mlp, experts, self._norm(feed.post_norm), feed.scale)
            case Experts():
                return self._experts(feed)
            case GatedMlp():
                return self._mlp(feed)

    def _mlp(self, feed: GatedMlp) -> GatedMlpWeights:
        return GatedMlpWeights(
            self._norm(feed.norm),
            self.load.projection(feed.gate_up),
            self.load.projection(feed.down),
            feed.spec.activation,
            self._norm(feed.post_norm),
            feed.spec.is_gated,
            feed.scale,
            feed.spec.sparsity_cutoff,
            xielu_curve([float(self.load.vector(name)) for name in feed.curve]) if feed.curve else None,
        )

    def _experts(self, feed: Experts) -> MoeWeights:
        load = self.load
        names = (feed.gates, feed.ups, feed.downs)
        gate, up, down = (None if name is None else load.source.get(f"{name}.weight") for name in names)
        assert up is not None and down is not None
        experts = load.ops.pack_experts(gate, up, down, load.dense, self._joined_shared(feed))
        if feed.spec.expert.bias:
            experts = replace(experts, gate_up_bias=self._gate_up_bias(feed), down_bias=self._bias(feed.downs))
        if load.shard is not None:
            outputs = load.shard.finish_outputs((feed.downs,))
            if isinstance(outputs, Sum):
                experts = replace(experts, sum_out=outputs)
            else:
                experts = replace(experts, gather_inner=load.shard.gather_inputs(feed.downs), gather_out=outputs)
        return MoeWeights(
            self._norm(feed.norm),
            load.projection(feed.router),
            experts,
            feed.spec,
            None if experts.num_shared else self._shared(feed),
            self._norm(feed.post_norm),
            None if feed.choice_bias is None else load.vector(feed.choice_bias),
            None if feed.expert_scales is None else load.vector(feed.expert_scales),
            self._router_norm(feed),
            None if feed.latent is None else (load.projection(feed.latent[0]), load.projection(feed.latent[1])),
            feed.scale,
            load.expert_adapters(
                names, up.shape, self._shared_names(feed) if experts.num_shared else None, experts.num_shared
            ),
            None if feed.table is None else load.vector(feed.table).long(),
        )

    def _joined_shared(self, feed: Experts) -> tuple[RawTensor, RawTensor, RawTensor] | None:
        """Return the matrices of the shared expert if the backend may append it to the routed experts."""
        if feed.shared is None or not feed.spec.is_shared_like_experts or not self.load.ops.joins_shared:
            return None
        if self.load.shard is not None and self.load.shard.gather_inputs(feed.downs) is not None:
            return None  # the gather of inner activations between ranks does not cover appended experts
        first, second, third = (self.load.source.get(f"{name}.weight") for name in self._shared_names(feed) or ())
        return first, second, third

    def _shared_names(self, feed: Experts) -> tuple[str, str, str] | None:
        if feed.shared is None or not feed.spec.is_shared_like_experts:
            return None
        (gate, up), (down,) = (matrices.names for matrices in feed.shared)
        return gate, up, down

    def _bias(self, name: str) -> torch.Tensor:
        return self.load.vector(f"{name}.bias").to(self.load.dtype)

    def _gate_up_bias(self, feed: Experts) -> torch.Tensor:
        return torch.cat([self._bias(name) for name in (feed.gates, feed.ups) if name is not None], dim=1)

    def _router_norm(self, feed: Experts) -> Norm | None:
        if feed.router_norm is None:
            return None
        weight = self.load.vector(f"{feed.router_norm}.weight")
        return Norm(weight * len(weight) ** -0.5, self.norm_eps)

    def _shared(self, feed: Experts) -> SharedExpert | None:
        shared = feed.spec.shared
        if feed.shared is None or shared is None:
            return None
        gate_up, down = map(self.load.projection, feed.shared)
        gate = None if feed.shared_gate is None else self.load.vector(f"{feed.shared_gate}.weight").view(-1)
        return SharedExpert(gate_up, down, shared.activation, gate, shared.is_gated)

    def _input(self, region: AddInput | None) -> InputWeights | None:
        if region is None:
            return None
        gate, up = self.load.projection(region.gate), self.load.projection(region.up)
        norm = self.load.norm(region.norm, self.norm_eps, self.norm, self.width)
        return InputWeights(gate, up, norm, region.activation)

    def _norm(self, name: str | None) -> Norm | None:
        return None if name is None else self.load.norm(name, self.norm_eps, self.norm, self.width)


def one_of_each(layers: Sequence[AnyLayer]) -> list[AnyLayer]:
    """Return a subset of layers that launches every kernel of the whole model and needs as much working memory.

    A layer's kernels also depend on the layer before it (whether an addition to the stream is still pending), and the
    first and last layers differ from the others. So every pair of neighbouring kinds is kept once; of equal pairs the
    last, which keeps the model's last layer:

        local  local  local  global  local  local  local  global  local  local         a model
        local                                      local  global  local  local         one of each
    """
    kinds = [layer.kind for layer in layers]
    seconds = {pair: number for number, pair in enumerate(pairwise(kinds), start=1)}
    taken = {0, *(number - 1 for number in seconds.values()), *seconds.values()}
    return [layers[number] for number in sorted(taken)]
