"""Routed experts in the place of an MLP: the router picks, the chosen experts' outputs are weighted and added."""

from __future__ import annotations

import torch

from tokenmill.arch.spec import MoeSpec
from tokenmill.errors import UnsupportedModel
from tokenmill.models.loading import Loader


class Moe:
    def __init__(self, spec: MoeSpec, layer: int, load: Loader) -> None:
        if spec.shared is not None:
            raise UnsupportedModel("experts shared by all tokens beside the routed ones are not implemented")
        if spec.expert.bias:
            raise UnsupportedModel("routed experts with biases are not implemented")
        name = f"layers.{layer}"
        self.spec = spec
        self.ops = load.ops
        self.router = load.linear([f"{name}.router"])
        raws = [load.source.get(f"{name}.experts.{part}.weight") for part in ("gate", "up", "down")]
        self.experts = load.ops.pack_experts(raws[0], raws[1], raws[2], load.dense)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.ops.route(self.ops.linear(x, self.router), self.spec.num_active, self.spec.renormalize)
        return self.ops.experts(x, weights, ids, self.experts, self.spec.expert.activation)
