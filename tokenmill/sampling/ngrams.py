"""An index of the tokens that would complete an n-gram of the sequence, found without rereading the sequence."""

from __future__ import annotations

from collections.abc import Iterable


class NgramIndex:
    """For each run of size - 1 tokens, the tokens that have followed it in prompt or output."""

    def __init__(self, size: int, tokens: Iterable[int]) -> None:
        self._size = size
        self._tail: tuple[int, ...] = ()  # the last size - 1 tokens
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in tokens:
            self.record(token)

    def record(self, token: int) -> None:
        if len(self._tail) == self._size - 1:
            self._followers.setdefault(self._tail, []).append(token)
        longer = (*self._tail, token)
        self._tail = longer[max(0, len(longer) - (self._size - 1)) :]

    def repeating(self) -> list[int]:
        """Tokens that must not come next."""
        if len(self._tail) < self._size - 1:
            return []
        return self._followers.get(self._tail, [])
