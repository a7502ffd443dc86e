"""HTML pages of benchmark results: a run, runs side by side, a search for capacity, engines compared, growth."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenmill.bench.compare import FIGURES, OURS, Comparison
from tokenmill.bench.report import (
    LATENCIES,
    ReportRun,
    curve_rows,
    curve_titles,
    different_settings,
    latency_matrix,
    sentence,
    throughput_matrix,
)
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import Verdict
from tokenmill.bench.totals import in_flight, metric_values
from tokenmill.report.charts import Axis, Bar, Series, bars, cdf, histogram, line_chart
from tokenmill.report.page import Cell, Group, Heading, charts, matrix, page, table, today

MAX_PLOTTED = 50_000
LEGEND = '<p class="soft">▲ better, ▼ worse, = within 1 %, each against the first row</p>'


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────


def html_report(runs: Sequence[ReportRun]) -> str:
    """Return the HTML page of one run, or of several side by side."""
    is_compared = len(runs) > 1
    parts = [*_differences(runs), *_errors(runs), "<h2>Throughput</h2>", matrix(*throughput_matrix(runs))]
    parts += ["<h2>Latency</h2>", matrix(*latency_matrix(runs)), *([LEGEND] if is_compared else [])]
    drawn = []
    for title, metric in LATENCIES:
        values = [(run.name, [v * 1e3 for v in _thinned(metric_values(run.records, metric))]) for run in runs]
        axis = Axis(f"{title}, ms")
        drawn += [histogram(title, axis, values), cdf(f"{title}, cumulative", axis, values)]
    parts += [charts(drawn), "<h2>Over time</h2>"]
    parts.append(charts([_timeline(runs), _token_rate(runs), _against_concurrency(runs)]))
    if len(runs) > 2:
        parts += ["<h2>From run to run</h2>", charts(_growth(runs))]
    parts.append("<h2>How to repeat it</h2>")
    parts += [_repeat(run, is_named=is_compared) for run in runs]
    return page(_heading(runs), parts)


def _heading(runs: Sequence[ReportRun]) -> Heading:
    run = runs[0]
    if len(runs) > 1:
        facts = [("model", _same(runs, "model")), ("lengths", _same_lengths(runs)), ("dates", _dates(runs))]
        return Heading("Benchmark: " + " against ".join(r.name for r in runs[:3]) + " …" * (len(runs) > 3), facts)
    settings, figures = run.settings, run.figures
    facts = [
        ("model", str(settings.get("model", run.name))),
        ("server", str(settings.get("url", ""))),
        ("device", str(settings.get("device", ""))),
        ("lengths", lengths(settings)),
        ("load", _load(settings)),
        ("date", str(figures.get("date", ""))),
        ("measured from", str(figures.get("client", ""))),
    ]
    return Heading(f"Benchmark: {settings.get('model', run.name)}", facts, command_line(figures.get("command")))


def command_line(arguments: Any) -> str:
    return f"tokenmill {shlex.join(map(str, arguments))}" if arguments else ""


def lengths(settings: dict[str, Any]) -> str:
    """Prompt and answer lengths in words."""
    if settings.get("trace"):
        return f"as recorded in {settings['trace']}"
    if "input_len" not in settings:
        return ""
    if settings.get("workload") == "lengths":
        return f"as listed in {settings.get('file')}"
    return f"{settings['input_len']} tokens in, {settings['output_len']} out ({settings.get('workload', 'random')})"


def _load(settings: dict[str, Any]) -> str:
    if settings.get("trace"):
        return "replayed"
    if settings.get("rate"):
        return f"{settings['rate']:g} requests a second ({settings.get('arrivals', 'poisson')})"
    return f"{settings.get('concurrency', 1)} at once" if settings else ""


def _same(runs: Sequence[ReportRun], name: str) -> str:
    return ", ".join(dict.fromkeys(str(run.settings[name]) for run in runs if run.settings.get(name) is not None))


def _same_lengths(runs: Sequence[ReportRun]) -> str:
    return "; ".join(dict.fromkeys(filter(None, (lengths(run.settings) for run in runs))))


def _dates(runs: Sequence[ReportRun]) -> str:
    dates = sorted(str(run.figures["date"])[:10] for run in runs if run.figures.get("date"))
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""


def _differences(runs: Sequence[ReportRun]) -> list[str]:
    if len(runs) < 2:
        return []
    titles, rows = different_settings(runs)
    if not rows:
        return ['<p class="soft">The runs were asked the same.</p>']
    return ["<h2>What differs</h2>", table(titles, rows)]


def _thinned(values: list[float]) -> list[float]:
    return values[:: len(values) // MAX_PLOTTED + 1]


def _errors(runs: Sequence[ReportRun]) -> list[str]:
    return [
        f'<p class="bad">{html.escape(run.name)}: {run.figures["failed"]} of {run.figures["requests"]} requests '
        f"failed: {html.escape(json.dumps(run.figures['errors']))}</p>"
        for run in runs
        if run.figures.get("failed")
    ]


def _repeat(run: ReportRun, *, is_named: bool) -> str:
    facts = {"date": run.figures.get("date"), "lag": run.figures.get("lag"), "settings": run.settings}
    name = f"<h3>{html.escape(run.name)}</h3>" if is_named else ""
    command = command_line(run.figures.get("command")) if is_named else ""
    shown = f"<pre>{html.escape(command)}</pre>" if command else ""
    return f"{name}{shown}<pre>{html.escape(json.dumps(facts, indent=1))}</pre>"


# ── over time ────────────────────────────────────────────────────────────────────────────────────────


def _timeline(runs: Sequence[ReportRun]) -> str:
    lines = [Series(run.name, averaged(in_flight(run.records))) for run in runs]
    return line_chart("Requests running", Axis("seconds"), Axis("requests"), lines, marks=False)


def averaged(line: Sequence[tuple[float, int]], num_bins: int = 120) -> list[tuple[float, float]]:
    """A number that jumps (when, how many from then on), as its mean over each of some equal spans of time."""
    if len(line) < 2 or line[-1][0] <= line[0][0]:
        return [(at_s, float(count)) for at_s, count in line]
    began_s, width = line[0][0], (line[-1][0] - line[0][0]) / num_bins
    sums = [0.0] * num_bins
    for (start, count), (end, _) in pairwise(line):
        first, last = (min(int((at_s - began_s) / width), num_bins - 1) for at_s in (start, end))
        for number in range(first, last + 1):
            begins = began_s + number * width
            sums[number] += count * max(0.0, min(end, begins + width) - max(start, begins))
    return [(began_s + (number + 0.5) * width, total / width) for number, total in enumerate(sums)]


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
    """Draw throughput against the number of running requests, from one run."""
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


def _growth(runs: Sequence[ReportRun]) -> list[str]:
    """A bar for each run in the order given: how throughput and latency developed."""
    figures: tuple[tuple[str, str, Callable[[dict[str, Any]], float | None]], ...] = (
        ("Output tokens a second", "tok/s", lambda f: f.get("output_tok_s")),
        ("TTFT, 95th percentile", "ms", lambda f: (f.get("ttft") or {}).get("p95", 0) * 1e3),
        ("TPOT, 95th percentile", "ms", lambda f: (f.get("tpot") or {}).get("p95", 0) * 1e3),
    )
    return [
        bars(title, unit, [Bar("", run.name, float(read(run.figures) or 0)) for run in runs], is_development=True)
        for title, unit, read in figures
    ]


# ── capacity searches ────────────────────────────────────────────────────────────────────────────────


def html_search(verdict: Verdict, what: str, settings: dict[str, Any], command: Sequence[str] = ()) -> str:
    names = list(verdict.trials[0].measured) if verdict.trials else []
    drawn = []
    for name in names:
        points = sorted((trial.level, trial.measured[name] * 1e3) for trial in verdict.trials)
        limit = float(name.split("=")[1].removesuffix("ms"))
        title = f"{_metric(name)} against load"
        drawn.append(line_chart(title, Axis(what), Axis("ms"), [Series("measured", points)], limit=limit))
    speed = sorted((trial.level, trial.output_tok_s) for trial in verdict.trials)
    drawn.append(
        line_chart("Throughput against load", Axis(what), Axis("output tokens/s"), [Series("measured", speed)])
    )
    facts = [
        ("model", str(settings.get("model", ""))),
        ("server", str(settings.get("url", ""))),
        ("limits", str(settings.get("slo", ""))),
        ("lengths", lengths(settings)),
        ("date", today()),
    ]
    rows = table(curve_titles(verdict.trials), curve_rows(verdict.trials))
    title = f"Capacity of {settings.get('model', 'a server')}"
    heading = Heading(title, facts, command_line(command), sentence(verdict, what))
    return page(heading, [charts(drawn), "<h2>Trials</h2>", rows])


def _metric(limit: str) -> str:
    metric, _, statistic = limit.split("=")[0].partition("_")
    return f"{dict((key, title) for title, key in LATENCIES).get(metric, metric)} {statistic}".rstrip()


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────


def html_comparison(found: Sequence[Comparison], versions: dict[str, str], facts: Sequence[tuple[str, str]],
                    command: Sequence[str]) -> str:  # fmt: skip
    """Engines side by side: bars by the number of sequences, and a matrix of figures and ratios with their spread."""
    drawn, groups = [], []
    ordered = sorted(found, key=lambda c: (c.concurrency, c.engine != OURS, c.engine))
    counts = list(dict.fromkeys(c.concurrency for c in ordered))
    for figure in FIGURES:
        phase = figure.removesuffix("_tok_s").capitalize()
        shown = [c for c in ordered if c.figure == figure]
        values = [Bar(_sequences(c.concurrency), c.engine, float(c.as_dict()["median"])) for c in shown]
        drawn.append(bars(phase, "tokens a second", values))
        at = {(c.engine, c.concurrency): c for c in shown}
        rows = [
            (versions.get(name, name), [_engine_cell(at.get((name, count))) for count in counts])
            for name in dict.fromkeys(c.engine for c in shown)
        ]
        groups.append(Group(phase, rows))
    titles = ("tokens/s, median", *map(_sequences, counts))
    heading = Heading("Engines side by side", [*facts, ("date", today())], command_line(command))
    legend = f'<p class="soft">In grey: how many times as fast {OURS} is, with the quartiles of single rounds.</p>'
    return page(heading, [charts(drawn), "<h2>Figures</h2>", matrix(titles, groups), legend])


def _engine_cell(found: Comparison | None) -> Cell:
    if found is None:
        return Cell("–")
    ratio = found.ratio
    return Cell(f"{found.as_dict()['median']:,.0f}", f"×{ratio}" if ratio else "")


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class GrowthRow:
    """A figure as it was measured at several times, the oldest first."""

    name: str
    unit: str
    values: Sequence[tuple[str, float]]  # when, how much


def html_growth(subjects: Sequence[tuple[str, Sequence[GrowthRow]]], command: str) -> str:
    """Return the HTML page of how figures changed from one recorded measurement to the next, a section for each
    subject."""
    sections = []
    for title, rows in subjects:
        sections.append(f"<h2>{html.escape(title)}</h2>")
        drawn = [
            bars(row.name, row.unit, [Bar("", when, value) for when, value in row.values], is_development=True)
            for row in rows
        ]
        sections.append(charts(drawn))
    return page(Heading("Growth of recorded measurements", [("date", today())], command), sections)
