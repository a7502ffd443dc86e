"""Multi-head latent attention (MLA) as a layer's mixer: from stacked projections to attention outputs.

It owns the norms of both latents, the up-projection of the query latent (where there is one), and each head's key and
value up-projections. The latter stay unquantised and are absorbed: they multiply queries and weighted sums of latents,
head by head, instead of every cached key and value.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from tokenmill.arch.indexer import INDEX_KEYS, KEY_NORM_EPS, Indexer
from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import Mla, NormSpec
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.compose import gate_heads
from tokenmill.ops.interface import IndexInputs, LatentInputs, Regions


class EntryIndex:
    """The indexer of a layer, which chooses the cache entries that sparse attention reads."""

    def __init__(self, indexer: Indexer, mla: Mla, name: str, layer: int, load: Loader) -> None:
        self._indexer, self._rope = indexer, mla.rope
        self._choose = load.ops.choose_entries
        self._layer = layer
        self._queries = load.projection(Matrices((f"{name}.index_q",)))
        self._norm = load.norm(f"{name}.index_k_norm", KEY_NORM_EPS, NormSpec("layer", has_bias=True))

    @property
    def kind(self) -> Hashable:
        return self._indexer, form_of((self._queries, self._norm))

    def choose(self, latent: torch.Tensor, projected: torch.Tensor, step: ForwardContext) -> Any:
        """latent [T, q_rank], projected [T, key and one weight per head] → see `Ops.choose_entries`"""
        group, size = step.storage.group(self._layer, INDEX_KEYS), self._indexer.head_dim
        inputs = IndexInputs(
            self._queries(latent, step.batch.mode, step.adapters),
            projected[:, :size],
            projected[:, size:],
            step.storage.fields(self._layer)[INDEX_KEYS],
            step.batch.groups[group].slots,
            self._norm,
            None if self._rope is None else step.cos_sin[self._rope],
            step.mixer_plans[group],
            self._indexer,
        )
        return self._choose(inputs)


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
        self._index = EntryIndex(spec.indexer, spec, name, layer, load) if spec.indexer is not None else None

    @property
    def kind(self) -> Hashable:
        own = form_of((self._norm, self._q_norm, self._q_up, self._absorb, self._expand))
        return self.spec, own, self._index and self._index.kind

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Stacked projections [T, (q_rank or heads * head_dim) + kv_rank + rope_dim (+ indexer inputs) (+ gates)] →
        [T, heads * value_dim]"""
        spec, group = self.spec, step.storage.group(self._layer, "latents")
        size = spec.q_rank or spec.q_size
        projected, gates = torch.split(projected, [projected.shape[1] - spec.gate_size, spec.gate_size], dim=1)
        queries, entries = projected[:, :size], projected[:, size : size + spec.entry_size]
        if self._q_norm is not None and self._q_up is not None:
            latent = self._ops.rms_norm(queries.contiguous(), *self._q_norm[:2])
            queries = self._q_up(latent, step.batch.mode, step.adapters)
            if self._index is not None:
                beside = projected[:, size + spec.entry_size :]
                step.choices[self._layer] = self._index.choose(latent, beside, step)
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
            step.choices[self._layer if spec.indexer is not None else spec.shares_index_of] if spec.is_sparse else None,
        )
        mixed = self._ops.latent_attend(inputs)
        return mixed if spec.gate is None else gate_heads(mixed, gates, spec.gate)
