"""From the records of a run to its figures: latencies with percentiles and intervals, throughput, goodput, errors.

Rates are over the time from the first request sent to the last answer; requests that failed count as errors, not as
throughput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from tokenmill.bench.measures import Floats, bootstrap, percentile, summarize
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.slo import METRICS, meets, metric_values

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
    """How many requests were running, at each moment that changed."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    running, line = 0, []
    for at_s, change in changes:
        running += change
        line.append((at_s, running))
    return line


def _cost(usd_per_hour: float, span: float, requests: int, output_tokens: int) -> dict[str, Any]:
    spent = usd_per_hour * span / 3600
    return {
        "usd": spent,
        "usd_per_request": spent / requests if requests else None,
        "usd_per_million_output": spent / output_tokens * 1e6 if output_tokens else None,
    }
