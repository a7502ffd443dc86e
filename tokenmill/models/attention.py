"""Grouped-query attention as a layer's mixer: from stacked q, k, v projections to attention outputs.

It runs the region `attend`: QK norm, RoPE, cache write, attention. It owns the QK norm weights and the attention sinks;
the input and output projections belong to the layer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from tokenmill.arch.indexer import INDEX_KEYS
from tokenmill.arch.spec import Gqa
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.interface import AttendInputs, AttentionArgs, BlockIndexInputs, Regions


class BlockChooser:
    """The indexer of a layer, which chooses the blocks of keys that its attention reads."""

    def __init__(self, spec: Gqa, name: str, layer: int, norm_eps: float, load: Loader) -> None:
        assert spec.block_indexer is not None
        self._indexer, self._rope, self._eps = spec.block_indexer, spec.rope, norm_eps
        self._choose = load.ops.choose_blocks
        self._layer = layer
        self._norms = load.vector(f"{name}.index_q_norm.weight"), load.vector(f"{name}.index_k_norm.weight")

    @property
    def kind(self) -> Hashable:
        return form_of(self._norms)

    def choose(self, projected: torch.Tensor, plan: Any, step: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Return the projections without the indexer's inputs, and the plan with the chosen blocks."""
        indexer, group = self._indexer, step.storage.group(self._layer, INDEX_KEYS)
        own, queries, keys = torch.split(
            projected,
            [projected.shape[1] - indexer.projected_size, indexer.q_size, indexer.head_dim],
            dim=1,
        )
        inputs = BlockIndexInputs(
            queries,
            keys,
            step.storage.fields(self._layer)[INDEX_KEYS],
            step.batch.groups[group].slots,
            self._norms,
            self._eps,
            None if self._rope is None else step.cos_sin[self._rope],
            step.mixer_plans[group],
            indexer,
        )
        return own, self._choose(inputs, plan)


class Attention:
    def __init__(self, spec: Gqa, name: str, layer: int, norm_eps: float, load: Loader) -> None:
        """`layer`: the layer whose KV cache is read, and written unless another layer owns it."""
        self.spec = spec
        self._layer = layer
        self._eps = norm_eps
        self._norms = self._head_norms(name, load)
        self._variant = None if spec.is_plain else spec
        sinks = load.vector(f"{name}.sinks") if spec.has_sinks else None
        slopes = torch.tensor(spec.slopes, device=load.device) if spec.slopes else None
        self._args = AttentionArgs(spec.scale, spec.window, spec.softcap, sinks, spec.is_chunked, slopes)
        self._index = None if spec.block_indexer is None else BlockChooser(spec, name, layer, norm_eps, load)

    @property
    def kind(self) -> Hashable:
        own = form_of((self._norms, self._args.sinks, self._args.slopes))
        return self.spec, own, self._index and self._index.kind

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Stacked projections [T, (heads + 2 kv_heads) * D (+ indexer inputs)] → attention outputs [T, heads * D]"""
        rope, growth, group = self.spec.rope, self.spec.query_growth, step.storage.group(self._layer)
        plan = step.mixer_plans[group]
        if self._index is not None:
            projected, plan = self._index.choose(projected, plan, step)
        inputs = AttendInputs(
            projected,
            step.storage.layer(self._layer),
            step.batch.groups[group].slots,
            self._norms,
            self._eps,
            None if rope is None else step.cos_sin[rope],
            plan,
            self._args,
            self._variant,
            None if growth is None else step.growths[growth],
        )
        return regions.attend(inputs)

    def _head_norms(self, name: str, load: Loader) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.spec.qk_norm is None or self.spec.qk_norm == "l2_after_rope":
            return None
        queries = load.vector(f"{name}.q_norm.weight")
        return queries, load.vector(f"{name}.k_norm.weight") if self.spec.has_own_kv else queries
