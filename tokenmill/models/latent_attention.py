"""Latent attention (MLA) as the mixer of a layer: from joint projections to values weighted by attention.

Its own weights are the norms of both latents, the matrix that makes queries of their latent (where queries have one),
and each head's matrices between latents and its keys and values, which are kept as plain numbers: they are multiplied
head by head, to queries and to mixtures of latents instead of to every key and value.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import Mla
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.interface import LatentInputs, Regions


class LatentAttention:
    def __init__(self, spec: Mla, name: str, layer: int, load: Loader) -> None:
        self.spec = spec
        self._ops = load.ops
        self._layer = layer
        self._norm = load.norm(f"{name}.kv_norm", spec.norm_eps)
        self._q_norm = load.norm(f"{name}.q_norm", spec.norm_eps) if spec.q_rank else None
        self._q_up = load.projection(Matrices((f"{name}.q_up",))) if spec.q_rank else None
        heads = load.dense(load.source.get(f"{name}.kv_up.weight")).view(spec.num_heads, -1, spec.kv_rank)
        self._absorb = heads[:, : spec.nope_dim].transpose(1, 2).contiguous()  # [heads, rank, nope]
        self._expand = heads[:, spec.nope_dim :].contiguous()  # [heads, value_dim, rank]

    @property
    def kind(self) -> Hashable:
        return self.spec, form_of((self._norm, self._q_norm, self._q_up, self._absorb, self._expand))

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Joint projections [T, (q_rank or heads * head_dim) + kv_rank + rope_dim] → [T, heads * value_dim]"""
        spec, group = self.spec, step.storage.group(self._layer)
        queries, entries = projected[:, : -spec.entry_size], projected[:, -spec.entry_size :]
        if self._q_norm is not None and self._q_up is not None:
            normed = self._ops.rms_norm(queries.contiguous(), *self._q_norm[:2])
            queries = self._q_up(normed, step.batch.mode, step.adapters)
        inputs = LatentInputs(
            queries,
            entries,
            step.storage.fields(self._layer)["latents"],
            step.batch.groups[group].slots,
            self._norm,
            None if spec.rope is None else step.cos_sin[spec.rope],
            self._absorb,
            self._expand,
            step.mixer_plans[group],
            spec.scale,
        )
        return self._ops.latent_attend(inputs)
