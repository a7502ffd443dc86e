"""Time of a step by the number of its tokens, learned from the steps that ran.

Each size keeps a running mean. A line fitted through the means, small sizes weighing more, estimates sizes that were
not seen (lately); its prior is steep, so that speculation starts only where it is shown to pay.

    seconds │            ·  ╱           one token per row costs reading the weights;
            │       ·  ╱                more tokens read the same weights and compute more
            │  · ╱
            └──────────────── tokens
"""

from __future__ import annotations

from functools import cache
from itertools import count
from math import log2

LARGEST_SIZE = 256  # tokens; larger steps are prefill and say little about drafts
EXACT_SIZES = 16  # up to here each size has its own mean
STEEPNESS = 0.6  # prior: the share of a step's time that grows with its tokens
STEADINESS = 10  # the newest value weighs a tenth in a mean
HALF_LIFE_STEPS = 400
LINE_WEIGHT = 2.0  # of the line against a size's own mean, in observations
PRIOR_WEIGHT = 1.0


class SizeMean:
    """Running mean over the steps of about one size."""

    __slots__ = ("count", "last", "seconds", "tokens", "weight")

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = float(tokens), seconds
        self.count, self.last, self.weight = 1, 0, 0.0

    def note(self, tokens: int, seconds: float) -> None:
        if self.count > 2:
            seconds = min(seconds, 2.0 * self.seconds)  # an outlier: the machine was busy otherwise
        self.count = min(self.count + 1, STEADINESS)
        self.tokens += (tokens - self.tokens) / self.count
        self.seconds += (seconds - self.seconds) / self.count

    def fade(self, now: int) -> None:
        """Set the weight in observations; it halves every `HALF_LIFE_STEPS` steps."""
        self.weight = self.count * 0.5 ** ((now - self.last) / HALF_LIFE_STEPS)


class StepCost:
    """Estimates the seconds of a step from its number of tokens."""

    def __init__(self) -> None:
        self._sizes: dict[int, SizeMean] = {}
        self._num_steps = 0
        self._line = (0.0, 0.0)  # seconds, seconds a token

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    @property
    def slope(self) -> float:
        """Seconds per additional token."""
        return self._line[1]

    def note(self, tokens: int, seconds: float) -> None:
        if not 0 < tokens <= LARGEST_SIZE or seconds <= 0.0:
            return
        self._num_steps += 1
        key = _size_class(tokens)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = SizeMean(tokens, seconds)
        else:
            size.note(tokens, seconds)
        size.last = self._num_steps
        self._line = self._fitted(size)

    def seconds(self, tokens: int) -> float:
        base, slope = self._line
        return base + slope * tokens + self._deviation(_size_class(tokens))

    def seconds_up_to(self, tokens: int, more: int) -> list[float]:
        """Seconds of steps with `tokens`, `tokens` + 1 … `tokens` + `more` tokens, computed together."""
        base, slope = self._line
        found: list[float] = []
        while len(found) <= more:
            kind = _size_class(tokens + len(found))
            level = base + self._deviation(kind)
            sizes = range(tokens + len(found), min(_class_end(kind), tokens + more + 1))
            found += [level + slope * size for size in sizes]
        return found

    def _deviation(self, kind: int) -> float:
        """Deviation of a size class from the line, weighted by its observations."""
        size = self._sizes.get(kind)
        if size is None:
            return 0.0
        own = size.seconds - self._line[0] - self._line[1] * size.tokens
        return own * size.weight / (size.weight + LINE_WEIGHT)

    def _fitted(self, newest: SizeMean) -> tuple[float, float]:
        """Fit the line: least squares of relative errors over the sizes, with a prior on the slope; never falling.

        minimise  Σ w (base + slope · tokens - seconds)²  +  w₀ (slope - first)² · spread
        """
        for size in self._sizes.values():
            size.fade(self._num_steps)
        total = tokens = seconds = 0.0
        weighed = [(size, _weight_in_fit(size)) for size in self._sizes.values()]
        for size, weight in weighed:
            total += weight
            tokens += weight * size.tokens
            seconds += weight * size.seconds
        mean_tokens, mean_seconds = tokens / total, seconds / total
        first = STEEPNESS * newest.seconds / newest.tokens
        square = PRIOR_WEIGHT / newest.seconds**2
        product = square * first
        for size, weight in weighed:
            apart = size.tokens - mean_tokens
            square += weight * apart * apart
            product += weight * apart * (size.seconds - mean_seconds)
        slope = max(product / square, 0.0)
        return mean_seconds - slope * mean_tokens, slope


def _weight_in_fit(size: SizeMean) -> float:
    far = max(1.0, size.tokens / (2 * EXACT_SIZES))
    return size.weight / (size.seconds * far) ** 2


@cache
def _size_class(tokens: int) -> int:
    return tokens if tokens <= EXACT_SIZES else EXACT_SIZES + int(4 * log2(tokens / EXACT_SIZES))


@cache
def _class_end(kind: int) -> int:
    """The first number of tokens beyond a class."""
    return next(tokens for tokens in count(1) if _size_class(tokens) > kind)
