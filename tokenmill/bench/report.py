"""Benchmark results in rows: one run, several runs side by side, a search for capacity. `pages.py` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.bench.measures import median
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import Trial, Verdict
from tokenmill.report.page import Cell, Group, change_of

# title, key, how it is written, whether more of it is better (None: neither)
FIGURES: tuple[tuple[str, str, str, bool | None], ...] = (
    ("requests", "requests", "{:,.0f}", None),
    ("failed", "failed", "{:,.0f}", False),
    ("requests/s", "requests_s", "{:.2f}", True),
    ("input tok/s", "input_tok_s", "{:,.1f}", None),
    ("output tok/s", "output_tok_s", "{:,.1f}", True),
    ("most at once", "max_in_flight", "{:,.0f}", None),
    ("goodput requests/s", "goodput_requests_s", "{:.2f}", True),
)
LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2e"))
SHOWN = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class ReportRun:
    name: str
    figures: dict[str, Any]
    records: list[BenchRecord]

    @property
    def settings(self) -> dict[str, Any]:
        return self.figures.get("settings") or {}


# ── runs side by side ────────────────────────────────────────────────────────────────────────────────


def throughput_matrix(runs: Sequence[ReportRun]) -> tuple[list[str], list[Group]]:
    """A run a row; the later ones are compared with the first."""
    known = [row for row in FIGURES if any(run.figures.get(row[1]) is not None for run in runs)]
    first = runs[0].figures
    rows = [
        (run.name if len(runs) > 1 else "", [_figure_cell(first, run.figures, *row[1:]) for row in known])
        for run in runs
    ]
    return ["", *[row[0] for row in known]], [Group("", rows)]


def _figure_cell(
    first: dict[str, Any], figures: dict[str, Any], key: str, shape: str, more_is_better: bool | None
) -> Cell:
    return _compared(first.get(key), figures.get(key), shape, more_is_better, is_first=first is figures)


def latency_matrix(runs: Sequence[ReportRun]) -> tuple[list[str], list[Group]]:
    """Latencies in ms by statistic; a metric has a row for each run."""
    groups = []
    for title, metric in LATENCIES:
        rows = []
        for run in runs:
            first, found = runs[0].figures.get(metric) or {}, run.figures.get(metric) or {}
            cells = [
                _compared(_ms(first.get(name)), _ms(found.get(name)), "{:,.1f}", False, is_first=run is runs[0])
                for name in SHOWN
            ]
            rows.append((run.name if len(runs) > 1 else title, cells))
        if any(cell.text != "–" for _, cells in rows for cell in cells):
            groups.append(Group(title if len(runs) > 1 else "", rows))
    return ["latency, ms", *SHOWN], groups


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _compared(
    first: float | None, value: float | None, shape: str, more_is_better: bool | None, *, is_first: bool
) -> Cell:
    text = "–" if value is None else shape.format(value)
    if is_first:
        return Cell(text)
    return Cell(text, *change_of(first, value, more_is_better=more_is_better))


def matrix_rows(groups: Sequence[Group]) -> list[list[str]]:
    """The rows of a matrix for a terminal: a group's name before its rows' names."""
    return [
        [f"{group.name}: {name}" if group.name else name, *[f"{cell.text} {cell.change}".rstrip() for cell in cells]]
        for group in groups
        for name, cells in group.rows
    ]


def different_settings(runs: Sequence[ReportRun]) -> tuple[list[str], list[list[str]]]:
    """Return the settings that differ between runs: a row for each setting, a column for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [[name, *[_setting(run.settings.get(name)) for run in runs]] for name in names]
    return ["setting", *[run.name for run in runs]], [row for row in rows if len(set(row[1:])) > 1]


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)


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
    """Say in a sentence which level a search found to pass, which to fail, and how certain the limit between them
    is."""
    low, high = verdict.likely
    spread = f", likely between {low:g} and {high:g}" if low != high else ""
    cut = "; cut short" if verdict.was_cut_short else ""
    sure = f"{verdict.confidence:.0%} sure from {len(verdict.trials)} trials{spread}{cut}".replace("%", " %")
    if verdict.best is None:
        return f"Not even {what} {verdict.first_failing:g} is within the limits ({sure})."
    held, failed = tried_edge(verdict.trials)
    if verdict.first_failing is None:
        highest = "tried so far" if verdict.was_cut_short else "asked for"
        return f"{what.capitalize()} {verdict.best:g}, the highest {highest}, is within the limits ({sure})."
    known = ", ".join(f"{level:g} {what}" for level, what in ((held, "held"), (failed, "failed")) if level is not None)
    word = "the largest within the limits is" if verdict.confidence >= CERTAIN else "best guess"
    return f"{what.capitalize()}: {known}; {word} {verdict.best:g}, {sure}."


CERTAIN = 0.9


def tried_edge(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """The highest level that held in most of its trials, and the lowest above it that did not."""
    levels = sorted({trial.level for trial in trials})
    passed = {level: [trial.passed for trial in trials if trial.level == level] for level in levels}
    held = max((level for level in levels if 2 * sum(passed[level]) > len(passed[level])), default=None)
    above = (level for level in levels if held is None or level > held)
    return held, min(above, default=None)
