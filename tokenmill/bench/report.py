"""HTML pages of benchmark results: one run, several runs compared, or a search for capacity.

Plots are inline SVG; a page needs no other file.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenmill.bench.measures import median
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import Trial, Verdict
from tokenmill.bench.totals import in_flight, metric_values
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


# ── capacity searches ────────────────────────────────────────────────────────────────────────────────────


def curve_rows(trials: Sequence[Trial]) -> list[list[str]]:
    rows = []
    for level in sorted({trial.level for trial in trials}):
        at = [trial for trial in trials if trial.level == level]
        figures = [f"{median([trial.measured[name] for trial in at]) * 1e3:.1f}" for name in at[0].measured]
        passed = f"{sum(trial.passed for trial in at)}/{len(at)}"
        why = next((trial.reason for trial in at if trial.reason), "")
        rows.append([f"{level:g}", passed, *figures, f"{median([trial.output_tok_s for trial in at]):,.0f}", why])
    return rows


def curve_titles(trials: Sequence[Trial]) -> list[str]:
    limits = [f"{name.split('=')[0]} ms" for name in trials[0].measured] if trials else []
    return ["level", "passed", *limits, "output tok/s", "why not"]


def sentence(verdict: Verdict, what: str) -> str:
    low, high = verdict.likely
    spread = f", likely between {low:g} and {high:g}" if low != high else ""
    sure = f"{verdict.confidence:.0%} sure from {len(verdict.trials)} trials{spread}"
    sure += "; cut short" if verdict.was_cut_short else ""
    if verdict.best is None:
        return f"Not even {what} {verdict.first_failing:g} is within the limits ({sure})."
    if verdict.first_failing is None:
        highest = "tried so far" if verdict.was_cut_short else "asked for"
        return f"{what.capitalize()} {verdict.best:g}, the highest {highest}, is within the limits ({sure})."
    return f"The largest {what} within the limits is {verdict.best:g}; {verdict.first_failing:g} is not ({sure})."


def html_search(verdict: Verdict, what: str) -> str:
    names = list(verdict.trials[0].measured) if verdict.trials else []
    charts = []
    for name in names:
        points = sorted((trial.level, trial.measured[name] * 1e3) for trial in verdict.trials)
        limit = float(name.split("=")[1].removesuffix("ms"))
        levels = [points[0][0], points[-1][0]]
        lines = [Series("measured", points), Series("limit", [(level, limit) for level in levels])]
        charts.append(line_chart(name.split("=")[0], Axis(what), Axis("ms"), lines))
    speed = sorted((trial.level, trial.output_tok_s) for trial in verdict.trials)
    charts.append(line_chart("Throughput", Axis(what), Axis("output tokens/s"), [Series("measured", speed)]))
    rows = table(curve_titles(verdict.trials), curve_rows(verdict.trials))
    return page("Search: " + sentence(verdict, what), [*charts, rows])
