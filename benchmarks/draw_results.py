"""Draws docs/results.svg from the newest comparison in docs/LOG.md, so that the picture says what was measured.

python benchmarks/draw_results.py

The table it reads has the columns `file | what | ours | llama.cpp | … | OpenVINO | …`; a cell of several figures
(`971 / 1,027 / 995`) is one bar each, named by the figures in `what` (`prefill, 1 / 4 / 16 prompts`).
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG, PICTURE = ROOT / "docs" / "LOG.md", ROOT / "docs" / "results.svg"
ENGINES = {"Tokenmill": ("ours", "#0b5394"), "OpenVINO": ("OpenVINO", "#93a7b8"), "llama.cpp": ("llama.cpp", "#d5b58a")}
WIDTH, PANEL, TOP, BOTTOM, BAR = 860, 400, 64, 300, 26


@dataclass(frozen=True)
class Group:
    """Bars that stand together: one measurement, each engine's tokens a second."""

    label: str
    values: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    heading: str
    file: str
    phases: dict[str, list[Group]]


def newest_comparison(log: str) -> Comparison:
    """The first table that has all engines in it, and of it the first file."""
    sections = re.split(r"^## ", log, flags=re.MULTILINE)[1:]
    section = next(s for s in sections if re.search(r"^\| file \| what \| ours \| llama\.cpp \|.*OpenVINO", s, re.M))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    titles, body = rows[0], rows[2:]
    file = body[0][0]
    mine = [row for number, row in enumerate(body) if number == 0 or not any(r[0] for r in body[1 : number + 1])]
    phases: dict[str, list[Group]] = {}
    for row in mine:
        phases.setdefault(row[1].split()[0].strip(","), []).extend(groups(titles, row))
    return Comparison(section.splitlines()[0], file, phases)


def groups(titles: list[str], row: list[str]) -> list[Group]:
    counts = re.findall(r"\d+", row[1])
    figures = {name: numbers(row[titles.index(title)]) for name, (title, _) in ENGINES.items()}
    return [Group(count, {name: figures[name][place] for name in ENGINES}) for place, count in enumerate(counts)]


def numbers(cell: str) -> list[float]:
    return [float(part.replace(",", "")) for part in cell.split("/")]


# ── the drawing ────────────────────────────────────────────────────────────────────────────────────────


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle", style: str = "") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" {style}>{html.escape(words)}</text>'
    )


def panel(left: float, phase: str, found: list[Group]) -> str:
    most = max(value for group in found for value in group.values.values())
    slot = PANEL / len(found)
    parts = [text(left + PANEL / 2, TOP - 14, f"{phase}, tokens/s", size=15, style='font-weight="bold"')]
    for place, group in enumerate(found):
        start = left + place * slot + (slot - len(ENGINES) * BAR) / 2
        for number, (name, value) in enumerate(group.values.items()):
            height = (BOTTOM - TOP - 24) * value / most
            x, y = start + number * BAR, BOTTOM - height
            parts.append(
                f'<rect x="{x:.0f}" y="{y:.0f}" width="{BAR - 3}" height="{height:.0f}" fill="{ENGINES[name][1]}"/>'
            )
            parts.append(text(x + BAR / 2 - 1, y - 4, f"{value:,.0f}", size=10))
        label = f"{group.label} sequence{'s' if group.label != '1' else ''}"
        parts.append(text(start + len(ENGINES) * BAR / 2, BOTTOM + 18, label))
    return "".join(parts)


def drawing(found: Comparison) -> str:
    panels = [
        panel(20 + number * (PANEL + 20), phase, groups) for number, (phase, groups) in enumerate(found.phases.items())
    ]
    legend = "".join(
        f'<rect x="{250 + 130 * n}" y="{BOTTOM + 34}" width="12" height="12" fill="{colour}"/>'
        + text(268 + 130 * n, BOTTOM + 45, name, anchor="start")
        for n, (name, (_, colour)) in enumerate(ENGINES.items())
    )
    heading = text(WIDTH / 2, 22, f"{found.file}: {found.heading}", size=14)
    height = BOTTOM + 64
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" role="img"><title>{html.escape(found.file)}: tokens a second</title>'
        f'<rect width="100%" height="100%" fill="white"/>{heading}{"".join(panels)}{legend}</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing(newest_comparison(LOG.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PICTURE)
