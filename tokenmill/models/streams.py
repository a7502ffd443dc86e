"""Models with several residual streams (`arch/streams.py`): AltUp and hyper-connections.

The streams are a tensor [T, streams, H]; hyper-connections also carry an addend that is not yet added to it. Each layer
computes on one stream as the `Layer` of any other model does; this module computes what happens around it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import LayerSpec, ModelSpec
from tokenmill.arch.streams import AltUp, HyperConnections, Streams
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.layer import Layer
from tokenmill.models.linear import Loader, Projection, form_of
from tokenmill.ops.interface import BatchClass, Norm, Ops, Regions
from tokenmill.ops.streams import Addend, AltUpNumbers, JoinedStreams, StreamConnection


class StreamEnds(Protocol):
    """Makes the streams from a token's embedding before the first layer, and one vector of them after the last."""

    def begin(self, embedded: torch.Tensor, regions: Regions) -> Any:
        """[T, H] → the streams, in the form that layers pass on"""
        ...

    def finish(self, streams: Any, regions: Regions) -> torch.Tensor:
        """The streams after the last layer → [T, H]"""
        ...


class AltUpEnds:
    def __init__(self, altup: AltUp, load: Loader) -> None:
        others = range(altup.num_streams - 1)
        self._into = [load.projection(Matrices((f"streams.in.{number}",))) for number in others]
        self._out_of = [load.projection(Matrices((f"streams.out.{number}",))) for number in others]
        self._as_long = load.ops.altup.as_long

    def begin(self, embedded: torch.Tensor, regions: Regions) -> torch.Tensor:
        others = [self._as_long(regions.project(embedded, matrix), embedded) for matrix in self._into]
        return torch.stack((embedded, *others), dim=1)

    def finish(self, streams: torch.Tensor, regions: Regions) -> torch.Tensor:
        first, *others = streams.unbind(1)
        total = first.float()
        for stream, matrix in zip(others, self._out_of, strict=True):
            total = total + self._as_long(regions.project(stream.contiguous(), matrix), first)
        return (total / streams.shape[1]).to(streams.dtype)


@dataclass(frozen=True)
class AltUpWeights:
    numbers: AltUpNumbers
    left: Projection  # [rank, H], of the branch beside attention
    right: Projection
    branch_norm: Norm


def load_altup(altup: AltUp, name: str, norm_eps: float, load: Loader) -> AltUpWeights:
    norm = load.norm(f"{name}.altup_router_norm", norm_eps)
    numbers = AltUpNumbers(
        norm.weight,
        norm.eps,
        load.vector(f"{name}.altup_router.weight"),
        load.vector(f"{name}.altup_predict.weight"),
        load.vector(f"{name}.altup_correct.weight"),
        load.vector(f"{name}.altup_scale") if altup.has_output_scale else None,
    )
    return AltUpWeights(
        numbers,
        load.projection(Matrices((f"{name}.branch_left",))),
        load.projection(Matrices((f"{name}.branch_right",))),
        load.norm(f"{name}.branch_norm", norm_eps),
    )


@dataclass(frozen=True)
class StreamLayer:
    """A layer over several residual streams; it wraps the `Layer` that computes on one of them."""

    layer: Layer

    @property
    def spec(self) -> LayerSpec:
        return self.layer.spec

    @property
    def regions(self) -> Mapping[BatchClass, Regions]:
        return self.layer.regions


