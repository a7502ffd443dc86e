"""A gated short convolution as a layer's mixer: c * conv(b * x), from stacked projections of b, c and x.

It owns the taps of the convolution, one set per channel; the input and output projections belong to the layer. Each
token's b * x, which later tokens need, is in the paged cache like keys and values.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenmill.arch.spec import ShortConv
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.interface import Regions


class ShortConvolution:
    def __init__(self, spec: ShortConv, name: str, layer: int, load: Loader) -> None:
        self.spec = spec
        self._ops = load.ops
        self._layer = layer
        self._weight = load.vector(f"{name}.conv.weight")  # [width, kernel]
        self._bias = load.vector(f"{name}.conv.bias") if spec.bias else None

    @property
    def kind(self) -> Hashable:
        return self.spec, form_of((self._weight, self._bias))

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Stacked projections [T, 3 * width] → gated outputs of the convolution [T, width]"""
        inputs, plan = step.storage.fields(self._layer)["inputs"], step.mixer_plans[step.storage.group(self._layer)]
        return self._ops.short_conv(projected, inputs, plan, self._weight, self._bias)
