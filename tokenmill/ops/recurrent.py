"""Weights and cache of a recurrent mixer (`arch/recurrent.py`), in the form that every backend reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.arch.recurrent import InnerProjection, Recurrent


@dataclass(frozen=True)
class RecurrentWeights:
    """The mixer's own weights, float32; the input and output projections belong to the layer."""

    conv: torch.Tensor  # [channels of q, k and v, kernel], the oldest tap first
    conv_bias: torch.Tensor | None  # [channels]
    rates: torch.Tensor  # [value heads]: -e^{a_log}; of Mamba-1 [key_dim, values]
    step_bias: torch.Tensor  # [value heads], or [value heads * key_dim] with decays per channel; of Mamba-1 [values]
    skip: torch.Tensor | None  # [value heads], Mamba-2's d; of Mamba-1 [values]
    norm: torch.Tensor | None  # [value_dim], or [values] with weights per group
    eps: float


@dataclass(frozen=True)
class RecurrentCache:
    """The cache of a recurrent layer: cells [num_cells, ...], one per block of tokens, and states [num_states, ...].

    Where the table's entry is 0, nothing is written: no later token reads that cell or state.
    """

    conv_inputs: torch.Tensor  # [blocks, block_size, channels]
    keys: torch.Tensor  # [blocks, key_heads, block_size, key_dim]
    updates: torch.Tensor  # [blocks, value_heads, block_size, value_dim]
    decays: torch.Tensor  # float32, cumulative log decay G since the chunk's start: [blocks, block_size, value_heads],
    # or with decays per channel [blocks, value_heads, block_size, key_dim]; of Mamba-1 dt, [blocks, block_size, values]
    states: torch.Tensor  # float32 [slots, value_heads, key_dim, value_dim]
    tails: torch.Tensor  # [slots, kernel - 1, channels]: the convolution's last inputs before the state's position


@dataclass(frozen=True)
class RecurrentArgs:
    spec: Recurrent
    weights: RecurrentWeights


@dataclass(frozen=True)
class ScanInputs:
    """What Mamba-1's recurrence reads of T tokens."""

    projected: torch.Tensor  # [T, v z]
    convolved: torch.Tensor  # [T, values]
    steps: torch.Tensor  # [T, values], before the bias and softplus
    keys: torch.Tensor  # [T, key_dim]
    queries: torch.Tensor  # [T, key_dim]


def inner_norms(
    spec: Recurrent, inner: InnerProjection, vector: Callable[[str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the norm weights of a, k and q of Mamba-1; ones if the norms have none, None if there are no norms."""
    if inner.norm is None:
        return None
    if inner.norm == "plain":
        return torch.ones(inner.rank), torch.ones(spec.key_dim), torch.ones(spec.key_dim)
    return vector("step_norm.weight"), vector("k_norm.weight"), vector("q_norm.weight")


def recurrent_weights(spec: Recurrent, eps: float, vector: Callable[[str], torch.Tensor]) -> RecurrentWeights:
    """Load a mixer's weights; `vector` reads one by its name without the common prefix `ssm_`."""
    names = [name for name, _ in spec.conv_parts]
    scales = spec.part_scales[-len(names) :]
    taps = [vector(f"{name}.weight") * scale for name, scale in zip(names, scales, strict=True)]
    rates = -vector("a_log").exp()
    return RecurrentWeights(
        conv=torch.cat(taps),
        conv_bias=torch.cat([vector(f"{name}.bias") for name in names]) if spec.conv_bias else None,
        rates=rates if spec.inner is None else rates.t().contiguous(),
        step_bias=vector("dt_bias"),
        skip=None if spec.rule == "delta" else vector("d"),
        norm=None if spec.norm is None else vector("norm.weight"),
        eps=eps if spec.norm is None or spec.norm.eps is None else spec.norm.eps,
    )
