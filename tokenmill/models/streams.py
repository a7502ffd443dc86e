"""Several residual streams between layers (`arch/streams.py`), each layer run over one of them.

Streams are a tensor [T, streams, H]. What a layer computes of one stream is the `Layer` of other models, in two halves;
here is what happens around it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import LayerSpec, ModelSpec
from tokenmill.arch.streams import AltUp
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.layer import Layer
from tokenmill.models.linear import Loader, Projection, form_of
from tokenmill.ops.interface import BatchClass, Norm, Ops, Regions

MIN_SQUARE = 1e-5  # of a stream whose length is changed


class StreamEnds:
    """The streams that a token's embedding begins as, and the one vector they end in."""

    def __init__(self, altup: AltUp, load: Loader) -> None:
        others = range(altup.num_streams - 1)
        self._into = [load.projection(Matrices((f"streams.in.{number}",))) for number in others]
        self._out_of = [load.projection(Matrices((f"streams.out.{number}",))) for number in others]

    def begin(self, embedded: torch.Tensor, regions: Regions) -> torch.Tensor:
        """[T, H] → [T, streams, H]"""
        others = [_as_long(_product(embedded, matrix, regions), embedded) for matrix in self._into]
        return torch.stack((embedded, *others), dim=1)

    def finish(self, streams: torch.Tensor, regions: Regions) -> torch.Tensor:
        """[T, streams, H] → [T, H]"""
        first, *others = streams.unbind(1)
        pairs = zip(others, self._out_of, strict=True)
        ends = [_as_long(_product(stream.contiguous(), matrix, regions), first) for stream, matrix in pairs]
        return torch.stack((first, *ends)).mean(0)


@dataclass(frozen=True)
class AltUpWeights:
    router_norm: Norm
    router: torch.Tensor  # float32 [streams, H]
    predict: torch.Tensor  # float32 [streams * streams, streams]
    correct: torch.Tensor  # float32 [streams, streams]
    scale: torch.Tensor | None  # float32 [H]
    left: Projection  # [rank, H], of the branch beside attention
    right: Projection
    branch_norm: Norm


def load_altup(altup: AltUp, name: str, norm_eps: float, load: Loader) -> AltUpWeights:
    return AltUpWeights(
        load.norm(f"{name}.altup_router_norm", norm_eps),
        load.vector(f"{name}.altup_router.weight"),
        load.vector(f"{name}.altup_predict.weight"),
        load.vector(f"{name}.altup_correct.weight"),
        load.vector(f"{name}.altup_scale") if altup.has_output_scale else None,
        load.projection(Matrices((f"{name}.branch_left",))),
        load.projection(Matrices((f"{name}.branch_right",))),
        load.norm(f"{name}.branch_norm", norm_eps),
    )


@dataclass(frozen=True)
class AltUpLayer:
    """A layer over the first of several streams, with a prediction of all before and their correction behind it"""

    layer: Layer
    altup: AltUpWeights
    ops: Ops

    @property
    def spec(self) -> LayerSpec:
        return self.layer.spec

    @property
    def regions(self) -> Mapping[BatchClass, Regions]:
        return self.layer.regions

    @property
    def kind(self) -> Hashable:
        return self.layer.kind, form_of(self.altup)

    def __call__(
        self, streams: torch.Tensor, step: ForwardContext, output_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, streams, H] → [T or L, streams, H]"""
        layer, weights = self.layer, self.layer.weights
        assert weights.norm is not None and weights.add_input is not None, "Gemma 3n has both in every layer"
        predicted = self._predicted(streams)
        first = predicted[:, 0].contiguous()
        regions = layer.regions_before(step, output_rows)
        stream, regions = layer.mix(regions.begin(first), step, output_rows)
        if output_rows is not None:
            predicted, first = predicted[output_rows], first[output_rows]
        total = (regions.whole(stream) + self._branch(first, weights.norm, regions)) * 2**-0.5
        result = regions.whole(layer.fed(regions.begin(total), regions))
        corrected = self._corrected(predicted, result)
        gated = corrected[:, 0] if self.altup.scale is None else corrected[:, 0] * self.altup.scale.to(result.dtype)
        inputs = step.layer_inputs_of(layer.number, output_rows)
        added = regions.gated_input(gated, inputs, weights.add_input)
        corrected[:, 1:] += added.unsqueeze(1)
        return corrected

    def _branch(self, first: torch.Tensor, norm: Norm, regions: Regions) -> torch.Tensor:
        normed = self.ops.rms_norm(first, norm.weight, norm.eps)
        inner = _product(_product(normed, self.altup.left, regions), self.altup.right, regions)
        return normed + self.ops.rms_norm(inner, self.altup.branch_norm.weight, self.altup.branch_norm.eps)

    def _predicted(self, streams: torch.Tensor) -> torch.Tensor:
        count = streams.shape[1]
        mixture = (self._coefficients(streams[:, 0]) @ self.altup.predict.t()).view(-1, count, count)
        return (mixture @ streams.float() + streams).to(streams.dtype)

    def _corrected(self, predicted: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        shares = self._coefficients(result) @ self.altup.correct.t() + 1.0  # [T, streams]
        return (predicted + (result - predicted[:, 0]).unsqueeze(1) * shares.unsqueeze(2)).to(result.dtype)

    def _coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] → float32 [T, streams]"""
        normed = self.ops.rms_norm(x.float(), self.altup.router_norm.weight, self.altup.router_norm.eps)
        return torch.tanh(normed / x.shape[1] @ self.altup.router.t())


def load_ends(spec: ModelSpec, load: Loader) -> StreamEnds | None:
    return None if spec.streams is None else StreamEnds(spec.streams, load)


def _product(x: torch.Tensor, matrix: Projection, regions: Regions) -> torch.Tensor:
    """x [T, columns] times a matrix, with what the tokens' adapters add"""
    return regions.norm_project(regions.begin(x), None, matrix)[0]


def _as_long(x: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Each row of x as long as the model's"""
    wanted = model.float().square().mean(-1, keepdim=True).sqrt()
    found = x.float().square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()
    return (x * (wanted / found)).to(x.dtype)
