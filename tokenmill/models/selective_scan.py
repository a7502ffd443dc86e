"""Mamba-1's mixer: from stacked projections to gated outputs.

Unlike other recurrent mixers (`models/recurrent.py`), it projects its keys, queries and steps from its convolved
values, so it owns two more matrices.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenmill.arch.recurrent import InnerProjection, Recurrent
from tokenmill.arch.regions import Matrices
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.models.recurrent import recurrent_cache
from tokenmill.ops.interface import Regions
from tokenmill.ops.recurrent import RecurrentArgs, ScanInputs, inner_norms, recurrent_weights


class SelectiveScan:
    def __init__(
        self, spec: Recurrent, inner: InnerProjection, name: str, layer: int, norm_eps: float, load: Loader
    ) -> None:
        self.spec = spec
        self._ops = load.ops
        self._layer = layer

        def vector(part: str) -> torch.Tensor:
            return load.vector(f"{name}.ssm_{part}")

        self._args = RecurrentArgs(spec, recurrent_weights(spec, norm_eps, vector))
        self._norms = inner_norms(spec, inner, vector)
        self._eps = norm_eps if inner.eps is None else inner.eps
        self._sizes = [inner.rank, spec.key_dim, spec.key_dim]
        self._inner = load.projection(Matrices((f"{name}.ssm_inner",)))
        self._step = load.projection(Matrices((f"{name}.ssm_step",)))

    @property
    def kind(self) -> Hashable:
        return self.spec, form_of((self._args.weights, self._norms, self._inner, self._step))

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Stacked projections [T, v z] → [T, values]"""
        cache = recurrent_cache(step.storage.fields(self._layer))
        plan = step.mixer_plans[step.storage.group(self._layer, "state")]
        convolved = self._ops.convolve_values(projected, cache, plan, self._args)
        parts = torch.split(self._inner(convolved, step.batch.mode, step.adapters), self._sizes, dim=1)
        if self._norms is not None:
            normed = zip(parts, self._norms, strict=True)
            parts = tuple(self._ops.rms_norm(part.contiguous(), weight, self._eps) for part, weight in normed)
        latents, keys, queries = parts
        steps = self._step(latents.contiguous(), step.batch.mode, step.adapters)
        return self._ops.scan(ScanInputs(projected, convolved, steps, keys, queries), cache, plan, self._args)
