"""Several residual streams between layers (`arch/streams.py`), each layer run over one of them.

Streams are a tensor [T, streams, H]. What a layer computes of one stream is the `Layer` of other models, in two halves;
here is what happens around it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import LayerSpec, ModelSpec
from tokenmill.arch.streams import AltUp, HyperConnections, Streams
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.layer import Layer
from tokenmill.models.linear import Loader, Projection, form_of
from tokenmill.ops.interface import BatchClass, Norm, Ops, Regions
from tokenmill.ops.streams import AltUpNumbers


class StreamEnds(Protocol):
    """The streams that a token's embedding begins as, and the one vector they end in."""

    def begin(self, embedded: torch.Tensor, regions: Regions) -> torch.Tensor:
        """[T, H] → [T, streams, H]"""
        ...

    def finish(self, streams: torch.Tensor, regions: Regions) -> torch.Tensor:
        """[T, streams, H] → [T, H]"""
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
    """A layer over several residual streams, around the layer that computes on one of them."""

    layer: Layer

    @property
    def spec(self) -> LayerSpec:
        return self.layer.spec

    @property
    def regions(self) -> Mapping[BatchClass, Regions]:
        return self.layer.regions


@dataclass(frozen=True)
class AltUpLayer(StreamLayer):
    """A layer over the first of several streams, with a prediction of all before and their correction behind it"""

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
        result = regions.whole(layer.fed(regions.begin(total), regions, step, output_rows))
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


@dataclass(frozen=True)
class StreamConnection:
    """Coefficients of a mixture of streams, linear in the normed streams: float32"""

    spec: HyperConnections
    weight: torch.Tensor  # [coefficients, streams * H]
    base: torch.Tensor  # [coefficients]
    scale: torch.Tensor  # one number for each kind of coefficient

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, streams, H] → the mixture that is computed with [T, H], what its result is multiplied by for each stream
        [T, streams], and how streams mix [T, from, to]"""
        count, eps = self.spec.num_streams, self.spec.eps
        into, out_of, mixed = torch.split(self._products(streams), [count, count, count**2], dim=1)
        base_in, base_out, base_mixed = torch.split(self.base, [count, count, count**2])
        shares = torch.sigmoid(into * self.scale[0] + base_in) + eps
        written = 2 * torch.sigmoid(out_of * self.scale[1] + base_out)
        scores = (mixed * self.scale[2] + base_mixed).view(-1, count, count)
        return _mixture(streams, shares), written, self._doubly_stochastic(torch.softmax(scores, dim=-1) + eps)

    def end(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, streams, H] → [T, H]"""
        shares = torch.sigmoid(self._products(streams) * self.scale[0] + self.base) + self.spec.eps
        return _mixture(streams, shares)

    def _products(self, streams: torch.Tensor) -> torch.Tensor:
        """→ [T, coefficients]"""
        flat = streams.flatten(1).float()
        return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.spec.norm_eps) @ self.weight.t()

    def _doubly_stochastic(self, matrix: torch.Tensor) -> torch.Tensor:
        eps = self.spec.eps
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        for _ in range(self.spec.num_rounds - 1):
            matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        return matrix


def load_connection(spec: HyperConnections, name: str, load: Loader) -> StreamConnection:
    return StreamConnection(
        spec, load.vector(f"{name}.weight"), load.vector(f"{name}_base"), load.vector(f"{name}_scale")
    )


class HyperEnds:
    def __init__(self, spec: HyperConnections, load: Loader) -> None:
        self._count = spec.num_streams
        self._end = load_connection(spec, "streams_end", load)

    def begin(self, embedded: torch.Tensor, regions: Regions) -> torch.Tensor:
        return embedded.unsqueeze(1).repeat(1, self._count, 1)

    def finish(self, streams: torch.Tensor, regions: Regions) -> torch.Tensor:
        return self._end.end(streams)


@dataclass(frozen=True)
class HyperLayer(StreamLayer):
    """A layer whose mixer and MLP each read a mixture of the streams and write to all of them"""

    attention: StreamConnection
    feed: StreamConnection

    @property
    def kind(self) -> Hashable:
        return self.layer.kind, form_of((self.attention, self.feed))

    def __call__(
        self, streams: torch.Tensor, step: ForwardContext, output_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, streams, H] → [T or L, streams, H]"""
        layer = self.layer
        read, written, mixed = self.attention.read(streams)
        before = layer.regions_before(step, output_rows)
        stream, regions = layer.mix(before.begin(read), step, output_rows)
        if output_rows is not None:
            streams, written, mixed = streams[output_rows], written[output_rows], mixed[output_rows]
        streams = _connected(streams, regions.added(stream), written, mixed)
        read, written, mixed = self.feed.read(streams)
        stream = layer.fed(regions.begin(read), regions, step, output_rows)
        return _connected(streams, regions.added(stream), written, mixed)


def _mixture(streams: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return (shares.unsqueeze(2) * streams).sum(1).to(streams.dtype)


def _connected(streams: torch.Tensor, result: torch.Tensor, written: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """b_i y + Σ_j M_ji h_j"""
    return (written.unsqueeze(2) * result.unsqueeze(1) + mixed.transpose(1, 2) @ streams.float()).to(streams.dtype)


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
            return HyperLayer(layer, attention, load_connection(streams, f"{name}.mlp_connect", load))
