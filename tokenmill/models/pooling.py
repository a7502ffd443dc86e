"""One vector for a whole prompt, from the hidden states of its tokens, however the prompt is cut into chunks.

mean   of all tokens' states, summed up chunk by chunk
last   the last token's state: it has seen everything
cls    the first token's state
"""

from __future__ import annotations

import torch

from tokenmill.types import Pooling


class Pooler:
    """Gathers the states of one prompt, chunk by chunk."""

    def __init__(self, pooling: Pooling, prompt_len: int) -> None:
        self.pooling = pooling
        self.prompt_len = prompt_len
        self._sum: torch.Tensor | None = None  # float64 [H], so that chunk borders leave no trace
        self._count = 0

    def wanted(self, start: int, count: int) -> range:
        """The tokens of a chunk [start, start + count) whose states are needed, counted from the chunk's beginning."""
        if self.pooling.kind == "mean":
            return range(count)
        if self.pooling.kind == "cls":
            return range(1 if start == 0 else 0)
        return range(count - 1, count) if start + count == self.prompt_len else range(0)

    def add(self, hidden: torch.Tensor) -> None:
        """hidden [n, H]: the states of the wanted tokens"""
        if len(hidden):
            total = hidden.double().sum(0)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(hidden)

    def vector(self) -> torch.Tensor:
        """float32 [H]"""
        assert self._sum is not None, "a prompt has at least one token"
        mean = (self._sum / self._count).float()
        return torch.nn.functional.normalize(mean, dim=0) if self.pooling.normalize else mean
