from __future__ import annotations

import numpy as np
import pytest

from tokenmill.bench.measures import bootstrap, median, percentile, spread, summarize


def test_percentiles_are_values_that_occurred() -> None:
    values = list(range(1, 101))
    summary = summarize(values[::-1])
    assert summary is not None
    assert (summary.p50, summary.p75, summary.p90, summary.p95, summary.p99) == (50, 75, 90, 95, 99)
    assert (summary.min, summary.max, summary.count) == (1, 100, 100)
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.std == pytest.approx(np.std(values, ddof=1))


def test_p99_of_few_values_is_the_worst() -> None:
    assert percentile([1.0, 2.0, 50.0], 99) == 50.0
    assert [percentile(range(1, n + 1), 99.9) for n in (999, 1000, 1001, 3000)] == [999, 999, 1000, 2997]
    assert summarize([]) is None


def test_bootstrap_covers_the_true_mean_and_is_repeatable() -> None:
    drawing = np.random.default_rng(3)
    covered = 0
    for number in range(60):
        sample = drawing.exponential(2.0, 100)
        found = bootstrap(sample, lambda drawn: float(drawn.mean()), seed=number)
        assert found is not None
        covered += found.low <= 2.0 <= found.high
    assert covered >= 50  # 95 % asked for; a skewed sample of 100 gives a little less
    again = [bootstrap(sample, lambda drawn: float(drawn.mean()), seed=7) for _ in range(2)]
    assert again[0] == again[1]


def test_spread_has_quartiles_around_the_median() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.median, found.low, found.high) == (3.0, 2.0, 4.0)
    assert median([]) != median([])
