"""What DRY needs to know: which tokens would go on repeating an earlier passage, and how long the repeat is by now.

    tokens   a b c d | a b c ?       the run "a b c" stands here a second time: d would make the repeat one longer

For every earlier place the length of the run that ends there and here is kept up to date: one comparison with the
whole sequence per token. A breaker (a line break, a quote: tokens that may follow one another anywhere) ends all runs:
a repeat is counted from the last breaker on. The rules are llama.cpp's, which took them from their inventor's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Breakers:
    """Token sequences that end a repeat: single tokens, and longer ones by their last token."""

    def __init__(self, single: Sequence[int], longer: Sequence[Sequence[int]]) -> None:
        self.single = frozenset(single)
        self._longer: dict[int, list[list[int]]] = {}
        for sequence in longer:
            self._longer.setdefault(sequence[-1], []).append(list(sequence))

    def ending_with(self, token: int) -> list[list[int]]:
        found = self._longer.get(token, [])
        return [[token], *found] if token in self.single else found


class RepeatRuns:
    def __init__(self, tokens: Sequence[int], breakers: Breakers) -> None:
        self._breakers = breakers
        self._length = len(tokens)
        capacity = max(256, 2 * len(tokens))
        self._tokens = np.zeros(capacity, np.int64)
        self._tokens[: len(tokens)] = tokens
        self._runs = np.zeros(capacity, np.int64)  # entry j: how many tokens up to place j equal the last ones
        self._runs[: len(tokens)] = suffix_runs(tokens)
        self._broken = (-1, -1)  # first and last place of the breaker that begins last
        for end in range(len(tokens)):
            self._note_breaker(end)

    def record(self, token: int) -> None:
        if self._length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._runs = np.concatenate([self._runs, np.zeros_like(self._runs)])
        end = self._length
        longer = self._runs[:end]
        longer[1:] = longer[:-1] + 1
        longer[:1] = 1
        longer *= self._tokens[:end] == token
        self._tokens[end] = token
        self._length += 1
        self._note_breaker(end)

    def repeating(self, allowed_length: int, last_n: int) -> dict[int, int]:
        """Tokens that would make a repeat of at least `allowed_length` longer -> its length; of the last `last_n`."""
        looked = self._length if last_n < 0 else min(last_n, self._length)
        limit = self._unbroken(looked)
        if looked <= allowed_length or limit < allowed_length:
            return {}
        first = self._length - looked
        runs = np.minimum(self._runs[first : self._length - 1], np.arange(1, looked))  # none begins before `first`
        runs = np.minimum(runs, limit)
        places = np.nonzero(runs >= allowed_length)[0]
        followers = self._tokens[first + 1 + places].tolist()
        found: dict[int, int] = {}
        for token, run in zip(followers, runs[places].tolist(), strict=True):
            if token not in self._breakers.single and run > found.get(token, -1):
                found[token] = run
        return found

    def _unbroken(self, looked: int) -> int:
        """Tokens since the last breaker, of the last `looked`."""
        first, last = self._broken
        return self._length - 1 - last if first >= self._length - looked and first >= 0 else looked

    def _note_breaker(self, end: int) -> None:
        """Remember the breaker that begins last among those that end here; the longest if several begin together."""
        for sequence in self._breakers.ending_with(int(self._tokens[end])):
            first = end + 1 - len(sequence)
            if first >= 0 and (first, end) > self._broken and self._tokens[first : end + 1].tolist() == sequence:
                self._broken = (first, end)


def suffix_runs(tokens: Sequence[int]) -> list[int]:
    """For each place, the length of the run ending there that also ends the whole: the Z-function, read backwards."""
    back = list(reversed(tokens))
    runs = [0] * len(back)
    left, right = 0, 0  # the stretch of `back` furthest on that equals its beginning: [left, right)
    for place in range(1, len(back)):
        run = min(right - place, runs[place - left]) if place < right else 0
        while place + run < len(back) and back[run] == back[place + run]:
            run += 1
        if place + run > right:
            left, right = place, place + run
        runs[place] = run
    return runs[::-1]
