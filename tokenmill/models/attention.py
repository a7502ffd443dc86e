"""Grouped-query attention as a layer's mixer: from stacked q, k, v projections to attention outputs.

It runs the region `attend`: QK norm, RoPE, cache write, attention. It owns the QK norm weights and the attention sinks;
the input and output projections belong to the layer.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenmill.arch.spec import Gqa
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.interface import AttendInputs, AttentionArgs, Regions


class Attention:
    def __init__(self, spec: Gqa, name: str, layer: int, norm_eps: float, load: Loader) -> None:
        """`layer`: the layer whose KV cache is read, and written unless another layer owns it."""
        self.spec = spec
        self._layer = layer
        self._eps = norm_eps
        self._norms = self._head_norms(name, load)
        self._variant = None if spec.is_plain else spec
        sinks = load.vector(f"{name}.sinks") if spec.has_sinks else None
        self._args = AttentionArgs(spec.scale, spec.window, spec.softcap, sinks, spec.is_chunked)

    @property
    def kind(self) -> Hashable:
        return self.spec, form_of((self._norms, self._args.sinks))

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Stacked projections [T, (heads + 2 kv_heads) * D] → attention outputs [T, heads * D]"""
        rope, growth, group = self.spec.rope, self.spec.query_growth, step.storage.group(self._layer)
        inputs = AttendInputs(
            projected,
            step.storage.layer(self._layer),
            step.batch.groups[group].slots,
            self._norms,
            self._eps,
            None if rope is None else step.cos_sin[rope],
            step.mixer_plans[group],
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
