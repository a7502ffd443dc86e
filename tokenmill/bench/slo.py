"""Limits on latency, in words: `ttft_p95=1s,tpot_p95=100ms` for a run, `ttft=1s,tpot=100ms` for a single request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.bench.measures import percentile
from tokenmill.bench.request_records import BenchRecord
from tokenmill.errors import InvalidConfig

METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Limit:
    metric: str
    percentile: float | None  # None: the mean
    limit_s: float

    def __str__(self) -> str:
        of = f"p{self.percentile:g}" if self.percentile is not None else "mean"
        return f"{self.metric}_{of}={self.limit_s * 1e3:g}ms"

    def measured(self, records: Sequence[BenchRecord]) -> float:
        values = metric_values(records, self.metric)
        if not values:
            return math.nan
        return float(np.mean(values)) if self.percentile is None else percentile(values, self.percentile)


def parse_limits(text: str) -> list[Limit]:
    """Read limits of a whole run; one without a statistic is of the 95th percentile."""
    limits = []
    for name, value in _pairs(text):
        metric, _, of = name.partition("_")
        if metric not in METRICS:
            raise InvalidConfig(f"{name!r} is no limit; it begins with one of {', '.join(METRICS)}", param="slo")
        limits.append(Limit(metric, _percentile(of or "p95", name), parse_seconds(value)))
    if not limits:
        raise InvalidConfig("no limit is given; write ttft_p95=1s,tpot_p95=100ms", param="slo")
    return limits


def _percentile(of: str, name: str) -> float | None:
    if of == "mean":
        return None
    try:
        value = float(of.removeprefix("p"))
    except ValueError:
        value = math.nan
    if not of.startswith("p") or not 0 < value <= 100:
        raise InvalidConfig(f"{name!r} is no limit; write ttft_p95 or ttft_mean", param="slo")
    return value


def parse_goodput(text: str) -> dict[str, float]:
    """Read limits of each single request: metric → seconds."""
    limits = {}
    for name, value in _pairs(text):
        if name not in METRICS:
            raise InvalidConfig(f"{name!r} is no limit of a request; write ttft=1s,tpot=100ms", param="goodput")
        limits[name] = parse_seconds(value)
    return limits


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, found, value = part.partition("=")
        if not found:
            raise InvalidConfig(f"{part!r} is no limit; write ttft_p95=1s", param="slo")
        pairs.append((name.strip().lower(), value))
    return pairs


def parse_seconds(text: str) -> float:
    """`1s`, `250ms`, `0.25`"""
    number, scale = text.strip(), 1.0
    if number.endswith("ms"):
        number, scale = number[:-2], 1e-3
    elif number.endswith("s"):
        number = number[:-1]
    try:
        seconds = float(number) * scale
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e6:
        raise InvalidConfig(f"{text!r} is no duration; write 1s or 250ms", param="slo")
    return seconds


def metric_values(records: Sequence[BenchRecord], metric: str) -> list[float]:
    done = [record for record in records if record.is_ok]
    match metric:
        case "ttft":
            return [record.ttft_s for record in done]
        case "e2e":
            return [record.e2e_s for record in done]
        case "tpot":
            return [tpot for record in done if (tpot := record.tpot_s) is not None]
        case _:
            return [float(gap) for record in done for gap in record.gaps_s]


def meets(record: BenchRecord, limits: dict[str, float]) -> bool:
    if not record.is_ok:
        return False
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    worst_gap = float(record.gaps_s.max()) if len(record.times_s) > 1 else 0.0
    return all({**values, "itl": worst_gap}[metric] <= limit for metric, limit in limits.items())
