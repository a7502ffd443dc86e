"""Histograms for values that come with every token or every step, where the client library's would take too long.

Adding a value is one look into the bounds and one increment. A histogram lives as long as its model's series, and is
read when Prometheus asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class LiveHistogram:
    """Counts of values per bucket, and their sum; the last bucket is for values above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_counts(self, counts: Sequence[int], total: float) -> None:
        """Add values that somebody else has put into the same buckets."""
        self.counts = [one + more for one, more in zip(self.counts, counts, strict=True)]
        self.total += total


class LiveFamily(Collector):
    """The histograms of one name, by model."""

    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._by_model: dict[str, LiveHistogram] = {}

    def of(self, model: str) -> LiveHistogram:
        return self._by_model.setdefault(model, LiveHistogram(self._bounds))

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._about, labels=["model"])]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=["model"])
        for model, histogram in self._by_model.items():
            bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
            total, buckets = 0, []
            for bound, count in zip(bounds, histogram.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric([model], buckets, histogram.total)
        return [family]
