"""A recurrent mixer (gated DeltaNet, Mamba-2): from stacked projections to normed and gated outputs.

It owns the convolution's taps, the decay rates, the step biases and the output norm; the input and output projections
belong to the layer. The state that later tokens need is cached as cells and states (`arch/cache_parts.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from tokenmill.arch.recurrent import Recurrent
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.interface import Regions
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache, recurrent_weights

CACHE_FIELDS = ("conv_inputs", "cell_keys", "cell_updates", "cell_decays", "state", "conv_tail")


def recurrent_cache(fields: Mapping[str, torch.Tensor]) -> RecurrentCache:
    return RecurrentCache(*(fields[name] for name in CACHE_FIELDS))


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
        """Stacked projections [T, q k v z (b) a] → [T, values]"""
        cache = recurrent_cache(step.storage.fields(self._layer))
        plan = step.mixer_plans[step.storage.group(self._layer, "state")]
        return self._ops.recurrent(projected, cache, plan, self._args)
