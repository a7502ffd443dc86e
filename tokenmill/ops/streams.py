"""What layers over several residual streams (`arch/streams.py`) are computed from, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AltUpNumbers:
    """A layer's numbers of its own, float32: how streams are predicted and corrected."""

    norm: torch.Tensor  # [H], before the router
    eps: float
    router: torch.Tensor  # [streams, H]
    predict: torch.Tensor  # [streams * streams, streams]
    correct: torch.Tensor  # [streams, streams]
    scale: torch.Tensor | None  # [H]


@dataclass(frozen=True)
class AltUpOps:
    predict: Callable[[torch.Tensor, AltUpNumbers], torch.Tensor]
    """streams [T, streams, H] → all of them as they are predicted behind the layer"""
    correct: Callable[[torch.Tensor, torch.Tensor, AltUpNumbers], tuple[torch.Tensor, torch.Tensor]]
    """(predicted [T, streams, H], the layer's result [T, H]) → the streams, and the first times `scale`"""
    as_long: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """x [T, H], each row scaled to the norm of the other tensor's row"""
