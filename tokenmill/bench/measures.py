"""Statistics of benchmarks: percentiles, spread, confidence intervals.

A percentile is the nearest-rank one (a value of the sample), so p99 of 50 requests is the worst of them, not an average
of two. Confidence intervals come from the bootstrap: the sample is resampled with replacement a few hundred times, and
the middle 95 % of the resampled statistics is the interval. Resampling is seeded: same sample, same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 75, 90, 95, 99)
BOOTSTRAP_ROUNDS = 400
MAX_BOOTSTRAP_SAMPLE = 20_000  # beyond this the interval is narrower than the noise
CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """Statistics of one measured quantity over many requests or steps."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def summarize(values: Sequence[float] | Floats) -> Summary | None:
    """Return the statistics of a sample; None if it is empty."""
    sample = np.sort(np.asarray(values, dtype=np.float64))
    if sample.size == 0:
        return None
    ranks = {f"p{p}": percentile_of_sorted(sample, p) for p in PERCENTILES}
    return Summary(
        count=int(sample.size),
        mean=float(sample.mean()),
        std=float(sample.std(ddof=1)) if sample.size > 1 else 0.0,
        min=float(sample[0]),
        max=float(sample[-1]),
        **ranks,
    )


def percentile(values: Sequence[float] | Floats, p: float) -> float:
    """Return the nearest-rank percentile; NaN for an empty sample."""
    sample = np.sort(np.asarray(values, dtype=np.float64))
    return percentile_of_sorted(sample, p) if sample.size else math.nan


def percentile_of_sorted(sample: Floats, p: float) -> float:
    rank = max(1, math.ceil(round(p * sample.size / 100, 6)))  # 99.9 % of 1000 are 999, not a little more
    return float(sample[rank - 1])


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return float(np.median(np.asarray(values, dtype=np.float64))) if len(values) else math.nan


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def bootstrap(
    values: Sequence[float] | Floats, statistic: Callable[[Floats], float], *, seed: int = 0
) -> Interval | None:
    """Return the confidence interval of a statistic; None for fewer than two values."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size < 2:
        return None
    rng = np.random.default_rng(seed)
    size = min(sample.size, MAX_BOOTSTRAP_SAMPLE)
    found = [statistic(sample[rng.integers(0, sample.size, size)]) for _ in range(_rounds(sample.size))]
    tail = (1 - CONFIDENCE) / 2 * 100
    return Interval(percentile(found, tail), percentile(found, 100 - tail))


def _rounds(size: int) -> int:
    """Return the number of resamplings: fewer for large samples, whose intervals are narrow and smooth."""
    return BOOTSTRAP_ROUNDS if size <= 2000 else BOOTSTRAP_ROUNDS // 4


@dataclass(frozen=True)
class Spread:
    """A figure measured in several rounds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    low, high = (float(q) for q in np.percentile(np.asarray(values, dtype=np.float64), (25, 75)))
    return Spread(median(values), low, high, len(values))
