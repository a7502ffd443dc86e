"""Publish recorded measurements: `docs/performance.md` (tables) and `docs/results.svg` (the README's picture).

    python benchmarks/publish_results.py

Measurements are kept in `benchmarks/results/SUBJECT.DATE.NUMBER.json`. A file says what was measured (`title`), when
(`date`), with which code (`commit`: the one that recorded the figures), where (`machine`, `software`), how (`command`)
and what came out (`figures`). A figure is one row of a table; its keys are the columns. A value is a number, a text,
a pair [low, high], a triple [median, lower quartile, upper quartile], or null where nothing was measured. The newest
file of a subject is shown; older ones stay for comparison.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "results.svg"
DRAWN = "cpu-compare"  # the subject of the picture
ENGINES = {"Tokenmill": "#0b5394", "OpenVINO": "#93a7b8", "llama.cpp": "#d5b58a"}
WIDTH, PANEL, TOP, BOTTOM, BAR = 860, 400, 64, 300, 26

# Subjects in the order of the page; one that is not listed here follows the others.
CHAPTERS = {
    "On a CPU": ["cpu-compare", "cpu-compare-zen4", "cpu-compare-1b", "cpu-engine", "cpu-busy-neighbour", "cpu-amx"],
    "On a GPU": ["gpu-offline", "gpu-steps-quantised", "gpu-moe-quantised", "gpu-serving", "gpu-deterministic",
                 "gpu-memory", "gpu-sampling", "gpu-guided", "gpu-start"],
    "Accuracy": ["perplexity", "llama-cpp-agreement", "gpu-dtype"],
    "Features": ["speculation", "context-shift", "kv-int8-cpu", "guided", "batching"],
    "Server, load generator, planner": ["server-compare", "load-generator", "planner-calibration"],
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


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle", style: str = "") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" {style}>{html.escape(words)}</text>'
    )


def panel(left: float, phase: str, groups: list[dict[str, Any]]) -> str:
    """Bars of one phase: a group for each number of sequences, in it a bar for each engine."""
    most = max(group[engine] for group in groups for engine in ENGINES)
    slot = PANEL / len(groups)
    parts = [text(left + PANEL / 2, TOP - 14, f"{phase}, tokens/s", size=15, style='font-weight="bold"')]
    for index, group in enumerate(groups):
        start = left + index * slot + (slot - len(ENGINES) * BAR) / 2
        for number, (engine, colour) in enumerate(ENGINES.items()):
            height = (BOTTOM - TOP - 24) * group[engine] / most
            x, y = start + number * BAR, BOTTOM - height
            parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{BAR - 3}" height="{height:.0f}" fill="{colour}"/>')
            parts.append(text(x + BAR / 2 - 1, y - 4, f"{group[engine]:,.0f}", size=10))
        label = f"{group['sequences']} sequence{'s' if group['sequences'] != 1 else ''}"
        parts.append(text(start + len(ENGINES) * BAR / 2, BOTTOM + 18, label))
    return "".join(parts)


def drawing(found: Measurement) -> str:
    phases: dict[str, list[dict[str, Any]]] = {}
    for figure in found.figures:
        phases.setdefault(figure["phase"], []).append(figure)
    panels = [panel(20 + n * (PANEL + 20), phase, groups) for n, (phase, groups) in enumerate(phases.items())]
    legend = "".join(
        f'<rect x="{250 + 130 * n}" y="{BOTTOM + 34}" width="12" height="12" fill="{colour}"/>'
        + text(268 + 130 * n, BOTTOM + 45, engine, anchor="start")
        for n, (engine, colour) in enumerate(ENGINES.items())
    )
    heading = text(WIDTH / 2, 16, found.title, size=14) + text(WIDTH / 2, 32, f"{found.machine}, {found.date}", size=11)
    height = BOTTOM + 64
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" role="img"><title>{html.escape(found.title)}: tokens a second</title>'
        f'<rect width="100%" height="100%" fill="white"/>{heading}{"".join(panels)}{legend}</svg>\n'
    )


if __name__ == "__main__":
    results = load_results()
    PAGE.write_text(page(results), encoding="utf-8")
    PICTURE.write_text(drawing(results[DRAWN][-1]), encoding="utf-8")
    print(PAGE, PICTURE, sep="\n")
