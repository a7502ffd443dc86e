"""A recurrent mixer of a layer: gated DeltaNet or Mamba-2, from joint projections to normed and gated outputs.

Its own weights are the convolution's taps, rates of decay, biases of the step and the output norm; the matrices before
and behind it belong to the layer. What later tokens need lies in cells and states (`arch/cache_parts.py`).
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenmill.arch.recurrent import Recurrent
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.interface import Regions
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache, recurrent_weights


class RecurrentMixer:
    def __init__(self, spec: Recurrent, name: str, layer: int, norm_eps: float, load: Loader) -> None:
        self.spec = spec
        self._ops = load.ops
        self._layer = layer
        weights = recurrent_weights(spec, norm_eps, lambda part: load.vector(f"{name}.ssm_{part}"))
        self._args = RecurrentArgs(spec, weights)

    @property
    def kind(self) -> Hashable:
        return self.spec, form_of(self._args.weights)

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Joint projections [T, q k v z (b) a] → [T, values]"""
        fields = step.storage.fields(self._layer)
        cache = RecurrentCache(
            fields["conv_inputs"],
            fields["cell_keys"],
            fields["cell_updates"],
            fields["cell_decays"],
            fields["state"],
            fields["conv_tail"],
        )
        plan = step.mixer_plans[step.storage.group(self._layer, "state")]
        return self._ops.recurrent(projected, cache, plan, self._args)
