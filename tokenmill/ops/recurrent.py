"""What a recurrent mixer (`arch/recurrent.py`) is computed from, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.arch.recurrent import Recurrent


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of a mixer's own, float32; the matrices in front of it and behind it belong to the layer."""

    conv: torch.Tensor  # [channels of q, k and v, kernel], the oldest tap first
    conv_bias: torch.Tensor | None  # [channels]
    rates: torch.Tensor  # [value heads]: -e^{a_log}
    step_bias: torch.Tensor  # [value heads], or [value heads * key_dim] where channels have decays of their own
    skip: torch.Tensor | None  # [value heads], Mamba-2's d
    norm: torch.Tensor | None  # [value_dim], or [values] where groups have weights of their own
    eps: float


@dataclass(frozen=True)
class RecurrentCache:
    """The cache of a recurrent layer: cells [num_cells, ...] of a block of tokens each, states [num_states, ...].

    Cells are written where the table has a block (0: no later token reads them), states likewise.
    """

    conv_inputs: torch.Tensor  # [blocks, block_size, channels]
    keys: torch.Tensor  # [blocks, key_heads, block_size, key_dim]
    updates: torch.Tensor  # [blocks, value_heads, block_size, value_dim]
    decays: torch.Tensor  # float32, G since the chunk's beginning: [blocks, block_size, value_heads], or of channels
    # [blocks, value_heads, block_size, key_dim]
    states: torch.Tensor  # float32 [slots, value_heads, key_dim, value_dim]
    tails: torch.Tensor  # [slots, kernel - 1, channels]: inputs of the convolution before the position of the state


@dataclass(frozen=True)
class RecurrentArgs:
    spec: Recurrent
    weights: RecurrentWeights


def recurrent_weights(spec: Recurrent, eps: float, vector: Callable[[str], torch.Tensor]) -> RecurrentWeights:
    """A mixer's weights; `vector` reads one by its name, without the `ssm_` that they have in common."""
    names = [name for name, _ in spec.conv_parts]
    taps = [vector(f"{name}.weight") * scale for name, scale in zip(names, spec.part_scales, strict=True)]
    return RecurrentWeights(
        conv=torch.cat(taps),
        conv_bias=torch.cat([vector(f"{name}.bias") for name in names]) if spec.conv_bias else None,
        rates=-vector("a_log").exp(),
        step_bias=vector("dt_bias"),
        skip=vector("d") if spec.rule == "ssd" else None,
        norm=None if spec.norm is None else vector("norm.weight"),
        eps=eps if spec.norm is None or spec.norm.eps is None else spec.norm.eps,
    )
