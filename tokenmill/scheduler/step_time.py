"""A model of the duration of a step, fitted to measured steps.

    seconds = base + a · tokens + b · samples + c · context + d · pairs + e · (0 or 1)

    base      reading the weights, launching kernels
    a         one more token, of a prompt or of an answer
    b         one more row that samples: the logits of the vocabulary, sampling
    c         reading the cache; context: the tokens that rows attend to, counted once per row
    d         attention of prompts; pairs: computed tokens × tokens that each attends to
    e         having prompts at all: their attention has separate kernels in each layer

A short chunk at the end of a long prompt costs nearly as much as reading the tokens before it, however few tokens it
has. Without c and e its tokens would seem expensive, which would make the next chunk even smaller. The six coefficients
are fitted to recent steps by least squares of relative errors, and none is negative. Recent means the last dozens of
steps with prompts and of those without: beside a long prompt, none of thousands of steps only decodes, and how long
such a step takes must not be forgotten. A step that took much longer than
expected counts as three times as long as expected: the machine was busy with something else. Nothing is known before
the first prompt was computed (`is_known`).

`excess` is a safety factor: one step with a prompt in twenty takes that many times as long as the model says, or
longer. Steps under a latency objective are planned shorter by that factor.

The model determines what tenants are charged (`tenants.py`) and how many prompt tokens fit into a step that also
decodes (`promises.py`).
"""

from __future__ import annotations

import math
from operator import add, mul
from typing import NamedTuple

DECAY = 0.98  # the weight of earlier steps of the same kind is multiplied by this for each new step
MAX_OUTLIER_RATIO = 3.0  # a step counts as at most this many times as long as expected
MIN_STEPS = 8  # measured steps before outliers are recognised
# Ridge penalties by feature, relative to its own weight: they keep features that were not observed at zero, and do not
# attribute costs shared by all rows to single rows before steps of several rows were measured.
RIDGES = (1e-4, 1e-4, 1e-2, 1e-4, 1e-4, 1e-4)
NUM_SWEEPS = 12
MIN_SECONDS = 1e-7
TAIL = 0.05  # share of the steps that may exceed the planned duration
EXCESS_RATE = 0.05  # step size of the estimate in `Excess`
MAX_EXCESS = 1.5
SCALES = (100.0, 1.0, 10.0, 1e4, 1e6, 1.0)  # by feature: bring the coefficients to a similar magnitude
TOKENS, BASE, SAMPLES, CONTEXT, PAIRS, PROMPTS = range(len(SCALES))


class StepSize(NamedTuple):
    """The quantities of a step that its duration depends on."""

    tokens: int
    samples: int  # rows that sample a token
    context: int  # tokens that each row attends to, summed over the rows
    pairs: int = 0  # tokens that each prompt token attends to, summed over the prompt tokens

    @property
    def has_prompts(self) -> bool:
        return self.tokens > self.samples


class Excess:
    """A running estimate of the 95th percentile of measured over expected duration."""

    def __init__(self) -> None:
        self.factor = 1.0

    def note(self, ratio: float) -> None:
        """Update the estimate: raise it by a large step if it was exceeded, otherwise lower it by a small one."""
        step = 1.0 - TAIL if ratio > self.factor else -TAIL
        self.factor = min(MAX_EXCESS, max(1.0, self.factor + EXCESS_RATE * step))


class MeasuredSteps:
    """Weighted sums over measured steps of one kind, with or without prompts, for a fit by least squares."""

    def __init__(self) -> None:
        self.squares = [[0.0] * len(SCALES) for _ in SCALES]  # of products of features
        self.products = [0.0] * len(SCALES)  # of products of features and seconds

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        weight = 1.0 / seconds**2
        for i, feature in enumerate(features):
            row = self.squares[i]
            for j, other in enumerate(features):
                row[j] = row[j] * DECAY + weight * feature * other
            self.products[i] = self.products[i] * DECAY + weight * feature * seconds


