"""A model of a step's duration, fitted to the steps that ran.

    seconds = base + a · tokens + b · samples + c · context + d · pairs + e · (0 or 1)

    base      reading the weights, launching kernels
    a         one more token, of a prompt or of an answer
    b         what a row that samples costs beside its token: the vocabulary's logits, drawing
    c         reading the cache; context: what rows look back at, each row's once
    d         attention of prompts; pairs: fed tokens × tokens that each looks back at
    e         that there are prompts at all: their attention has kernels of its own, in each layer

A short chunk at the end of a long prompt costs nearly as much as reading what is before it, however few its tokens are.
Without c and e its tokens would look dear, which would make the next chunk smaller still. The
six are fitted to the steps of the last while by least squares of relative errors, and none is negative. A step
that took much longer than expected counts as three times as long: the machine was busy otherwise. Before the first
prompt was computed nothing is known (`is_known`).

`excess` is a safety factor: one step with a prompt in twenty takes that many times as long as the model says, or
longer. Promised durations are planned shorter by that factor.

The model prices what tenants use (`tenants.py`) and says how much of a prompt fits beside running answers
(`budget.py`).
"""

from __future__ import annotations

import math
from operator import mul
from typing import NamedTuple

MEMORY = 0.98  # what a step weighs when the next one is noted
MOST_SURPRISE = 3.0  # a step counts as at most this many times as long as expected
NUM_TRUSTED = 8  # steps before which nothing is a surprise
RIDGES = (
    1e-4,
    1e-4,
    1e-2,
    1e-4,
    1e-4,
    1e-4,
)  # by feature: keep what was not seen at nothing, as much as so many steps; and
# what all rows share is not put down to each, before steps of several rows were seen
NUM_SWEEPS = 12
LEAST_S = 1e-7
TAIL = 0.05  # the part that may exceed what is planned for
TAIL_STRIDE = 0.05  # how fast an `Excess` follows
MOST_EXCESS = 1.5
SCALES = (100.0, 1.0, 10.0, 1e4, 1e6, 1.0)  # by feature: so that the fit is among numbers of one size
TOKENS, BASE, SAMPLES, CONTEXT, PAIRS, PROMPTS = range(len(SCALES))


class StepSize(NamedTuple):
    """The quantities of a step that its duration depends on."""

    tokens: int
    samples: int  # rows that draw a token
    context: int  # summed over the rows: how many tokens each looks back at
    pairs: int = 0  # summed over the tokens of prompts: how many tokens each looks back at

    @property
    def has_prompts(self) -> bool:
        return self.tokens > self.samples


class Excess:
    """A running estimate of the 95th percentile of measured over expected duration."""

    def __init__(self) -> None:
        self.factor = 1.0

    def note(self, ratio: float) -> None:
        """Move the estimate: up by much where it was exceeded, down by little where it was not."""
        step = 1.0 - TAIL if ratio > self.factor else -TAIL
        self.factor = min(MOST_EXCESS, max(1.0, self.factor + TAIL_STRIDE * step))


class StepTime:
    """Estimates the seconds of a step from its size."""

    def __init__(self) -> None:
        self._squares = [[0.0] * len(SCALES) for _ in SCALES]  # weighted sums of products of features
        self._products = [0.0] * len(SCALES)  # ... and of features and seconds
        self._fit = [0.0] * len(SCALES)
        self._num_noted = 0
        self._has_prompt = False
        self._is_stale = False
        self.excess = Excess()  # of steps with prompts

    @property
    def is_known(self) -> bool:
        return self._has_prompt

    def note(self, size: StepSize, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0.0 or size.tokens <= 0:
            return
        if self._num_noted >= NUM_TRUSTED:
            expected_s = max(self.seconds(size), LEAST_S)
            if self._has_prompt and size.has_prompts and size.samples:
                self.excess.note(seconds / expected_s)
            seconds = min(seconds, MOST_SURPRISE * expected_s)
        features = _features(size)
        weight = 1.0 / seconds**2
        for i, feature in enumerate(features):
            row = self._squares[i]
            for j, other in enumerate(features):
                row[j] = row[j] * MEMORY + weight * feature * other
            self._products[i] = self._products[i] * MEMORY + weight * feature * seconds
        self._num_noted += 1
        self._has_prompt = self._has_prompt or size.has_prompts
        self._is_stale = True

    def seconds(self, size: StepSize) -> float:
        return sum(one * feature for one, feature in zip(self._fitted(), _features(size), strict=True))

    def tokens_in(self, seconds: float, start: int) -> int:
        """Return how many tokens of a prompt, from `start` on, fit into `seconds` beside what they cost together
        (`prompts_s`): each attends to one token more than the last."""
        if seconds <= 0.0:
            return 0
        token_s, more_s = self.token_s(start), self._fitted()[PAIRS] / SCALES[PAIRS]
        # They take n · token_s + n² / 2 · more_s.
        return int(2.0 * seconds / (token_s + math.sqrt(token_s**2 + 2.0 * more_s * seconds)))

    def token_s(self, start: int = 0) -> float:
        """Return the seconds of one more prompt token with `start` tokens before it."""
        fit = self._fitted()
        return max(LEAST_S, fit[TOKENS] / SCALES[TOKENS] + start * fit[PAIRS] / SCALES[PAIRS])

    def prompts_s(self, start: int) -> float:
        """Return the extra seconds of a step that computes a prompt from `start` on, however few tokens."""
        fit = self._fitted()
        return fit[PROMPTS] / SCALES[PROMPTS] + start * fit[CONTEXT] / SCALES[CONTEXT]

    def cost_s(self, num_tokens: int, start: int, num_rows: int) -> float:
        """Return the seconds of a row with so many tokens from `start` on, and its part of what so many rows share."""
        fit = self._fitted()
        tokens_s = num_tokens * (self.token_s(start) if num_tokens > 1 else fit[TOKENS] / SCALES[TOKENS])
        read_s = (start + num_tokens) * fit[CONTEXT] / SCALES[CONTEXT]
        return tokens_s + read_s + fit[BASE] / max(1, num_rows) + fit[SAMPLES] / SCALES[SAMPLES]

    def _fitted(self) -> list[float]:
        """The coefficients: least squares among numbers that are not negative, one after another, from the last ones
        on. What a lone feature can explain is explained by tokens first."""
        if self._is_stale:
            self._is_stale = False
            fit, squares = self._fit, self._squares
            for _ in range(NUM_SWEEPS):
                for i, row in enumerate(squares):
                    if row[i] > 0.0:
                        others = sum(map(mul, row, fit)) - row[i] * fit[i]
                        fit[i] = max(0.0, (self._products[i] - others) / (row[i] * (1.0 + RIDGES[i])))
        return self._fit


def _features(size: StepSize) -> tuple[float, ...]:
    tokens, base, samples, context, pairs, prompts = SCALES
    has_prompts = prompts if size.has_prompts else 0.0
    counted = (size.tokens / tokens, base, size.samples / samples, size.context / context, size.pairs / pairs)
    return (*counted, has_prompts)
