"""Prediction and correction of several residual streams (AltUp), in plain torch."""

from __future__ import annotations

import torch

from tokenmill.ops.reference.elementwise import rms_norm
from tokenmill.ops.streams import AltUpNumbers, AltUpOps

MIN_SQUARE = 1e-5  # of a stream whose length is changed


def predict(streams: torch.Tensor, numbers: AltUpNumbers) -> torch.Tensor:
    count = streams.shape[1]
    mixture = (_coefficients(streams[:, 0], numbers) @ numbers.predict.t()).view(-1, count, count)
    return (mixture @ streams.float() + streams).to(streams.dtype)


def correct(predicted: torch.Tensor, result: torch.Tensor, numbers: AltUpNumbers) -> tuple[torch.Tensor, torch.Tensor]:
    shares = _coefficients(result, numbers) @ numbers.correct.t() + 1.0  # [T, streams]
    corrected = (predicted + (result - predicted[:, 0]).unsqueeze(1) * shares.unsqueeze(2)).to(result.dtype)
    first = corrected[:, 0]
    return corrected, first if numbers.scale is None else first * numbers.scale.to(first.dtype)


def _coefficients(x: torch.Tensor, numbers: AltUpNumbers) -> torch.Tensor:
    """[T, H] → float32 [T, streams]"""
    normed = rms_norm(x.float(), numbers.norm, numbers.eps)
    return torch.tanh(normed / x.shape[1] @ numbers.router.t())


def as_long(x: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    wanted = model.float().square().mean(-1, keepdim=True).sqrt()
    found = x.float().square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()
    return (x * (wanted / found)).to(x.dtype)


ALTUP = AltUpOps(predict, correct, as_long)
