"""How likely a guess is right, learned from what was really drawn, whether or not the guess was computed.

A guess behind a long agreement is surer than one behind a short one (`AcceptanceRates` keeps a rate for each length,
for
all requests), and some requests repeat themselves more than others (`Skill`: how a request does against those rates).
A guess that was never fed costs nothing and still teaches: it is compared with the token that came.
"""

from __future__ import annotations

from collections.abc import Sequence

# By length of the agreement: 2, 3, 4 to 5, 6 to 9, 10 and more tokens; what they start from.
FIRST_RATES = (0.35, 0.5, 0.65, 0.8, 0.9)
_CLASS_OF_LENGTH = (0, 0, 0, 1, 2, 2, 3, 3, 3, 3)
FIRST_RATE_WEIGHT = 8.0
REMEMBERED_GUESSES = 256.0  # of one class, before older ones count half
REMEMBERED_OF_REQUEST = 32.0
SKILL_CAUTION = 2.0


def length_class(length: int) -> int:
    return _CLASS_OF_LENGTH[length] if length < len(_CLASS_OF_LENGTH) else len(FIRST_RATES) - 1


class AcceptanceRates:
    """Of all requests, by class of agreement."""

    def __init__(self, first_rates: Sequence[float] = FIRST_RATES) -> None:
        self._first = first_rates
        self._right = [0.0] * len(first_rates)
        self._seen = [0.0] * len(first_rates)

    def rate(self, kind: int) -> float:
        weight = FIRST_RATE_WEIGHT
        return (self._right[kind] + weight * self._first[kind]) / (self._seen[kind] + weight)

    def learn(self, kind: int, is_right: bool) -> None:
        if self._seen[kind] >= REMEMBERED_GUESSES:
            self._right[kind] /= 2
            self._seen[kind] /= 2
        self._right[kind] += is_right
        self._seen[kind] += 1


class RequestAcceptance:
    """How one request's guesses do, against what would be expected of such guesses."""

    __slots__ = ("_expected", "_right", "_seen")

    def __init__(self) -> None:
        self._right = self._seen = self._expected = 0.0

    def learn(self, expected: float, is_right: bool) -> None:
        if self._seen >= REMEMBERED_OF_REQUEST:
            self._right, self._seen, self._expected = self._right / 2, self._seen / 2, self._expected / 2
        self._right += is_right
        self._expected += expected
        self._seen += 1

    def chance(self, rate: float) -> float:
        """Of a guess that is right at `rate` in general: the odds times how much better or worse this request is."""
        wrong, expected_wrong = self._seen - self._right, self._seen - self._expected
        better = (self._right + SKILL_CAUTION) * (expected_wrong + SKILL_CAUTION)
        worse = (wrong + SKILL_CAUTION) * (self._expected + SKILL_CAUTION)
        odds = rate / (1.0 - rate) * better / worse
        return odds / (1.0 + odds)
