"""Step times of cores, fitted to their reports: seconds = steps × overhead + tokens × seconds per token.

The two coefficients are fitted by least squares over the reports of all cores, with decaying weights: the reports of a
single core are often of steps of nearly the same size, which do not determine both. Each core has a factor: how much
longer its steps took than the common fit predicts. Measurements of equal cores differ by chance, and such a difference
would direct requests to one of them; so cores whose factors are near 1 are treated as equal, as is a core that has not
reported yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenmill.engine.status import EngineStats

DECAY = 0.98  # weight that a report keeps with each new one
DEFAULT_TOKEN_S = 1e-4
RIDGE = 1e-9
MAX_EQUAL_FACTOR = 1.5  # cores whose measurements differ by at most this factor are treated as equal


class StepSeconds(NamedTuple):
    """Seconds of a step, and of each token in it."""

    step_s: float
    token_s: float


class StepRate:
    """The step times that one core has reported."""

    def __init__(self) -> None:
        self.is_known = False
        self.steps = self.tokens = self.seconds = 0.0  # decaying sums, like those of the products below
        self.ss = self.st = self.tt = self.sy = self.ty = 0.0  # steps, tokens, seconds (y)
        self._last = EngineStats()

    def forget_core(self) -> None:
        """Expect totals from zero in the next report, because the core was restarted; the fit is kept."""
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> float:
        """Update the sums with a report of totals; return the seconds of work since the previous report."""
        steps, tokens = stats.steps - self._last.steps, stats.step_tokens - self._last.step_tokens
        seconds = stats.busy_s - self._last.busy_s
        self._last = stats
        if steps <= 0 or tokens <= 0 or seconds <= 0:
            return max(0.0, seconds)
        self.steps = self.steps * DECAY + steps
        self.tokens = self.tokens * DECAY + tokens
        self.seconds = self.seconds * DECAY + seconds
        self.ss = self.ss * DECAY + steps * steps
        self.st = self.st * DECAY + steps * tokens
        self.tt = self.tt * DECAY + tokens * tokens
        self.sy = self.sy * DECAY + steps * seconds
        self.ty = self.ty * DECAY + tokens * seconds
        self.is_known = True
        return seconds


def usual_rate(rates: Sequence[StepRate]) -> StepSeconds:
    """Fit the step time of all cores together."""
    known = [rate for rate in rates if rate.is_known]
    if not known:
        return StepSeconds(0.0, DEFAULT_TOKEN_S)
    ss, st, tt = (sum(getattr(rate, name) for rate in known) for name in ("ss", "st", "tt"))
    sy, ty = sum(rate.sy for rate in known), sum(rate.ty for rate in known)
    determinant = ss * tt - st * st
    if determinant > RIDGE * ss * tt:
        step_s, token_s = (sy * tt - ty * st) / determinant, (ty * ss - sy * st) / determinant
        if step_s >= 0 and token_s > 0:
            return StepSeconds(step_s, token_s)
    return StepSeconds(0.0, ty / tt)  # all steps had the same size, or the fit is invalid because of noise


def common_rates(rates: Sequence[StepRate]) -> list[StepSeconds]:
    """Return the rate for predictions for each core: the common one, unless the core is clearly faster or slower."""
    usual = usual_rate(rates)
    return [_own_rate(rate, usual) if rate.is_known else usual for rate in rates]


def _own_rate(rate: StepRate, usual: StepSeconds) -> StepSeconds:
    factor = rate.seconds / (rate.steps * usual.step_s + rate.tokens * usual.token_s)
    if 1 / MAX_EQUAL_FACTOR <= factor <= MAX_EQUAL_FACTOR:
        return usual
    return StepSeconds(usual.step_s * factor, usual.token_s * factor)
