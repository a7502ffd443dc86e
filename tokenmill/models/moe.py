"""Routed experts in the place of an MLP: the router picks, the chosen experts' outputs are weighted and added. Some
models have one more that every token goes through, weighted by a gate of its own."""

from __future__ import annotations

import torch

from tokenmill.arch.spec import MoeSpec
from tokenmill.errors import UnsupportedModel
from tokenmill.models.loading import Loader
from tokenmill.models.mlp import Mlp
from tokenmill.ops.batch import Mode


class Moe:
    def __init__(self, spec: MoeSpec, name: str, load: Loader) -> None:
        if spec.expert.bias:
            raise UnsupportedModel("routed experts with biases are not implemented")
        self.spec = spec
        self.ops = load.ops
        self.router = load.linear([f"{name}.router"])
        raws = [load.source.get(f"{name}.experts.{part}.weight") for part in ("gate", "up", "down")]
        self.experts = load.ops.pack_experts(raws[0], raws[1], raws[2], load.dense)
        self.shared = Mlp(spec.shared, f"{name}.shared", load) if spec.shared else None
        self.shared_gate = load.vector(f"{name}.shared_gate.weight").view(-1) if spec.has_shared_gate else None

    def __call__(self, x: torch.Tensor, mode: Mode = "eager") -> torch.Tensor:
        logits = self.ops.linear(x, self.router, mode)
        weights, ids = self.ops.route(logits, self.spec.num_active, self.spec.renormalize)
        routed = self.ops.experts(x, weights, ids, self.experts, self.spec.expert.activation)
        return routed if self.shared is None else routed + self._gated(self.shared(x, mode), x)

    def after_adding(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(this of the norm of x + residual, x + residual) where that is one op; else None"""
        if self.ops.add_norm_experts is None or self.shared is not None:
            return None
        return self.ops.add_norm_experts(x, residual, norm, eps, self.router, self.experts, self.spec)

    def _gated(self, shared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[T, H], each token's times its gate"""
        if self.shared_gate is None:
            return shared
        return shared * torch.sigmoid(x.float() @ self.shared_gate).to(x.dtype).unsqueeze(1)
