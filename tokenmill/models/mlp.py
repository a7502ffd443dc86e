"""The gated MLP: down(act(gate(x)) * up(x)), gate and up as one matrix."""

from __future__ import annotations

import torch

from tokenmill.arch.spec import MlpSpec
from tokenmill.models.loading import Loader
from tokenmill.ops.batch import Mode


class Mlp:
    def __init__(self, spec: MlpSpec, name: str, load: Loader) -> None:
        self.ops = load.ops
        self.activation = spec.activation
        self.gate_up = load.linear([f"{name}.gate", f"{name}.up"], spec.bias)
        self.down = load.linear([f"{name}.down"], spec.bias)

    def __call__(self, x: torch.Tensor, mode: Mode = "eager") -> torch.Tensor:
        return self.ops.linear(self.inner(x, mode), self.down, mode)

    def inner(self, x: torch.Tensor, mode: Mode = "eager") -> torch.Tensor:
        """act(gate(x)) * up(x)"""
        if self.ops.gated_linear is not None:
            return self.ops.gated_linear(x, self.gate_up, self.activation, mode)
        return self.ops.act_mul(self.ops.linear(x, self.gate_up, mode), self.activation)
