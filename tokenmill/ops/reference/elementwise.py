"""Norms, RoPE, gated activations and soft caps: elementwise or row-wise ops in torch.

RMSNorm    x / sqrt(mean(x²) + eps) * weight, computed in float32
RoPE       each pair (x[i], x[i + half]) is rotated by its token's angle for frequency i
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenmill.arch.spec import Activation

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0  # of "swiglu_oai"
SILU_LIMIT = 10.0  # of "silu_to_10"
CLAMPS = {f"clamped_silu_{limit}": float(limit) for limit in (4, 5, 7, 16)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = rms_norm(wide - wide.mean(-1, keepdim=True), weight, eps)
    return (normed if bias is None else normed + bias).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]; cos, sin [T, half] float32, with half <= D / 2. Dimensions beyond 2 * half are not changed."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same angle for every head
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1) if 2 * half < x.shape[-1] else rotated


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
        return gate * torch.sigmoid(gate * OAI_ALPHA) * (up + 1)
    if activation == "silu_to_10":
        return functional.silu(gate.clamp(max=SILU_LIMIT)) * up.clamp(-SILU_LIMIT, SILU_LIMIT)
    if activation in CLAMPS:
        limit = CLAMPS[activation]
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    return activate(gate, activation) * up


def cut_act_mul(gate_up: torch.Tensor, activation: Activation, cutoff: float) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    spread = gate.std(dim=-1, keepdim=True, unbiased=False)
    kept = functional.relu(gate - (gate.mean(dim=-1, keepdim=True) + spread * cutoff))
    return act_mul(torch.cat((kept, up), dim=-1).to(gate_up.dtype), activation)


def gate_rows(y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return y * torch.sigmoid(x.float() @ gate).to(x.dtype).unsqueeze(1)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu" | "gelu_tanh":
            return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case _:
            raise ValueError(f"{activation} is not computed from a single number")


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(x / cap) * cap
