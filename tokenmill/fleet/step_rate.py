"""How long a core's steps take, learned from what it reports: seconds = steps × overhead + tokens × seconds a token.

Two unknowns, fitted by least squares over the reports, old ones fading. What is measured of like cores differs by
chance, and a difference would draw requests to one of them; so cores whose figures are near the middle of all are taken
to be alike, as is one that has not reported yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tokenmill.engine.status import EngineStats

FADING = 0.98  # weight that a report keeps with each new one
GUESSED_TOKEN_S = 1e-4
RIDGE = 1e-9
ALIKE = 1.5  # the factor by which the figures of like cores may differ


class StepRate:
    def __init__(self) -> None:
        self.step_s = 0.0
        self.token_s = GUESSED_TOKEN_S
        self.is_known = False
        self._last = EngineStats()
        self._ss = self._st = self._tt = self._sy = self._ty = 0.0

    def forget_core(self) -> None:
        """The totals of the next report begin at zero; what was learned stays."""
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> float:
        """Learn from a report of totals; the seconds of work since the last one."""
        steps, tokens = stats.steps - self._last.steps, stats.step_tokens - self._last.step_tokens
        seconds = stats.busy_s - self._last.busy_s
        self._last = stats
        if steps <= 0 or tokens <= 0 or seconds <= 0:
            return max(0.0, seconds)
        self._ss = self._ss * FADING + steps * steps
        self._st = self._st * FADING + steps * tokens
        self._tt = self._tt * FADING + tokens * tokens
        self._sy = self._sy * FADING + steps * seconds
        self._ty = self._ty * FADING + tokens * seconds
        self.is_known = True
        self._fit()
        return seconds

    def _fit(self) -> None:
        determinant = self._ss * self._tt - self._st * self._st
        if determinant > RIDGE * self._ss * self._tt:
            step_s = (self._sy * self._tt - self._ty * self._st) / determinant
            token_s = (self._ty * self._ss - self._sy * self._st) / determinant
            if step_s >= 0 and token_s > 0:
                self.step_s, self.token_s = step_s, token_s
                return
        self.step_s, self.token_s = 0.0, self._ty / self._tt  # all steps had the same size, or noise has won


class StepSeconds(NamedTuple):
    """What a step takes, and each token in it."""

    step_s: float
    token_s: float


def usual_rate(rates: Sequence[StepRate]) -> StepSeconds:
    """The rate in the middle of those that are known."""
    known = [rate for rate in rates if rate.is_known] or list(rates)
    return StepSeconds(median(rate.step_s for rate in known), median(rate.token_s for rate in known))


def common_rates(rates: Sequence[StepRate]) -> list[StepSeconds]:
    """The rate to predict with for each core: that of the middle one, unless its own is clearly another."""
    usual = usual_rate(rates)
    return [
        usual
        if not rate.is_known or usual.token_s / ALIKE <= rate.token_s <= usual.token_s * ALIKE
        else StepSeconds(rate.step_s, rate.token_s)
        for rate in rates
    ]
