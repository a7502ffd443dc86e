"""Runs as a page: one, or several laid over each other. Plots are inline SVG; the page needs nothing but itself."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.slo import metric_values
from tokenmill.bench.totals import in_flight
from tokenmill.report.charts import Axis, Series, cdf, histogram, line_chart, page, table

ROWS = (
    ("requests", "requests", 1, "{:,.0f}"),
    ("failed", "failed", 1, "{:,.0f}"),
    ("requests/s", "requests_s", 1, "{:.2f}"),
    ("input tok/s", "input_tok_s", 1, "{:,.1f}"),
    ("output tok/s", "output_tok_s", 1, "{:,.1f}"),
    ("most at once", "max_in_flight", 1, "{:,.0f}"),
    ("goodput requests/s", "goodput_requests_s", 1, "{:.2f}"),
)
LATENCIES = (("TTFT ms", "ttft"), ("TPOT ms", "tpot"), ("ITL ms", "itl"), ("e2e ms", "e2e"))
SHOWN = ("mean", "p50", "p90", "p95", "p99")
MAX_PLOTTED = 50_000


@dataclass(frozen=True)
class ReportRun:
    name: str
    figures: dict[str, Any]
    records: list[BenchRecord]


def comparison_rows(runs: Sequence[ReportRun]) -> list[list[str]]:
    """A figure a row, a run a column; with two runs a last column has the ratio second / first."""
    rows = []
    for title, key, scale, shape in ROWS:
        values = [run.figures.get(key) for run in runs]
        if any(value is not None for value in values):
            rows.append([title, *_cells(values, scale, shape)])
    for title, metric in LATENCIES:
        for statistic in SHOWN:
            values = [(run.figures.get(metric) or {}).get(statistic) for run in runs]
            if any(value is not None for value in values):
                rows.append([f"{title} {statistic}", *_cells(values, 1e3, "{:,.1f}")])
    return rows


def _cells(values: Sequence[float | None], scale: float, shape: str) -> list[str]:
    cells = ["–" if value is None else shape.format(value * scale) for value in values]
    if len(values) == 2:
        first, second = values
        cells.append(f"{second / first:.2f}×" if first and second is not None else "–")
    return cells


def titles(runs: Sequence[ReportRun]) -> list[str]:
    return ["", *[run.name for run in runs], *(["second / first"] if len(runs) == 2 else [])]


def html_report(runs: Sequence[ReportRun]) -> str:
    sections = [table(titles(runs), comparison_rows(runs)), *_errors(runs), "<h2>Latency</h2>"]
    for title, metric in LATENCIES:
        values = [(run.name, [v * 1e3 for v in _thinned(metric_values(run.records, metric))]) for run in runs]
        sections += [histogram(title, Axis(title), values), cdf(f"{title}, cumulative", Axis(title), values)]
    sections += ["<h2>Over time</h2>", _timeline(runs), _token_rate(runs), _against_concurrency(runs)]
    for run in runs:
        facts = json.dumps({"date": run.figures.get("date"), "lag": run.figures.get("lag"),
                            "settings": run.figures.get("settings")}, indent=1)  # fmt: skip
        sections.append(f"<h2>{html.escape(run.name)}: how to repeat it</h2><pre>{html.escape(facts)}</pre>")
    return page("Benchmark: " + ", ".join(run.name for run in runs), sections)


def _thinned(values: list[float]) -> list[float]:
    return values[:: len(values) // MAX_PLOTTED + 1]


def _errors(runs: Sequence[ReportRun]) -> list[str]:
    return [
        f'<p class="bad">{html.escape(run.name)}: {run.figures["failed"]} of {run.figures["requests"]} requests '
        f"failed: {html.escape(json.dumps(run.figures['errors']))}</p>"
        for run in runs
        if run.figures.get("failed")
    ]


def _timeline(runs: Sequence[ReportRun]) -> str:
    lines = [Series(run.name, _steps(in_flight(run.records))) for run in runs]
    return line_chart("Requests running", Axis("seconds"), Axis("requests"), lines, marks=False)


def _steps(line: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    every = len(line) // 2000 + 1
    points: list[tuple[float, float]] = []
    for at_s, running in line[::every]:
        if points:
            points.append((at_s, points[-1][1]))
        points.append((at_s, float(running)))
    return points


def _token_rate(runs: Sequence[ReportRun]) -> str:
    lines = [Series(run.name, tokens_per_second(run.records)) for run in runs]
    return line_chart("Output over time", Axis("seconds"), Axis("pieces/s"), lines, marks=False)


def tokens_per_second(records: Sequence[BenchRecord], num_bins: int = 60) -> list[tuple[float, float]]:
    times = [at for record in records for at in record.times_s]
    if not times:
        return []
    width = max(max(times) / num_bins, 1e-6)
    counts = [0] * (num_bins + 1)
    for at in times:
        counts[min(int(at / width), num_bins)] += 1
    return [((number + 0.5) * width, count / width) for number, count in enumerate(counts[:num_bins])]


def _against_concurrency(runs: Sequence[ReportRun]) -> str:
    """How fast pieces came while so many requests were running: throughput against concurrency, from one run."""
    lines = [Series(run.name, throughput_by_concurrency(run.records)) for run in runs]
    return line_chart("Throughput against concurrency", Axis("requests running"), Axis("pieces/s"), lines)


def throughput_by_concurrency(records: Sequence[BenchRecord], num_groups: int = 16) -> list[tuple[float, float]]:
    line = in_flight(records)
    if len(line) < 2:
        return []
    times = sorted(at for record in records for at in record.times_s)
    group = max(1, (max(n for _, n in line) + num_groups - 1) // num_groups)
    spent: dict[int, float] = {}
    pieces: dict[int, int] = {}
    place = 0
    for (start, running), (end, _) in pairwise(line):
        key = (running + group - 1) // group  # 0: nothing was running
        spent[key] = spent.get(key, 0.0) + end - start
        while place < len(times) and times[place] <= end:
            pieces[key] = pieces.get(key, 0) + 1
            place += 1
    least = 0.01 * (line[-1][0] - line[0][0])  # levels hardly visited say nothing
    return [
        ((key - 0.5) * group + 0.5, pieces.get(key, 0) / t) for key, t in sorted(spent.items()) if key and t > least
    ]
