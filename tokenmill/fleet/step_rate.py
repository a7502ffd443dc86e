"""Step times of cores, fitted to their reports: seconds = steps × overhead + tokens × seconds per token.

The two unknowns are fitted by least squares over the reports of all cores together, old ones fading: one core's own
reports often are steps of nearly one size, which say little about the share of each. Each core has a factor: how much
longer its steps took than the common fit predicts. Measurements of equal cores differ by chance, and a difference would
direct requests to one of them; so cores whose factors are near one are treated as equal, as is a core that has not
reported yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenmill.engine.status import EngineStats

FADING = 0.98  # weight that a report keeps with each new one
GUESSED_TOKEN_S = 1e-4
RIDGE = 1e-9
ALIKE = 1.5  # the factor by which the figures of like cores may differ


class StepSeconds(NamedTuple):
    """Seconds of a step, and of each token in it."""

    step_s: float
    token_s: float


class StepRate:
    """The step times that one core has reported."""

    def __init__(self) -> None:
        self.is_known = False
        self.steps = self.tokens = self.seconds = 0.0  # fading, as the sums of their products are
        self.ss = self.st = self.tt = self.sy = self.ty = 0.0  # steps, tokens, seconds (y)
        self._last = EngineStats()

    def forget_core(self) -> None:
        """Expect totals from zero in the next report, because the core was restarted; what was learned stays."""
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> float:
        """Learn from a report of totals, and return the seconds of work since the last one."""
        steps, tokens = stats.steps - self._last.steps, stats.step_tokens - self._last.step_tokens
        seconds = stats.busy_s - self._last.busy_s
        self._last = stats
        if steps <= 0 or tokens <= 0 or seconds <= 0:
            return max(0.0, seconds)
        self.steps = self.steps * FADING + steps
        self.tokens = self.tokens * FADING + tokens
        self.seconds = self.seconds * FADING + seconds
        self.ss = self.ss * FADING + steps * steps
        self.st = self.st * FADING + steps * tokens
        self.tt = self.tt * FADING + tokens * tokens
        self.sy = self.sy * FADING + steps * seconds
        self.ty = self.ty * FADING + tokens * seconds
        self.is_known = True
        return seconds


def usual_rate(rates: Sequence[StepRate]) -> StepSeconds:
    """Fit the step time of all cores together."""
    known = [rate for rate in rates if rate.is_known]
    if not known:
        return StepSeconds(0.0, GUESSED_TOKEN_S)
    ss, st, tt = (sum(getattr(rate, name) for rate in known) for name in ("ss", "st", "tt"))
    sy, ty = sum(rate.sy for rate in known), sum(rate.ty for rate in known)
    determinant = ss * tt - st * st
    if determinant > RIDGE * ss * tt:
        step_s, token_s = (sy * tt - ty * st) / determinant, (ty * ss - sy * st) / determinant
        if step_s >= 0 and token_s > 0:
            return StepSeconds(step_s, token_s)
    return StepSeconds(0.0, ty / tt)  # all steps had the same size, or noise has won


def common_rates(rates: Sequence[StepRate]) -> list[StepSeconds]:
    """The rate to predict with for each core: the usual one, unless this core is clearly faster or slower."""
    usual = usual_rate(rates)
    return [_own_rate(rate, usual) if rate.is_known else usual for rate in rates]


def _own_rate(rate: StepRate, usual: StepSeconds) -> StepSeconds:
    factor = rate.seconds / (rate.steps * usual.step_s + rate.tokens * usual.token_s)
    if 1 / ALIKE <= factor <= ALIKE:
        return usual
    return StepSeconds(usual.step_s * factor, usual.token_s * factor)
