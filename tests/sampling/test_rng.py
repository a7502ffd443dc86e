"""The counter-based random numbers: uniform, independent of each other, and defined for every seed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.support import plain_sampler as plain
from tokenmill.params import INT64_MAX, INT64_MIN
from tokenmill.sampling.rng import DRAW, XTC, uniform


@pytest.mark.parametrize("along", ["counter", "seed"])
def test_uniform_in_every_direction(along: str) -> None:
    points = [uniform(11, i) if along == "counter" else uniform(i, 3) for i in range(20000)]
    buckets = Counter(int(u * 64) for u in points)
    value, freedom = plain.chi_square(buckets, [1 / 64] * 64)
    assert value < plain.chi_square_limit(freedom)
    neighbours = Counter(int(a * 8) * 8 + int(b * 8) for a, b in itertools.pairwise(points))
    value, freedom = plain.chi_square(neighbours, [1 / 64] * 64)
    assert value < plain.chi_square_limit(freedom)


def test_edge_seeds_differ_and_repeat() -> None:
    seeds = [INT64_MIN, INT64_MIN + 1, -1, 0, 1, INT64_MAX - 1, INT64_MAX]
    values = [uniform(seed, index) for seed in seeds for index in range(3)]
    assert values == [uniform(seed, index) for seed in seeds for index in range(3)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)


def test_purposes_are_separate_streams() -> None:
    assert uniform(5, 9, DRAW) != uniform(5, 9, XTC)
