"""Publish recorded measurements: `docs/performance.md` (tables) and `docs/results.svg` (the README's picture).

    python benchmarks/publish_results.py
    python benchmarks/publish_results.py --growth growth.html      how figures developed, a page to look at

Measurements are kept in `benchmarks/results/SUBJECT.DATE.NUMBER.json`. A file says what was measured (`title`), when
(`date`), with which code (`commit`: the one that recorded the figures), where (`machine`, `software`), how (`command`)
and what came out (`figures`). A figure is one row of a table; its keys are the columns. A value is a number, a text,
a pair [low, high], a triple [median, lower quartile, upper quartile], or null where nothing was measured. The newest
file of a subject is shown; older ones stay for comparison.
"""

from __future__ import annotations

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from tokenmill.bench.pages import GrowthRow, html_growth
from tokenmill.report.charts import FONT, svg

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "results.svg"
DRAWN = "cpu-compare"  # the subject of the picture
ENGINES = {"Tokenmill": "#0b5394", "OpenVINO": "#93a7b8", "llama.cpp": "#d5b58a"}

# Subjects in the order of the page; one that is not listed here follows the others.
CHAPTERS = {
    "On a CPU": ["cpu-compare", "cpu-compare-zen4", "cpu-compare-1b", "cpu-engine", "cpu-rebuild", "cpu-busy-neighbour",
                 "cpu-amx"],
    "On a GPU": ["gpu-offline", "gpu-rebuild", "gpu-steps-quantised", "gpu-moe-quantised", "gpu-serving",
                 "gpu-deterministic", "gpu-memory", "gpu-sampling", "gpu-guided", "gpu-start"],
    "Accuracy": ["perplexity", "llama-cpp-agreement", "gpu-dtype"],
    "Features": ["speculation", "context-shift", "kv-int8-cpu", "guided", "batching"],
    "Server, load generator, planner": ["server-compare", "fleet-routing", "route-choice", "moving-prepared",
                                        "kv-tiers", "load-generator", "planner-calibration"],
    "Tenants": ["fairness", "long-prompt", "ledger", "timing-oracle"],
}  # fmt: skip
HEAD = """# Performance

Made by `python benchmarks/publish_results.py` from the files in [`benchmarks/results/`](../benchmarks/results); a test
compares. Each table is the newest measurement of its subject and holds for its machine, date and commit; a figure in
brackets, 1.70 (1.68–1.83), is the median and the quartiles of ratios taken side by side in one run. "Target" is the
figure that was aimed at, also where it was missed. How to measure your own machine:
[benchmarks/README.md](../benchmarks/README.md). What was tried and did not pay: [experiments/](experiments).
"""


@dataclass(frozen=True)
class Measurement:
    """One file of `benchmarks/results`."""

    file: Path
    subject: str
    title: str
    date: str
    commit: str
    machine: str
    software: dict[str, str]
    command: str
    notes: list[str]
    figures: list[dict[str, Any]]


def load_results(folder: Path = RESULTS) -> dict[str, list[Measurement]]:
    """Measurements of each subject, oldest first."""
    found: dict[str, list[Measurement]] = {}
    for path in sorted(folder.glob("*.json"), key=_order):
        measurement = Measurement(file=path, **json.loads(path.read_text(encoding="utf-8")))
        found.setdefault(measurement.subject, []).append(measurement)
    return found


def _order(path: Path) -> tuple[str, str, int]:
    subject, date, number = path.stem.split(".")
    return subject, date, int(number)


# ── tables ─────────────────────────────────────────────────────────────────────────────────────────────


def page(results: dict[str, list[Measurement]]) -> str:
    listed = [subject for subjects in CHAPTERS.values() for subject in subjects]
    others = sorted(set(results) - set(listed))
    chapters = {**CHAPTERS, **({"Other": others} if others else {})}
    parts = [HEAD]
    for chapter, subjects in chapters.items():
        parts.append(f"## {chapter}\n")
        parts += [section(results[subject]) for subject in subjects if subject in results]
    return "\n".join(parts)


def section(measurements: list[Measurement]) -> str:
    newest = measurements[-1]
    software = "".join(f", {name} {version}" for name, version in newest.software.items())
    earlier = [f"[{one.date}, {one.commit}](../benchmarks/results/{one.file.name})" for one in measurements[:-1]]
    lines = [
        f"### {newest.title}",
        "",
        f"{newest.date}, commit {newest.commit}; {newest.machine}{software}. `{newest.command}`",
        "",
        table(newest.figures),
        "",
        *newest.notes,
        *([f"Earlier: {', '.join(earlier)}."] if earlier else []),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(figures: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for figure in figures for key in figure))
    rows = [[shown(figure.get(column)) for column in columns] for figure in figures]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 2:
        return f"{shown(value[0])} to {shown(value[1])}"
    if isinstance(value, list):
        median, low, high = map(shown, value)
        return f"{median} ({low}–{high})"
    return f"{value:,}"


