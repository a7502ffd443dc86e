"""The non-linear pieces: gated activations and soft caps."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenmill.arch.spec import Activation


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(x / cap) * cap
