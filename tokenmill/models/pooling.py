"""Pooling of a prompt's hidden states into one vector; the result does not depend on how the prompt is chunked.

mean   the mean of all tokens' states, summed chunk by chunk
last   the last token's state, which attends to the whole prompt
cls    the first token's state
"""

from __future__ import annotations

import torch

from tokenmill.types import Pooling


class Pooler:
    """Accumulates the states of one prompt, chunk by chunk."""

    def __init__(self, pooling: Pooling, prompt_len: int) -> None:
        self.pooling = pooling
        self.prompt_len = prompt_len
        self._sum: torch.Tensor | None = None  # float64 [H], so that the float32 result is the same for any chunks
        self._count = 0

    def needed_tokens(self, start: int, count: int) -> range:
        """Return the tokens of a chunk [start, start + count) whose states are needed, counted from `start`."""
        if self.pooling.kind == "mean":
            return range(count)
        if self.pooling.kind == "cls":
            return range(1 if start == 0 else 0)
        return range(count - 1, count) if start + count == self.prompt_len else range(0)

    def add(self, hidden: torch.Tensor) -> None:
        """Add the states of the tokens that `needed_tokens` returned: hidden [n, H]."""
        if len(hidden):
            total = hidden.double().sum(0)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(hidden)

    def vector(self) -> torch.Tensor:
        """Return the pooled vector, float32 [H]."""
        assert self._sum is not None, "a prompt has at least one token"
        mean = (self._sum / self._count).float()
        return torch.nn.functional.normalize(mean, dim=0) if self.pooling.normalize else mean
