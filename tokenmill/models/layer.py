"""One decoder layer. The residual stream and what is to be added to it travel apart, so that each addition is fused
with the norm that follows it:

    delta, residual ─► residual += delta; norm ─► attention ─► (post norm) ─► residual += it; norm ─► MLP ─► (post norm)

Where a backend's products can add to the residual stream themselves, nothing is left to be added: delta is None.
Where a backend wants norms in a form of its own, a layer is what happens to the stream (`along`, see `FusedNormOps`).
"""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec
from tokenmill.errors import UnsupportedModel
from tokenmill.models.attention import Attention
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.loading import Loader
from tokenmill.models.mlp import Mlp
from tokenmill.models.moe import Moe
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import FusedNormOps, LinearWeight


class Layer:
    def __init__(self, spec: LayerSpec, number: int, norm_eps: float, load: Loader) -> None:
        name = f"layers.{number}"
        self.ops = load.ops
        self.eps = norm_eps
        self.attn_norm = load.vector(f"{name}.attn_norm.weight")
        self.mlp_norm = load.vector(f"{name}.mlp_norm.weight")
        self.attn_post_norm = load.vector(f"{name}.attn_post_norm.weight") if spec.post_norms else None
        self.mlp_post_norm = load.vector(f"{name}.mlp_post_norm.weight") if spec.post_norms else None
        if not isinstance(spec.mixer, Gqa):
            raise UnsupportedModel(f"layers of {type(spec.mixer).__name__} are not implemented")
        self.attention = Attention(spec.mixer, number, norm_eps, load)
        self.mlp = _make_mlp(spec.mlp, name, load)

    def __call__(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        step: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`wanted` [L]: which tokens' results are returned, all by default. The residual may be overwritten."""
        normed, residual = self._add_norm(delta, residual, self.attn_norm)
        if wanted is not None:
            residual = residual[wanted]
        mixed = self.attention.attend_for(normed, step, wanted)
        mode = step.batch.mode
        delta, residual = self._project(mixed, self.attention.out, residual, self.attn_post_norm, mode)
        if isinstance(self.mlp, Mlp):
            normed, residual = self._add_norm(delta, residual, self.mlp_norm)
            return self._project(self.mlp.inner(normed, mode), self.mlp.down, residual, self.mlp_post_norm, mode)
        done = None if delta is None else self.mlp.after_adding(delta, residual, self.mlp_norm, self.eps)
        if done is None:
            normed, residual = self._add_norm(delta, residual, self.mlp_norm)
            done = self.mlp(normed, mode), residual
        return self._post(done[0], self.mlp_post_norm), done[1]

    def _project(
        self, x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor, post_norm: torch.Tensor | None, mode: Mode
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Back to [L, H]: what is to be added to the residual stream, and the stream"""
        if self.ops.add_linear is not None and post_norm is None:
            total = self.ops.add_linear(x, weight, residual)
            if total is not None:
                return None, total
        return self._post(self.ops.linear(x, weight, mode), post_norm), residual

    def uses_stream(self, ops: FusedNormOps) -> bool:
        """Whether `along` can be computed with these."""
        if not isinstance(self.mlp, Mlp):
            return False
        return all(map(ops.can_multiply, (self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down)))

    def along(self, ops: FusedNormOps, stream: Any, step: ForwardContext, next_norm: torch.Tensor) -> Any:
        """The stream behind this layer"""
        assert isinstance(self.mlp, Mlp), "see `uses_stream`"
        mode = step.batch.mode
        mixed = self.attention.mixed(ops.normed_linear(stream, self.attention.qkv, mode), step)
        delta = self._post(ops.any_linear(mixed, self.attention.out, mode), self.attn_post_norm)
        stream = ops.join(delta, stream, self.mlp_norm, self.eps)
        gated = ops.gated_linear(stream, self.mlp.gate_up, self.mlp.activation, mode)
        delta = ops.any_linear(gated, self.mlp.down, mode)
        return ops.join(self._post(delta, self.mlp_post_norm), stream, next_norm, self.eps)

    def _add_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if delta is None:  # in the first layer too: the embedding is the residual
            return self.ops.rms_norm(residual, weight, self.eps), residual
        return self.ops.add_rms_norm(delta, residual, weight, self.eps)

    def _post(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.eps)


def _make_mlp(spec: MlpSpec | MoeSpec, name: str, load: Loader) -> Mlp | Moe:
    return Mlp(spec, name, load) if isinstance(spec, MlpSpec) else Moe(spec, name, load)
