"""A recurrent mixer's sizes and parameters as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from tokenmill.arch.recurrent import Recurrent
from tokenmill.ops.recurrent import RecurrentArgs
from tokenmill.ops.triton.recurrent.parts import GATE_FIRST, NO_NORM, NORM_FIRST


@dataclass(frozen=True)
class Sizes:
    shapes: tuple[Any, ...]
    """delta rule, key heads, value heads, key dim, value dim, taps, bias of the convolution, decays of a value head:
    constants of kernels"""
    norm: int
    norm_is_shared: bool
    anything: torch.Tensor

    @classmethod
    def of(cls, args: RecurrentArgs) -> Sizes:
        spec, norm = args.spec, args.spec.norm
        return cls(
            shapes=(
                spec.rule == "delta", spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.kernel,
                spec.conv_bias, spec.num_decays // spec.value_heads,
            ),
            norm=(NO_NORM if norm is None else GATE_FIRST if norm.gates_first else NORM_FIRST).value,
            norm_is_shared=norm is None or norm.is_shared,
            anything=args.weights.rates,
        )  # fmt: skip

    def or_any(self, weight: torch.Tensor | None) -> torch.Tensor:
        """Return a weight, or a placeholder that is not read."""
        return self.anything if weight is None else weight


def step_numbers(spec: Recurrent) -> tuple[float, float, float]:
    """Return the scale of a, and the smallest and largest step."""
    return spec.step_scale, *(spec.step_limits or (0.0, inf))


def gate_numbers(spec: Recurrent) -> tuple[float, float]:
    """Return the scales of the gate and of the output."""
    return spec.gate_scale, spec.out_scale
