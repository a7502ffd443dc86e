"""The number of draft tokens to verify in one step: the one that gives the most tokens per second.

Each draft token has a probability that it and all before it are right; the most likely ones of all sequences are chosen
first. A step with m of them yields  rows + Σ probability  tokens and takes the time of a step of that many tokens.

    tokens/second   │     ●   ●
                    │  ●          ●          drafts pay up to the top
                    │●               ●
                    └──────────────────── m

The time of a step as a function of its number of tokens is learned from measured steps (`StepCost`).

Each size keeps a running mean. A line fitted through the means, weighted towards small sizes, estimates sizes without
(recent) measurements; its prior is steep, so that speculation starts only after measurements show that it pays.

    seconds │            ·  ╱           one token per row costs reading the weights;
            │       ·  ╱                more tokens read the same weights and compute more
            │  · ╱
            └──────────────── tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from math import log2
from typing import Protocol

MAX_DRAFTS = 15  # per sequence and step
NEGLIGIBLE_CHANCE = 0.05  # probabilities below this are not considered
MIN_CHANCE = 0.3  # `ThresholdDepth` feeds draft tokens that are at least this likely
DRAFT_COST_MARGIN = 1.15  # factor on the estimated cost of drafts, because estimates are uncertain
PROBE_DEPTH = 2
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 16, 1024  # steps without drafts before the next probe

MAX_STEP_TOKENS = 256  # larger steps are prefill and say little about drafts
EXACT_SIZES = 16  # up to this many tokens each size has its own mean
PRIOR_TOKEN_SHARE = 0.6  # prior: the share of a step's time that grows with its tokens
VALUES_IN_MEAN = 10  # the newest value has a weight of 1/10 in a mean
HALF_LIFE_STEPS = 400
LINE_WEIGHT = 2.0  # of the line relative to a size's own mean, in observations
PRIOR_WEIGHT = 1.0


class Depth(Protocol):
    """A rule for how many draft tokens each sequence gets."""

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        """Return the probability below which no draft token is fed, so that proposers can stop there."""
        ...

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        """Choose how many draft tokens of each sequence to feed.

        chances[i][j] is the probability that drafts 0 to j of sequence i are all right. The step samples for
        `num_rows` sequences and feeds `num_tokens` tokens besides the drafts.
        """
        ...


class ThresholdDepth:
    """Takes every draft token that is likely enough, regardless of its cost."""

    def __init__(self, least_chance: float = MIN_CHANCE) -> None:
        self._least = least_chance

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        return self._least

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        return [sum(chance >= self._least for chance in one) for one in chances]


class CostModelDepth:
    """Takes as many draft tokens as raise the tokens per second, by the measured cost of steps."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        """Return half the break-even probability of one more token, by the fitted line alone."""
        if not self._cost.is_known:
            return 1.0
        return max(NEGLIGIBLE_CHANCE, 0.5 * self._cost.slope * num_rows / self._cost.seconds(num_tokens))

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        if not self._cost.is_known:
            return [0] * len(chances)
        surest = sorted((chance for one in chances for chance in one), reverse=True)
        costs = self._cost.seconds_up_to(num_tokens, len(surest))
        base = costs[0]
        best, least, gained = num_rows / base, 2.0, float(num_rows)
        for chance, seconds in zip(surest, costs[1:], strict=True):
            gained += chance
            found = gained / (base + DRAFT_COST_MARGIN * (seconds - base))
            if found > best:
                best, least = found, chance
        return [sum(chance >= least for chance in one) for one in chances]


class DraftDepth:
    """Chooses one depth for all sequences, since the draft model drafts for them together and its steps take time too.

    While drafts don't pay, short probes at growing intervals check whether that is still so.
    """

    def __init__(self, cost: StepCost, draft_cost: StepCost) -> None:
        self._cost = cost
        self._draft_cost = draft_cost
        self._probe_interval = MIN_PROBE_INTERVAL
        self._steps_since_probe = 0

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int, num_behind: int) -> int:
        """Choose the depth; `num_behind` tokens must be fed to the draft model before it can draft."""
        best = self._best(chances, num_rows, num_tokens, num_behind)
        if best:
            self._probe_interval, self._steps_since_probe = MIN_PROBE_INTERVAL, 0
            return best
        self._steps_since_probe += 1
        if self._steps_since_probe < self._probe_interval:
            return 0
        self._probe_interval, self._steps_since_probe = min(2 * self._probe_interval, MAX_PROBE_INTERVAL), 0
        return PROBE_DEPTH

    def _best(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int, num_behind: int) -> int:
        if not self._cost.is_known or not self._draft_cost.is_known:
            return PROBE_DEPTH
        base = self._cost.seconds(num_tokens)
        best, rate = 0, num_rows / base
        gained, fed, drafting_s = float(num_rows), num_tokens, 0.0
        for depth in range(1, max(map(len, chances), default=0) + 1):
            going = [one[depth - 1] for one in chances if len(one) >= depth]
            drafting_s += self._draft_cost.seconds(num_behind if depth == 1 else len(going))
            gained += sum(going)
            fed += len(going)
            found = gained / (base + DRAFT_COST_MARGIN * (drafting_s + self._cost.seconds(fed) - base))
            if found > rate:
                best, rate = depth, found
        return best


# ── the cost of a step ───────────────────────────────────────────────────────────────────────────────


class SizeMean:
    """Running mean over the steps of one size class."""

    __slots__ = ("count", "last", "seconds", "tokens", "weight")

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = float(tokens), seconds
        self.count, self.last, self.weight = 1, 0, 0.0

    def note(self, tokens: int, seconds: float) -> None:
        if self.count > 2:
            seconds = min(seconds, 2.0 * self.seconds)  # limits outliers, such as other load on the machine
        self.count = min(self.count + 1, VALUES_IN_MEAN)
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
        self._line = (0.0, 0.0)  # seconds, seconds per token

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    @property
    def slope(self) -> float:
        """Return the seconds per additional token."""
        return self._line[1]

    def note(self, tokens: int, seconds: float) -> None:
        if not 0 < tokens <= MAX_STEP_TOKENS or seconds <= 0.0:
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
        """Return the seconds of steps with `tokens`, `tokens` + 1 … `tokens` + `more` tokens."""
        base, slope = self._line
        found: list[float] = []
        while len(found) <= more:
            kind = _size_class(tokens + len(found))
            level = base + self._deviation(kind)
            sizes = range(tokens + len(found), min(_class_end(kind), tokens + more + 1))
            found += [level + slope * size for size in sizes]
        return found

    def _deviation(self, kind: int) -> float:
        """Return the deviation of a size class from the line, weighted by its observations."""
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
        first = PRIOR_TOKEN_SHARE * newest.seconds / newest.tokens
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
    """Return the first number of tokens beyond a class."""
    return next(tokens for tokens in count(1) if _size_class(tokens) > kind)
