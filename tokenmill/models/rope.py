"""Rotary position embeddings (RoPE): tables of cos and sin for every position and frequency, computed once at load.

Frequencies start as theta^(-2i / rotary_dim) and are then scaled for longer contexts in one of the ways below, each as
its paper and `transformers` define it; all in float32, as in training.

LongRope has one set of factors for short contexts and one for long. The longest context that is served decides which
one applies, never the positions seen so far: keys already in the cache must stay comparable with new queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch

from tokenmill.arch.spec import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    QueryGrowth,
    RopeSpec,
    YarnScaling,
)
from tokenmill.ops.interface import Ops


@dataclass(frozen=True)
class RopeTable:
    cos_sin: torch.Tensor  # float32 [2, max_context, rotary_dim / 2]

    @property
    def cos(self) -> torch.Tensor:
        return self.cos_sin[0]

    @property
    def sin(self) -> torch.Tensor:
        return self.cos_sin[1]

    def at(self, positions: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = ops.gather_rows(self.cos_sin, positions)
        return cos, sin


def make_rope_table(spec: RopeSpec, max_context: int, device: torch.device) -> RopeTable:
    positions = torch.arange(max_context, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(spec, max_context))
    factor = _magnitude(spec)
    return RopeTable(torch.stack((angles.cos() * factor, angles.sin() * factor)).to(device))


def query_growth(growth: QueryGrowth, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors by which queries at these positions are multiplied, float32 [T]."""
    stretches = torch.floor((positions.float() + growth.first) / growth.length)
    return 1.0 + growth.beta * torch.log1p(stretches)


def rope_frequencies(spec: RopeSpec, max_context: int) -> torch.Tensor:
    """Return the frequencies, float32 [rotary_dim / 2]; zero for pairs that are not rotated."""
    frequencies = _scaled_frequencies(spec, max_context)
    if spec.num_angles is not None:
        frequencies[spec.num_angles :] = 0.0
    return frequencies


def _scaled_frequencies(spec: RopeSpec, max_context: int) -> torch.Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, spec.scaling)
        case LongRopeScaling():
            return _longrope(plain, spec.scaling, max_context)
        case YarnScaling():
            return _yarn(plain, spec, spec.scaling)
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case None:
            return plain
    assert_never(spec.scaling)


def _magnitude(spec: RopeSpec) -> float:
    """Return the factor by which cos and sin are multiplied (`mscale`)."""
    return spec.scaling.mscale if isinstance(spec.scaling, LongRopeScaling | YarnScaling) else 1.0


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_context * plain / (2 * math.pi)  # full turns within the original context
    width = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (turns - scaling.low_freq_factor) / width if width else turns.gt(scaling.low_freq_factor).float()
    blend = smooth.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _longrope(plain: torch.Tensor, scaling: LongRopeScaling, max_context: int) -> torch.Tensor:
    is_long = max_context > scaling.original_context
    factors = scaling.long_factors if is_long else scaling.short_factors
    return plain / torch.tensor(factors, dtype=torch.float32)


def _yarn(plain: torch.Tensor, spec: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    """Keep fast frequencies, divide slow ones by the factor, and blend linearly over the dimensions between."""

    def dimension_with(turns: float) -> float:
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