@dataclass(frozen=True)
class AltUpLayer(StreamLayer):
    """A layer that computes on the first stream; AltUp predicts all streams before it and corrects them after it."""

    altup: AltUpWeights
    ops: Ops

    @property
    def kind(self) -> Hashable:
        return self.layer.kind, form_of(self.altup)

    def __call__(
        self, streams: torch.Tensor, step: ForwardContext, output_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, streams, H] → [T or L, streams, H]"""
        layer, weights = self.layer, self.layer.weights
        assert weights.norm is not None and weights.add_input is not None, "Gemma 3n has both in every layer"
        predicted = self.ops.altup.predict(streams, self.altup.numbers)
        first = predicted[:, 0].contiguous()
        regions = layer.regions_before(step, output_rows)
        stream, regions = layer.mix(regions.begin(first), step, output_rows)
        if output_rows is not None:
            predicted, first = predicted[output_rows], first[output_rows]
        total = (regions.whole(stream) + self._branch(first, weights.norm, regions)) * 2**-0.5
        result = regions.whole(layer.feed_forward(regions.begin(total), regions, step, output_rows))
        corrected, gated = self.ops.altup.correct(predicted, result, self.altup.numbers)
        inputs = step.layer_inputs_of(layer.number, output_rows)
        added = regions.gated_input(gated, inputs, weights.add_input)
        corrected[:, 1:] += added.unsqueeze(1)
        return corrected

    def _branch(self, first: torch.Tensor, norm: Norm, regions: Regions) -> torch.Tensor:
        normed = self.ops.rms_norm(first, norm.weight, norm.eps)
        inner = regions.project(regions.project(normed, self.altup.left), self.altup.right)
        return normed + self.ops.rms_norm(inner, self.altup.branch_norm.weight, self.altup.branch_norm.eps)


# ── hyper-connections ──────────────────────────────────────────────────────────────────────────────────


def load_connection(spec: HyperConnections, name: str, load: Loader) -> StreamConnection:
    return StreamConnection(
        spec, load.vector(f"{name}.weight"), load.vector(f"{name}_base"), load.vector(f"{name}_scale")
    )


class HyperEnds:
    def __init__(self, spec: HyperConnections, load: Loader) -> None:
        self._count = spec.num_streams
        self._end = load_connection(spec, "streams_end", load)
        self._ops = load.ops.hyper

    def begin(self, embedded: torch.Tensor, regions: Regions) -> JoinedStreams:
        return JoinedStreams(embedded.unsqueeze(1).repeat(1, self._count, 1))

    def finish(self, streams: JoinedStreams, regions: Regions) -> torch.Tensor:
        return self._ops.end(streams, self._end)


@dataclass(frozen=True)
class HyperLayer(StreamLayer):
    """A layer whose mixer and MLP each read a weighted sum of the streams and write to all of them."""

    attention: StreamConnection
    feed: StreamConnection
    ops: Ops

    @property
    def kind(self) -> Hashable:
        return self.layer.kind, form_of((self.attention, self.feed))

    def __call__(
        self, joined: JoinedStreams, step: ForwardContext, output_rows: torch.Tensor | None = None
    ) -> JoinedStreams:
        layer = self.layer
        before = layer.regions_before(step, output_rows)
        read, streams, written, mixed = self.ops.hyper.read(joined, self.attention)
        stream, regions = layer.mix(before.begin(read), step, output_rows)
        if output_rows is not None:
            streams, written, mixed = streams[output_rows], written[output_rows], mixed[output_rows]
        joined = JoinedStreams(streams, Addend(regions.added(stream), written, mixed))
        read, streams, written, mixed = self.ops.hyper.read(joined, self.feed)
        stream = layer.feed_forward(regions.begin(read), regions, step, output_rows)
        return JoinedStreams(streams, Addend(regions.added(stream), written, mixed))


# ── any of them ────────────────────────────────────────────────────────────────────────────────────────

StreamedLayer = AltUpLayer | HyperLayer


def load_ends(spec: ModelSpec, load: Loader) -> StreamEnds | None:
    match spec.streams:
        case AltUp() as altup:
            return AltUpEnds(altup, load)
        case HyperConnections() as connections:
            return HyperEnds(connections, load)
        case None:
            return None


def over_streams(layer: Layer, streams: Streams, norm_eps: float, load: Loader) -> StreamedLayer:
    name = f"layers.{layer.number}"
    match streams:
        case AltUp():
            return AltUpLayer(layer, load_altup(streams, name, norm_eps, load), load.ops)
        case HyperConnections():
            attention = load_connection(streams, f"{name}.attn_connect", load)
            return HyperLayer(layer, attention, load_connection(streams, f"{name}.mlp_connect", load), load.ops)
