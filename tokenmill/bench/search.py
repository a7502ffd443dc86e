"""Search for the largest load that a server holds within limits: double until it fails, bisect, then repeat near the
edge.

    level   1 ✓  2 ✓  4 ✓  8 ✓  16 ✓  32 ✓  64 ✗ │ 48 ✗  40 ✗  36 ✓  38 ✗  37 ✓ │ 38 ✗  37 ✓  36 ✓  38 ✗   → 37

Where the first level fails already, levels are halved until one passes. A level is a concurrency (closed loop) or an
arrival rate (open loop). It passes when the percentiles are within the limits, nearly nothing failed, and the run was
steady: a growing queue breaks any limit sooner or later, so growth counts as failure even while the percentiles still
pass. Close to the edge single trials are random, so the last part weighs all trials together (`Belief`) and continues
until the edge is certain enough. Trials are kept in a file, so a search can be resumed.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.bench.measures import Floats, median
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.totals import Limit
from tokenmill.errors import InvalidConfig

Outcome = tuple[float, bool]  # level, whether it passed

STEP = 0.006  # step of the grid in log(level)
WIDTHS = np.array([0.003, 0.006, 0.012, 0.025, 0.04, 0.06, 0.09, 0.13, 0.18, 0.25])
LAPSE_RATE = 0.01
MARGIN = 1.5  # the edge may be outside of the allowed levels by this factor


@dataclass(frozen=True)
class Belief:
    """Posterior distribution of the capacity limit (edge): candidate levels and their probabilities.

    More load is never easier, so apart from noise there is one edge: levels below it pass, levels above it fail, and
    close to it a single trial is random (a machine that was slow or fast for some seconds). Neither the edge nor the
    width of that noise is known; both are inferred from the trials, on a grid, with Bayes' rule:

        P(a level passes) = logistic(log(edge / level) / width), and one trial in a hundred fails for other reasons

        level      30   36   40   44   48   52   60
        trials     ✓✓   ✓✓   ✓✗   ✓✓   ✗✓   ✗✗   ✗        edge likely 44 to 48, with width 0.1

    A server whose trials agree needs few of them; where they contradict each other, more are needed. (Counting
    majorities, or resampling the trials, is overconfident: a search that stops when it looks certain stops at a lucky
    moment.)
    """

    edges: Floats
    probs: Floats

    def quantile(self, share: float) -> float:
        index = int(np.searchsorted(np.cumsum(self.probs), share))
        return float(self.edges[min(index, len(self.edges) - 1)])

    def between(self, low: float, high: float) -> float:
        return float(self.probs[(self.edges >= low) & (self.edges < high)].sum())

    def sample(self, rng: random.Random) -> float:
        return self.quantile(rng.random())


def belief_of(outcomes: Sequence[Outcome], lowest: float, most: float) -> Belief:
    """Return the posterior after these trials; the prior is uniform over log(edge) and over the widths."""
    logs = np.arange(np.log(lowest / MARGIN), np.log(most * MARGIN), STEP)
    likelihood = np.zeros((len(WIDTHS), len(logs)))
    for (level, passed), times in Counter(outcomes).items():
        distance = (logs - np.log(level)) / WIDTHS[:, None]
        chance = 0.5 * (1 + np.tanh(distance / 2))  # the logistic function, without overflow
        chance = LAPSE_RATE + (1 - 2 * LAPSE_RATE) * chance
        likelihood += times * np.log(chance if passed else 1 - chance)
    weights = np.exp(likelihood - likelihood.max()).sum(axis=0)
    return Belief(np.exp(logs), weights / weights.sum())


MAX_FAILED_SHARE = 0.01
GROWTH = 1.5  # TTFT of the last quarter against the second
MIN_FOR_GROWTH = 24
ONE_PIECE = "ask for more tokens, or limit ttft or e2e"


@dataclass(frozen=True)
class Trial:
    level: float
    passed: bool
    measured: dict[str, float]  # each limit's figure, seconds
    reason: str  # why it failed; empty when it passed
    requests: int = 0
    output_tok_s: float = 0.0
    requests_s: float = 0.0
    ended_s: float = 0.0  # seconds since the epoch; 0: not known


@dataclass(frozen=True)
class Verdict:
    best: float | None  # None: not even the lowest level passes
    first_failing: float | None  # None: every level up to the highest allowed passes
    confidence: float  # probability that the edge is within the resolution of `best`
    likely: tuple[float, float]  # the edge lies here in 9 of 10 cases
    trials: list[Trial] = field(default_factory=list)
    was_cut_short: bool = False  # interrupted before it was certain


@dataclass(frozen=True)
class SearchSettings:
    start: float = 1
    most: float = 4096
    confidence: float = 0.9  # the search ends at this probability of the edge
    most_trials: int = 60  # or after so many trials
    is_whole: bool = True  # levels are integers
    noisy_s: float = 0.0  # minimum duration where trials contradict each other
    resolution: float = 0.05  # an edge this share off is the same; so are neighbouring integers

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise InvalidConfig(f"a confidence of {self.confidence:g}; it lies between 0 and 1", param="confidence")
        if self.most_trials < 1:
            raise InvalidConfig(f"{self.most_trials} trials; at least one is needed", param="trials")
        if self.start > self.most:
            raise InvalidConfig(f"the first level, {self.start:g}, lies above the highest, {self.most:g}", param="most")
        if self.is_whole and not (self.start >= 1 and self.start == int(self.start)):
            raise InvalidConfig(f"a concurrency of {self.start:g}; it is an integer", param="start")
        if self.is_whole and self.most != int(self.most):
            raise InvalidConfig(f"a concurrency of {self.most:g}; it is an integer", param="most")

    @property
    def lowest(self) -> float:
        return 1 if self.is_whole else self.start / 64

    def between(self, low: float, high: float) -> float | None:
        """A level in the middle; None when the two are neighbours."""
        if self.is_whole:
            return (low + high) // 2 if high - low > 1 else None
        return (low + high) / 2 if high / low > 1 + self.resolution else None

    def level(self, edge: float) -> float:
        """The highest level that an edge holds."""
        return float(math.floor(edge)) if self.is_whole else float(f"{edge:.3g}")

    def same(self, edge: float) -> tuple[float, float]:
        """Return the range of limits that count as the same as this one."""
        level = self.level(edge)
        if not self.is_whole:
            return level * (1 - self.resolution), level * (1 + self.resolution)
        give = max(1, math.floor(self.resolution * level))
        return level - give, level + give + 1


Try = Callable[[float], Trial]


def judge(level: float, records: Sequence[BenchRecord], limits: Sequence[Limit], rates: dict[str, float]) -> Trial:
    """Compare one run with the limits; the trial says whether it holds them."""
    measured = {str(limit): limit.measured(records) for limit in limits}
    return Trial(level, not (why := _why_failed(records, limits, measured)), measured, why, len(records), **rates)


def _why_failed(records: Sequence[BenchRecord], limits: Sequence[Limit], measured: dict[str, float]) -> str:
    if not records:
        raise InvalidConfig("no request came within a trial", param="trial_s", hint="a longer --trial-s")
    failed = sum(not record.is_ok for record in records)
    if failed > MAX_FAILED_SHARE * len(records):
        kinds = sorted({record.error or "empty" for record in records if not record.is_ok})
        return f"{failed} of {len(records)} requests failed ({', '.join(kinds)})"
    for limit in limits:
        found = measured[str(limit)]
        if math.isnan(found):  # no level would tell more
            raise InvalidConfig(f"{limit.metric} has no values: answers come in one piece", param="slo", hint=ONE_PIECE)
        if found > limit.limit_s:
            return f"{limit} is {found * 1e3:.1f} ms"
    tightest = min((limit.limit_s for limit in limits if limit.metric == "ttft"), default=math.inf)
    return "the queue grows" if queue_grows(records, tightest) else ""


def queue_grows(records: Sequence[BenchRecord], limit_s: float = math.inf) -> bool:
    """Waiting gets longer and longer: the median TTFT of the last quarter is well above that of the second, by an
    amount that matters, and the third lies between them. The first quarter is a start, not a state."""
    done = sorted((record for record in records if record.is_ok), key=lambda record: record.sent_s)
    if len(done) < MIN_FOR_GROWTH:
        return False
    quarter = len(done) // 4
    second, third, last = (
        median([record.ttft_s for record in done[n * quarter : (n + 1) * quarter]]) for n in (1, 2, 3)
    )
    matters = 0.1 * limit_s if math.isfinite(limit_s) else second
    return second < third < last and last > GROWTH * second and last - second > matters


def search(try_level: Try, settings: SearchSettings, known: Sequence[Trial] = ()) -> Verdict:
    """Finds the edge. `known` trials of an earlier search are used before new ones are made. Interrupted, it says what
    is believed by then."""
    log = _Log(try_level, settings, list(known))
    try:
        _find(log, settings)
    except KeyboardInterrupt:
        if not log.trials:
            raise
        return replace(log.verdict_so_far(log.belief()), was_cut_short=True)
    return log.verdict(log.belief())


def _find(log: _Log, settings: SearchSettings) -> None:
    low, high = _double(log, settings)
    if low is not None and high is not None:
        _halve(log, settings, low, high)
    while log.has_room and not log.is_done(believed := log.belief()):
        log.make(log.level_in_doubt(believed))


def _double(log: _Log, settings: SearchSettings) -> tuple[float | None, float | None]:
    low, level = None, settings.start
    while log.passes(level):
        low = level
        if level >= settings.most:
            return low, None
        level = min(level * 2, settings.most)
    return (low, level) if low is not None else _go_down(log, settings, level)


def _go_down(log: _Log, settings: SearchSettings, failing: float) -> tuple[float | None, float | None]:
    """Search downwards from a first level that failed to one that passes."""
    while failing > settings.lowest:
        level = max(failing // 2 if settings.is_whole else failing / 2, settings.lowest)
        if log.passes(level):
            return level, failing
        failing = level
    return None, failing


def _halve(log: _Log, settings: SearchSettings, low: float, high: float) -> None:
    while (middle := settings.between(low, high)) is not None:
        low, high = (middle, high) if log.passes(middle) else (low, middle)


class _Log:
    """All trials, and the belief about the limit that follows from them."""

    def __init__(self, try_level: Try, settings: SearchSettings, trials: list[Trial]) -> None:
        self._try, self._settings, self.trials = try_level, settings, trials
        self._drawing = random.Random(len(trials))

    def make(self, level: float) -> None:
        self.trials.append(self._try(level))

    def passes(self, level: float) -> bool:
        """Tell whether a level passes: by its trials, or a first one; by the current belief where no more trials are
        allowed."""
        at = [trial.passed for trial in self.trials if trial.level == level]
        if at:
            return 2 * sum(at) > len(at)
        if not self.has_room:
            return level <= self._middle(self.belief())
        self.make(level)
        return self.trials[-1].passed

    @property
    def has_room(self) -> bool:
        return len(self.trials) < self._settings.most_trials

    def is_done(self, believed: Belief) -> bool:
        """Sure of the edge; and if a level that failed lies below one that passed, not by one phase of the machine:
        what else runs there makes it slow or fast for a minute at a time, and trials of one minute agree too well."""
        highest, lowest = self._highest_passed(), self._lowest_failed()
        ended = [trial.ended_s for trial in self.trials if trial.ended_s]
        is_short = bool(ended) and max(ended) - min(ended) < self._settings.noisy_s
        return self.confidence(believed) >= self._settings.confidence and not (highest >= lowest and is_short)

    def level_in_doubt(self, believed: Belief) -> float:
        """Return the level at which another trial is most informative: a limit sampled from the current belief, so near
        the estimate where trials agree and further away where they do not; of integers the one below or the one above
        it. No further up than twice what passed: a server far beyond its edge takes long to show it."""
        settings = self._settings
        level = settings.level(believed.sample(self._drawing))
        if settings.is_whole:
            level += self._drawing.choice((0, 1))
        passed = self._highest_passed() or settings.lowest
        return min(max(level, settings.lowest), 2 * passed, settings.most)

    def verdict(self, believed: Belief) -> Verdict:
        level = self._settings.level
        best, confidence = level(self._middle(believed)), self.confidence(believed)
        likely = level(believed.quantile(0.05)), level(believed.quantile(0.95))
        if best < self._settings.lowest:
            return Verdict(None, self._settings.lowest, confidence, likely, self.trials)
        if best >= self._settings.most:
            return Verdict(self._settings.most, None, confidence, likely, self.trials)
        above = best + 1 if self._settings.is_whole else best * (1 + self._settings.resolution)
        return Verdict(best, above, confidence, likely, self.trials)

    def verdict_so_far(self, believed: Belief) -> Verdict:
        """Return the verdict after the trials so far. Where all of them ended alike, the limit is bounded on one side
        only, and the verdict is about the last level."""
        highest, lowest = self._highest_passed(), self._lowest_failed()
        if highest and math.isfinite(lowest):
            return self.verdict(believed)
        likely = self._settings.level(believed.quantile(0.05)), self._settings.level(believed.quantile(0.95))
        if highest:
            return Verdict(highest, None, believed.between(highest, math.inf), likely, self.trials)
        return Verdict(None, lowest, believed.between(0.0, lowest), likely, self.trials)

    def belief(self) -> Belief:
        outcomes = [(trial.level, trial.passed) for trial in self.trials]
        return belief_of(outcomes, self._settings.lowest, self._settings.most)

    def confidence(self, believed: Belief) -> float:
        """Return the confidence of a verdict. All limits below the lowest level count as one answer, and all above the
        highest."""
        low, high = self._settings.same(self._middle(believed))
        low = min(low, self._settings.most) if low >= self._settings.lowest else 0.0
        return believed.between(low, high if high < self._settings.most else math.inf)

    def _middle(self, believed: Belief) -> float:
        """The edge to name: as probably too low as too high, and where no trials contradict each other none of them."""
        edge, passed, failed = believed.quantile(0.5), self._highest_passed(), self._lowest_failed()
        return min(max(edge, passed), math.nextafter(failed, 0)) if passed < failed else edge

    def _highest_passed(self) -> float:
        return max((trial.level for trial in self.trials if trial.passed), default=0.0)

    def _lowest_failed(self) -> float:
        return min((trial.level for trial in self.trials if not trial.passed), default=math.inf)


# ── the file of a search ───────────────────────────────────────────────────────────────────────────────


def read_trials(path: Path, settings: dict[str, Any]) -> list[Trial]:
    """Trials of an earlier search with the same settings; none when there is no file yet."""
    if not path.exists():
        return []
    try:
        kept = json.loads(path.read_bytes())
        same = kept["settings"] == json.loads(json.dumps(settings))
        trials = [Trial(**trial) for trial in kept["trials"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InvalidConfig(f"{path} holds no search: {problem}", param="resume") from None
    if not same:
        raise InvalidConfig(f"{path} holds a search with other settings", param="resume", hint="name another file")
    return trials


def write_trials(path: Path, settings: dict[str, Any], trials: Sequence[Trial]) -> None:
    path.write_text(json.dumps({"settings": settings, "trials": [asdict(trial) for trial in trials]}))
