"""Charts as SVG text and pages as one HTML file: no scripts, nothing from elsewhere, any browser shows it.

    Series(name, points)  ─► line_chart / step_chart / bar_chart ─► svg ─► page(title, sections)

Colours differ in lightness too, so that a print or a colour-blind reader can tell them apart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 44
COLOURS = ("#0b5394", "#cc4125", "#38761d", "#b45f06", "#674ea7", "#45818e", "#a64d79", "#7f6000")


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    label: str
    is_log: bool = False


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        place = math.log10(max(value, self.low)) if self.is_log else value
        return self.start + (place - low) / (high - low or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1) if self.low <= 10.0**n <= self.high]
        step = _nice((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _nice(step: float) -> float:
    if step <= 0 or not math.isfinite(step):
        return 1.0
    unit = 10.0 ** math.floor(math.log10(step))
    return next(n * unit for n in (1, 2, 5, 10) if n * unit >= step * 0.999)


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], *, marks: bool = True) -> str:
    shown = [s for s in series if s.points]
    if not shown:
        return _empty(title)
    across, up = _scales(x, y, shown)
    parts = [_frame(title, x, y, across, up)]
    for number, one in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in one.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        if marks and len(one.points) <= 40:
            parts += [
                f'<circle cx="{across(px):.1f}" cy="{up(py):.1f}" r="3" fill="{colour}"/>' for px, py in one.points
            ]
    return _svg(parts, [s.name for s in shown])


def histogram(title: str, x: Axis, series: Sequence[tuple[str, Sequence[float]]], *, num_bins: int = 40) -> str:
    """Shares of the sample per bin, so that runs of different length can be laid over each other."""
    samples = [(name, [v for v in values if math.isfinite(v)]) for name, values in series]
    pooled = [v for _, values in samples for v in values]
    if not pooled:
        return _empty(title)
    low, high = min(pooled), max(pooled)
    width = (high - low) / num_bins or 1.0
    outlines = [Series(name, _outline(values, low, width, num_bins)) for name, values in samples if values]
    return line_chart(title, x, Axis("share of requests"), outlines, marks=False)


def _outline(values: Sequence[float], low: float, width: float, num_bins: int) -> list[tuple[float, float]]:
    counts = [0] * num_bins
    for value in values:
        counts[min(int((value - low) / width), num_bins - 1)] += 1
    points = [(low, 0.0)]
    for number, count in enumerate(counts):
        share = count / len(values)
        points += [(low + number * width, share), (low + (number + 1) * width, share)]
    return [*points, (low + num_bins * width, 0.0)]


def cdf(title: str, x: Axis, series: Sequence[tuple[str, Sequence[float]]], *, max_points: int = 200) -> str:
    curves = []
    for name, values in series:
        ordered = sorted(v for v in values if math.isfinite(v))
        every = max(1, len(ordered) // max_points)
        points = [(value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered) if rank % every == 0]
        if ordered:
            points.append((ordered[-1], 1.0))
        curves.append(Series(name, points))
    return line_chart(title, x, Axis("share of requests"), curves, marks=False)


def stacked_bars(title: str, y: Axis, bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Each bar is a label and its parts from the bottom up; parts of one name share a colour."""
    if not bars:
        return _empty(title)
    names = list(dict.fromkeys(name for _, parts in bars for name, _ in parts))
    most = max(sum(value for _, value in parts) for _, parts in bars)
    up = _Scale(0, most * 1.05 or 1.0, HEIGHT - BOTTOM, TOP, False)
    slot = (WIDTH - LEFT - RIGHT) / len(bars)
    drawn = [_title(title), *_rows(y, up)]
    for place, (label, parts) in enumerate(bars):
        left, total = LEFT + place * slot + slot * 0.15, 0.0
        for name, value in parts:
            top, height = up(total + value), up(total) - up(total + value)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{slot * 0.7:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
            total += value
        drawn.append(_text(left + slot * 0.35, HEIGHT - BOTTOM + 16, label, "middle"))
    return _svg(drawn, names)


def page(title: str, sections: Sequence[str]) -> str:
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1360px; margin: 2em auto; padding: 0 1em; color: #222 }}
h1 {{ font-size: 1.5em }} h2 {{ font-size: 1.15em; margin-top: 2em }}
table {{ border-collapse: collapse; margin: 1em 0 }} td, th {{ padding: .25em .8em; border-bottom: 1px solid #ddd }}
td {{ text-align: right; font-variant-numeric: tabular-nums }} td:first-child, th:first-child {{ text-align: left }}
figure {{ display: inline-block; margin: 0 1em 1em 0 }} .bad {{ color: #a61c00; font-weight: bold }}
pre {{ background: #f6f6f6; padding: 1em; overflow: auto }}
</style></head><body><h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


# ── inside a drawing ───────────────────────────────────────────────────────────────────────────────────


def _scales(x: Axis, y: Axis, series: Sequence[Series]) -> tuple[_Scale, _Scale]:
    xs = [px for one in series for px, _ in one.points]
    ys = [py for one in series for _, py in one.points]
    x_low, x_high = _bounds(xs, x.is_log)
    y_low, y_high = _bounds([*ys, *([] if y.is_log else [0.0])], y.is_log)
    room = 1.0 if y.is_log else 1.05
    across = _Scale(x_low, x_high, LEFT, WIDTH - RIGHT, x.is_log)
    return across, _Scale(y_low, y_high * room, HEIGHT - BOTTOM, TOP, y.is_log)


def _bounds(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)] or [1.0]
    low, high = min(usable), max(usable)
    if low == high:
        return (low / 2, high * 2) if is_log else (min(low, 0.0), max(high, 0.0) or 1.0)
    return low, high


def _frame(title: str, x: Axis, y: Axis, across: _Scale, up: _Scale) -> str:
    parts = [_title(title), *_rows(y, up)]
    parts += [_text(across(tick), HEIGHT - BOTTOM + 16, _short(tick), "middle") for tick in across.ticks()]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.label, "middle"))
    return "".join(parts)


def _rows(y: Axis, up: _Scale) -> list[str]:
    parts = [_text(8, TOP - 6, y.label, "start")]
    for tick in up.ticks():
        level = f"{up(tick):.1f}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, up(tick) + 4, _short(tick), "end"))
    return parts


def _title(title: str) -> str:
    return _text(WIDTH / 2, 14, title, "middle", bold=True)


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"


def _svg(parts: Sequence[str], names: Sequence[str]) -> str:
    legend = "".join(_entry(number, name) for number, name in enumerate(names)) if len(names) > 1 else ""
    height = HEIGHT + (18 * math.ceil(len(names) / 2) if len(names) > 1 else 0)
    return (
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-size="12" font-family="system-ui, sans-serif" role="img">'
        + "".join(parts) + legend + "</svg></figure>"
    )  # fmt: skip


def _entry(number: int, name: str) -> str:
    x, y = LEFT + (number % 2) * 280, HEIGHT + 18 * (number // 2) + 8
    colour = COLOURS[number % len(COLOURS)]
    return f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>' + _text(x + 18, y, name, "start")


def _empty(title: str) -> str:
    return _svg([_title(title), _text(WIDTH / 2, HEIGHT / 2, "nothing was measured", "middle")], [])
