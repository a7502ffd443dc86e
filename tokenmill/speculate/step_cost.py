"""What a step takes, by the number of tokens in it, learned from the steps that ran.

Each size keeps a running mean. A line through the means, near sizes weighing more, says what sizes cost that were not
seen (lately); it starts out steep, so that speculation has to earn its place.

    seconds │            ·  ╱           one token a row costs what the weights' bytes cost to read;
            │       ·  ╱                more tokens read the same bytes and compute more
            │  · ╱
            └──────────────── tokens
"""

from __future__ import annotations

from functools import cache
from itertools import count
from math import log2

LARGEST_SIZE = 256  # tokens; steps beyond are prompts, and say little about drafts
EXACT_SIZES = 16  # up to here each size has a mean of its own
STEEPNESS = 0.6  # before anything is known: this share of a step grows with its tokens
STEADINESS = 10  # a mean's newest value weighs a tenth
HALF_LIFE_STEPS = 400
LINE_WEIGHT = 2.0  # of the line, in observations, against a size's own mean
PRIOR_WEIGHT = 1.0


class Size:
    """Steps of about one size."""

    __slots__ = ("count", "last", "seconds", "tokens", "weight")

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = float(tokens), seconds
        self.count, self.last, self.weight = 1, 0, 0.0

    def note(self, tokens: int, seconds: float) -> None:
        if self.count > 2:
            seconds = min(seconds, 2.0 * self.seconds)  # someone else's hiccup
        self.count = min(self.count + 1, STEADINESS)
        self.tokens += (tokens - self.tokens) / self.count
        self.seconds += (seconds - self.seconds) / self.count

    def fade(self, now: int) -> None:
        """What it weighs, in observations; old ones fade."""
        self.weight = self.count * 0.5 ** ((now - self.last) / HALF_LIFE_STEPS)


class StepCost:
    def __init__(self) -> None:
        self._sizes: dict[int, Size] = {}
        self._num_steps = 0
        self._line = (0.0, 0.0)  # seconds, seconds a token

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    @property
    def slope(self) -> float:
        """Seconds that one token more takes."""
        return self._line[1]

    def note(self, tokens: int, seconds: float) -> None:
        if not 0 < tokens <= LARGEST_SIZE or seconds <= 0.0:
            return
        self._num_steps += 1
        key = _size_class(tokens)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = Size(tokens, seconds)
        else:
            size.note(tokens, seconds)
        size.last = self._num_steps
        self._line = self._fitted(size)

    def seconds(self, tokens: int) -> float:
        base, slope = self._line
        return base + slope * tokens + self._aside(_size_class(tokens))

    def seconds_up_to(self, tokens: int, more: int) -> list[float]:
        """Of `tokens`, `tokens` + 1 … `tokens` + `more`, at once."""
        base, slope = self._line
        found: list[float] = []
        while len(found) <= more:
            kind = _size_class(tokens + len(found))
            level = base + self._aside(kind)
            sizes = range(tokens + len(found), min(_class_end(kind), tokens + more + 1))
            found += [level + slope * size for size in sizes]
        return found

    def _aside(self, kind: int) -> float:
        """How far sizes of a class lie beside the line."""
        size = self._sizes.get(kind)
        if size is None:
            return 0.0
        own = size.seconds - self._line[0] - self._line[1] * size.tokens
        return own * size.weight / (size.weight + LINE_WEIGHT)

    def _fitted(self, newest: Size) -> tuple[float, float]:
        """Least squares of relative errors over the sizes, through a prior slope; never falling.

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


def _weight_in_fit(size: Size) -> float:
    far = max(1.0, size.tokens / (2 * EXACT_SIZES))
    return size.weight / (size.seconds * far) ** 2


@cache
def _size_class(tokens: int) -> int:
    return tokens if tokens <= EXACT_SIZES else EXACT_SIZES + int(4 * log2(tokens / EXACT_SIZES))


@cache
def _class_end(kind: int) -> int:
    """The first number of tokens beyond a class."""
    return next(tokens for tokens in count(1) if _size_class(tokens) > kind)