class StepTime:
    """Estimates the seconds of a step from its size."""

    def __init__(self) -> None:
        self._measured = {has_prompts: MeasuredSteps() for has_prompts in (False, True)}
        self._fit = [0.0] * len(SCALES)
        self._num_noted = 0
        self._has_prompt = False
        self._is_stale = False
        self.excess = Excess()  # of steps with prompts

    @property
    def is_known(self) -> bool:
        return self._has_prompt

    def note(self, size: StepSize, seconds: float) -> None:
        """Update the fit with a measured step."""
        if seconds <= 0.0 or size.tokens <= 0:
            return
        if self._num_noted >= MIN_STEPS:
            expected_s = max(self.seconds(size), MIN_SECONDS)
            if self._has_prompt and size.has_prompts and size.samples:
                self.excess.note(seconds / expected_s)
            seconds = min(seconds, MAX_OUTLIER_RATIO * expected_s)
        self._measured[size.has_prompts].add(_features(size), seconds)
        self._num_noted += 1
        self._has_prompt = self._has_prompt or size.has_prompts
        self._is_stale = True

    def seconds(self, size: StepSize) -> float:
        return sum(one * feature for one, feature in zip(self._fitted(), _features(size), strict=True))

    def tokens_in(self, seconds: float, start: int) -> int:
        """Return how many tokens of a prompt, from `start` on, fit into `seconds`, without the fixed cost `prompts_s`;
        each attends to one token more than the previous one."""
        if seconds <= 0.0:
            return 0
        token_s, more_s = self.token_s(start), self._fitted()[PAIRS] / SCALES[PAIRS]
        # n tokens take n · token_s + n² / 2 · more_s.
        return int(2.0 * seconds / (token_s + math.sqrt(token_s**2 + 2.0 * more_s * seconds)))

    def token_s(self, start: int = 0) -> float:
        """Return the seconds of one more prompt token with `start` tokens before it."""
        fit = self._fitted()
        return max(MIN_SECONDS, fit[TOKENS] / SCALES[TOKENS] + start * fit[PAIRS] / SCALES[PAIRS])

    def prompts_s(self, start: int) -> float:
        """Return the fixed cost of computing a prompt chunk from `start` on, independent of its number of tokens."""
        return self._fitted()[PROMPTS] / SCALES[PROMPTS] + self.read_s(start)

    def read_s(self, start: int) -> float:
        """Return the seconds for reading `start` tokens from the cache."""
        return start * self._fitted()[CONTEXT] / SCALES[CONTEXT]

    def cost_s(self, num_tokens: int, start: int, num_rows: int) -> float:
        """Return the seconds of a row with `num_tokens` from `start` on, including its part of the costs shared by
        `num_rows` rows."""
        fit = self._fitted()
        tokens_s = num_tokens * (self.token_s(start) if num_tokens > 1 else fit[TOKENS] / SCALES[TOKENS])
        read_s = self.read_s(start + num_tokens)
        return tokens_s + read_s + fit[BASE] / max(1, num_rows) + fit[SAMPLES] / SCALES[SAMPLES]

    def _fitted(self) -> list[float]:
        """Return the coefficients: non-negative least squares by coordinate descent, starting from the previous
        coefficients. The features' order decides which one explains a cost that several could explain: tokens first."""
        if self._is_stale:
            self._is_stale = False
            fit, decodes, prompts = self._fit, self._measured[False], self._measured[True]
            squares = [list(map(add, *rows)) for rows in zip(decodes.squares, prompts.squares, strict=True)]
            products = list(map(add, decodes.products, prompts.products))
            for _ in range(NUM_SWEEPS):
                for i, row in enumerate(squares):
                    if row[i] > 0.0:
                        others = sum(map(mul, row, fit)) - row[i] * fit[i]
                        fit[i] = max(0.0, (products[i] - others) / (row[i] * (1.0 + RIDGES[i])))
        return self._fit


def _features(size: StepSize) -> tuple[float, ...]:
    tokens, base, samples, context, pairs, prompts = SCALES
    has_prompts = prompts if size.has_prompts else 0.0
    counted = (size.tokens / tokens, base, size.samples / samples, size.context / context, size.pairs / pairs)
    return (*counted, has_prompts)
