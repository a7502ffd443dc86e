"""Tokens that a model samples itself where no request needs to see the logits: greedy ones, or draws with the usual
parameters.

A model that can do this samples while it computes the logits and never stores or returns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

BROKEN = -1  # in place of a token: the line's highest logit is no finite number


@dataclass(frozen=True)
class ModelSampled:
    """One sampled token for each of L lines of logits."""

    tokens: list[int]

    @property
    def shape(self) -> tuple[int]:
        return (len(self.tokens),)

    def __getitem__(self, part: slice) -> ModelSampled:
        return ModelSampled(self.tokens[part])


HeadOutput = Tensor | ModelSampled
"""Logits, float32 [L, vocab], or only the tokens where no request asks for more"""


def chosen_highest(tokens: Tensor, values: Tensor) -> ModelSampled:
    """Make tokens of the indices of the highest logits, int64 [L], and those logits, float32 [L]."""
    lines = zip(tokens.tolist(), values.tolist(), strict=True)
    return ModelSampled([token if isfinite(value) else BROKEN for token, value in lines])


def highest_of(logits: Tensor) -> ModelSampled:
    tokens = places_of_highest(logits)
    return chosen_highest(tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1))


def places_of_highest(logits: Tensor) -> Tensor:
    """argmax [S]; the first of equals, or of NaNs. On a CPU numpy finds it ten times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)
