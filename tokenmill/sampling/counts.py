"""Token counts for penalties: which tokens a sequence has seen, and how often in its output.

Kept only for rows with a penalty, as two host arrays over the distinct tokens (a few hundred, where the vocabulary
has a hundred thousand); `slots` finds a token's place in them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int], vocab_size: int) -> None:
        # a prompt may hold placeholders outside the vocabulary; they have no logit to penalise
        seen = [token for token in dict.fromkeys(prompt_ids) if 0 <= token < vocab_size]
        self._slots = {token: slot for slot, token in enumerate(seen)}
        capacity = max(64, 2 * len(seen))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(seen)] = seen
        self._outputs = np.zeros(capacity, dtype=np.int64)
        for token in output_ids:
            self.record(token)

    def record(self, token: int) -> None:
        """One more output token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
        self._ids[slot] = token
        self._outputs[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often each of `ids` was generated (0: in the prompt only)."""
        return self._outputs[: len(self._slots)]
