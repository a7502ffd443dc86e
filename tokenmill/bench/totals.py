"""The figures of a run from its records: latencies with percentiles and intervals, throughput, goodput, errors, limits.

Rates are over the time from the first request sent to the last answer; requests that failed count as errors, not as
throughput. Limits on latency are written `ttft_p95=1s,tpot_p95=100ms` for a run and `ttft=1s,tpot=100ms` for a request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from tokenmill.bench.measures import Floats, bootstrap, percentile, summarize
from tokenmill.bench.request_records import BenchRecord
from tokenmill.errors import InvalidConfig

METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Limit:
    """A limit on one statistic of a latency over a whole run."""

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
    """Parse a duration: `1s`, `250ms`, `0.25`."""
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


CI_PERCENTILES = (50, 95, 99)


def totals(
    records: Sequence[BenchRecord], *, goodput: dict[str, float] | None = None, usd_per_hour: float | None = None
) -> dict[str, Any]:
    done = [record for record in records if record.is_ok]
    span = _span_s(records)
    input_tokens = sum(record.input_tokens or record.asked_input for record in done)
    output_tokens = sum(record.num_tokens for record in done)
    found: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": dict(Counter(r.error or "empty" for r in records if not r.is_ok)),
        "span_s": span,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(record.cached_tokens or 0 for record in done),
        "requests_s": len(done) / span,
        "requests_min": 60 * len(done) / span,
        "input_tok_s": input_tokens / span,
        "output_tok_s": output_tokens / span,
        "total_tok_s": (input_tokens + output_tokens) / span,
        "max_in_flight": max((n for _, n in in_flight(records)), default=0),
        "tokens_from": "usage" if done and all(r.output_tokens is not None for r in done) else "pieces",
    }
    for metric in METRICS:
        found[metric] = described(metric_values(records, metric))
    delays = summarize([record.sent_s - record.scheduled_s for record in done])
    found["send_delay"] = delays.as_dict() if delays else None
    if goodput:
        good = sum(meets(record, goodput) for record in records)
        found |= {
            "goodput_requests_s": good / span,
            "goodput_share": good / max(1, len(records)),
            "goodput_slo": goodput,
        }
    if usd_per_hour is not None:
        found |= _cost(usd_per_hour, span, len(done), output_tokens)
    return found


def described(values: Sequence[float]) -> dict[str, Any] | None:
    """Summary in seconds, with 95 % intervals of the mean and of some percentiles."""
    sample: Floats = np.asarray(values, dtype=np.float64)
    summary = summarize(sample)
    if summary is None:
        return None
    intervals: dict[str, Any] = {}
    mean = bootstrap(sample, lambda drawn: float(drawn.mean()))
    intervals["mean"] = asdict(mean) if mean else None
    for p in CI_PERCENTILES:
        interval = bootstrap(sample, partial(percentile, p=p))
        intervals[f"p{p}"] = asdict(interval) if interval else None
    return {**summary.as_dict(), "ci95": intervals}


def _span_s(records: Sequence[BenchRecord]) -> float:
    if not records:
        return 1e-9
    return max(max(r.end_s for r in records) - min(r.sent_s for r in records), 1e-9)


def in_flight(records: Sequence[BenchRecord]) -> list[tuple[float, int]]:
    """Return the number of running requests at each moment when it changed."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    running, changes_over_time = 0, []
    for at_s, change in changes:
        running += change
        changes_over_time.append((at_s, running))
    return changes_over_time


def _cost(usd_per_hour: float, span: float, requests: int, output_tokens: int) -> dict[str, Any]:
    spent = usd_per_hour * span / 3600
    return {
        "usd": spent,
        "usd_per_request": spent / requests if requests else None,
        "usd_per_million_output": spent / output_tokens * 1e6 if output_tokens else None,
    }