# ── the picture ────────────────────────────────────────────────────────────────────────────────────────


def drawing(found: Measurement) -> str:
    """Bars of the engines by the number of sequences, decode beside prefill."""
    rows = [
        {"phase": figure["phase"], "load": sequences(figure["sequences"]), "engine": engine, "speed": figure[engine],
         "shown": f"{figure[engine]:,.0f}"}
        for figure in found.figures
        for engine in ENGINES
        if figure.get(engine) is not None
    ]  # fmt: skip
    engines, loads = list(ENGINES), list(dict.fromkeys(row["load"] for row in rows))
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    offset = {"xOffset": {"field": "engine", "sort": engines}}
    legend = {"orient": "bottom", "title": None, "labelFontSize": 13, "symbolType": "square", "direction": "horizontal"}
    colour = {"scale": {"domain": engines, "range": list(ENGINES.values())}, "legend": legend}
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": found.title, "subtitle": [*wrap(found.machine, 100), found.date], "anchor": "start",
                  "offset": 14},
        "data": {"values": rows},
        "hconcat": [
            {
                "title": {"text": f"{phase}, tokens/s", "anchor": "middle", "fontSize": 14},
                "width": {"step": 42},
                "height": 220,
                "transform": [{"filter": {"field": "phase", "equal": phase}}],
                "encoding": {
                    "x": {"field": "load", "sort": loads, "axis": {"title": None, "labelAngle": 0, "ticks": False}},
                    "y": {"field": "speed", "type": "quantitative", "axis": None},
                    **offset,
                },
                "layer": [
                    {"mark": {"type": "bar", "width": {"band": 0.9}},
                     "encoding": {"color": {"field": "engine", **colour}}},
                    {"mark": {"type": "text", "dy": -6, "fontSize": 11}, "encoding": {"text": {"field": "shown"}}},
                ],
            }
            for phase in phases
        ],
        "spacing": 40,
        "padding": 18,
        "config": {"font": FONT, "background": "white", "view": {"stroke": None}, "axis": {"labelFontSize": 12}},
    }  # fmt: skip
    picture = svg(spec)
    source = f"<desc>{html.escape(found.file.name)}, commit {found.commit}</desc>"
    title = f"<title>{html.escape(found.title)}: tokens a second</title>"
    return picture.replace(">", f' role="img">{title}{source}', 1) + "\n"


def sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


# ── growth ─────────────────────────────────────────────────────────────────────────────────────────────


OURS = ("Tokenmill", "measured", "value")  # columns that hold our own figure


def growth(results: dict[str, list[Measurement]]) -> list[tuple[str, list[GrowthRow]]]:
    """Figures that were measured more than once, by subject."""
    subjects = []
    for measurements in results.values():
        series: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for one in measurements:
            for figure in one.figures:
                value = next((middle(figure[key]) for key in OURS if key in figure), None)
                if value is not None:
                    series.setdefault((named(figure), str(figure.get("unit", ""))), []).append((one.commit, value))
        rows = [GrowthRow(name, unit, values) for (name, unit), values in series.items() if len(values) > 1]
        if rows:
            subjects.append((measurements[-1].title, rows))
    return subjects


def named(figure: dict[str, Any]) -> str:
    if "what" in figure:
        return str(figure["what"])
    return f"{figure.get('phase')}, {sequences(figure.get('sequences', 1))}"


def middle(value: Any) -> float | None:
    """The number of a cell: a pair's mean, a triple's median; None for words."""
    if isinstance(value, list):
        return float(value[0]) if len(value) == 3 else sum(value) / 2
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    results = load_results()
    if sys.argv[1:2] == ["--growth"]:
        command = f"python benchmarks/publish_results.py {' '.join(sys.argv[1:])}"
        Path(sys.argv[2]).write_text(html_growth(growth(results), command), encoding="utf-8")
        sys.exit()
    PAGE.write_text(page(results), encoding="utf-8")
    PICTURE.write_text(drawing(results[DRAWN][-1]), encoding="utf-8")
    print(PAGE, PICTURE, sep="\n")
