"""xIELU, the activation of Apertus (https://arxiv.org/abs/2411.13010): a parabola above zero and an exponential curve
below, with learned numbers in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tokenmill.ops.interface import XieluCurve


def xielu_curve(numbers: Sequence[float]) -> XieluCurve:
    """Return the curve of a checkpoint's numbers: `alpha_p`, `alpha_n`, `beta` and `eps`."""
    positive, negative, beta, eps = numbers
    softplus = functional.softplus(torch.tensor([positive, negative], dtype=torch.float64)).tolist()
    return XieluCurve(softplus[0], beta + softplus[1], beta, eps)


def xielu(x: torch.Tensor, curve: XieluCurve) -> torch.Tensor:
    wide = x.float()
    below = curve.negative * (torch.expm1(wide.clamp(max=curve.eps)) - wide)
    out = torch.where(wide > 0, curve.positive * wide * wide, below) + curve.linear * wide
    return out.to(x.dtype)
