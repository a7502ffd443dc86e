"""The largest load a server holds within limits: doubling until it fails, halving the gap, repeating near the edge.

    level   1 ✓  2 ✓  4 ✓  8 ✓  16 ✓  32 ✓  64 ✗ │ 48 ✗  40 ✗  36 ✓  38 ✗  37 ✓ │ 37 ✓✓  38 ✗✗   → 37

Where the first level fails already, levels are halved until one passes. A level is a concurrency (closed loop) or an
arrival rate (open loop). It passes when the percentiles are within the limits, nearly nothing failed, and the run was
steady: a queue that grows will break any limit if only one waits, so growth is failure even while the percentiles still
pass. Close to the edge single trials are luck; there each level is tried several times and the majority counts. Trials
are kept in a file, so a search can be resumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.bench.measures import median
from tokenmill.bench.records import Record
from tokenmill.bench.slo import Limit
from tokenmill.errors import InvalidConfig

MAX_FAILED_SHARE = 0.01
GROWTH = 1.5  # TTFT of the last quarter against the second
MIN_FOR_GROWTH = 24


@dataclass(frozen=True)
class Trial:
    level: float
    passed: bool
    measured: dict[str, float]  # each limit's figure, seconds
    reason: str  # why it failed; empty when it passed
    requests: int = 0
    output_tok_s: float = 0.0
    requests_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    best: float | None  # None: not even the lowest level passes
    first_failing: float | None  # None: every level up to the highest allowed passes
    confidence: float  # that the edge lies between the two
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class SearchSettings:
    start: float = 1
    most: float = 4096
    repeats: int = 3
    is_whole: bool = True  # levels are whole numbers
    resolution: float = 0.05  # of a rate: neighbours closer than this share are one level

    @property
    def lowest(self) -> float:
        return 1 if self.is_whole else self.start / 64

    def between(self, low: float, high: float) -> float | None:
        """A level in the middle; None when the two are neighbours."""
        if self.is_whole:
            return (low + high) // 2 if high - low > 1 else None
        return (low + high) / 2 if high / low > 1 + self.resolution else None


Try = Callable[[float], Trial]


def judge(level: float, records: Sequence[Record], limits: Sequence[Limit], rates: dict[str, float]) -> Trial:
    """Whether one run holds the limits."""
    measured = {str(limit): limit.measured(records) for limit in limits}
    return Trial(level, not (why := _why_failed(records, limits, measured)), measured, why, len(records), **rates)


def _why_failed(records: Sequence[Record], limits: Sequence[Limit], measured: dict[str, float]) -> str:
    failed = sum(not record.is_ok for record in records)
    if failed > MAX_FAILED_SHARE * len(records):
        kinds = sorted({record.error or "empty" for record in records if not record.is_ok})
        return f"{failed} of {len(records)} requests failed ({', '.join(kinds)})"
    for limit in limits:
        found = measured[str(limit)]
        if not found <= limit.limit_s:
            return f"{limit} is {found * 1e3:.1f} ms"
    tightest = min((limit.limit_s for limit in limits if limit.metric == "ttft"), default=math.inf)
    return "the queue grows" if queue_grows(records, tightest) else ""


def queue_grows(records: Sequence[Record], limit_s: float = math.inf) -> bool:
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
    """Finds the edge. `known` trials of an earlier search are used before new ones are made."""
    log = _Log(try_level, settings, list(known))
    low, high = _double(log, settings)
    if low is None:
        return Verdict(None, high, log.confidence(None, high), log.trials)
    if high is None:
        return Verdict(low, None, log.confidence(low, None), log.trials)
    low, high = _halve(log, settings, low, high)
    return Verdict(low or None, high, log.confidence(low or None, high), log.trials)


def _double(log: _Log, settings: SearchSettings) -> tuple[float | None, float | None]:
    low, level = None, settings.start
    while log.passes_once(level):
        low = level
        if level >= settings.most:
            return low, None
        level = min(level * 2, settings.most)
    return (low, level) if low is not None else _go_down(log, settings, level)


def _go_down(log: _Log, settings: SearchSettings, failing: float) -> tuple[float | None, float | None]:
    """From a first level that failed to one that passes; the lowest of all is not given up after one unlucky trial."""
    while failing > settings.lowest:
        level = max(failing // 2 if settings.is_whole else failing / 2, settings.lowest)
        if log.passes_once(level):
            return level, failing
        failing = level
    return (failing, failing * 2) if log.passes_repeatedly(failing) else (None, failing)


def _halve(log: _Log, settings: SearchSettings, low: float, high: float) -> tuple[float, float]:
    """Narrows the gap; once it is closed both ends must stand up to repeats, else the gap moves."""
    while True:
        middle = settings.between(low, high)
        if middle is not None:
            low, high = (middle, high) if log.passes_once(middle) else (low, middle)
        elif not log.passes_repeatedly(low):
            below = [level for level in log.levels() if level < low]
            if not below:
                return 0.0, low
            low, high = max(below), low
        elif log.passes_repeatedly(high):
            if high >= settings.most:
                return high, high
            above = [level for level in log.levels() if level > high]
            low, high = high, min(above, default=min(high * 2, settings.most))
        else:
            return low, high


class _Log:
    """All trials, and what they say about a level."""

    def __init__(self, try_level: Try, settings: SearchSettings, trials: list[Trial]) -> None:
        self._try, self._settings, self.trials = try_level, settings, trials

    def levels(self) -> list[float]:
        return sorted({trial.level for trial in self.trials})

    def passes_once(self, level: float) -> bool:
        if not self._at(level):
            self._make(level)
        return self._majority(level)

    def passes_repeatedly(self, level: float) -> bool:
        """Up to `repeats` trials, fewer when the majority can't change any more."""
        while len(self._at(level)) < self._settings.repeats and not self._is_settled(level):
            self._make(level)
        return self._majority(level)

    def confidence(self, best: float | None, failing: float | None) -> float:
        """That the best level passes more often than not, and the next one does not."""
        sure = 1.0
        if best is not None:
            passed, failed = self._counts(best)
            sure *= more_often_than_not(passed, failed)
        if failing is not None:
            passed, failed = self._counts(failing)
            sure *= more_often_than_not(failed, passed)
        return sure

    def _make(self, level: float) -> None:
        self.trials.append(self._try(level))

    def _at(self, level: float) -> list[Trial]:
        return [trial for trial in self.trials if trial.level == level]

    def _counts(self, level: float) -> tuple[int, int]:
        passed = sum(trial.passed for trial in self._at(level))
        return passed, len(self._at(level)) - passed

    def _majority(self, level: float) -> bool:
        passed, failed = self._counts(level)
        return passed > failed

    def _is_settled(self, level: float) -> bool:
        return max(self._counts(level)) > self._settings.repeats / 2


def more_often_than_not(yes: int, no: int) -> float:
    """The chance that something which happened `yes` times and failed to `no` times has a rate above one half (uniform
    prior; the tail of a Beta distribution, which for whole numbers is a sum of binomials)."""
    n = yes + no + 1
    return sum(math.comb(n, j) for j in range(yes + 1)) / float(2**n)


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
