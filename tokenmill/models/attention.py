"""One layer's attention: project to queries, keys and values, norm, rotate, write the cache, attend, project back."""

from __future__ import annotations

import torch

from tokenmill.arch.spec import Gqa
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.loading import Loader
from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs


class Attention:
    def __init__(self, spec: Gqa, layer: int, norm_eps: float, load: Loader) -> None:
        name = f"layers.{layer}"
        self.spec = spec
        self.layer = layer
        self.ops = load.ops
        self.norm_eps = norm_eps
        self.qkv = load.linear([f"{name}.q", f"{name}.k", f"{name}.v"], spec.qkv_bias)
        self.out = load.linear([f"{name}.o"], spec.out_bias)
        self.q_norm = load.vector(f"{name}.q_norm.weight") if spec.qk_norm else None
        self.k_norm = load.vector(f"{name}.k_norm.weight") if spec.qk_norm else None
        sinks = load.vector(f"{name}.sinks") if spec.has_sinks else None
        self.args = AttentionArgs(spec.scale, spec.window, spec.softcap, sinks)

    def attend_for(self, x: torch.Tensor, step: ForwardContext, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] → what is to be projected back [T, heads * D], or that of the wanted tokens [L, heads * D]"""
        mixed = self.mixed(self.ops.linear(x, self.qkv, step.batch.mode), step)
        return mixed if wanted is None else mixed[wanted]

    def mixed(self, qkv: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Joint projections [T, (heads + 2 kv_heads) * D] → values weighted by attention [T, heads * D]"""
        group = step.storage.group(self.layer)
        cache, plan = step.storage.layer(self.layer), step.attention_plans[group]
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        angles = None if self.spec.rope is None else step.angles[self.spec.rope]
        if self.ops.fused_decode_attention is not None:
            done = self.ops.fused_decode_attention(qkv, cache, norms, self.norm_eps, angles, plan, self.args)
            if done is not None:
                return done
        slots = step.batch.groups[group].slots
        if self.ops.norm_rope_write_kv is not None:
            queries = self.ops.norm_rope_write_kv(qkv, cache, slots, norms, self.norm_eps, angles)
        else:
            queries = self._placed(qkv, cache, slots, step)
        return self.ops.attention(queries, cache, plan, self.args)

    def _placed(self, qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """→ queries [T, heads, D]; keys and values are in the cache."""
        queries, keys, values = self._split(qkv)
        queries = self._place(queries, self.q_norm, step)
        keys = self._place(keys, self.k_norm, step)
        self.ops.write_kv(cache, keys, values, slots)
        return queries

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, heads, D], and [T, kv_heads, D] twice"""
        spec = self.spec
        parts = torch.split(qkv, [spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
        queries, keys, values = (part.reshape(len(qkv), -1, spec.head_dim) for part in parts)
        return queries, keys, values

    def _place(self, x: torch.Tensor, norm: torch.Tensor | None, step: ForwardContext) -> torch.Tensor:
        if norm is not None:
            x = self.ops.rms_norm(x, norm, self.norm_eps)
        if self.spec.rope is not None:
            x = self.ops.rotate(x, *step.angles[self.spec.rope])
        return x
