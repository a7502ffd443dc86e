"""Charts as SVG text, drawn by Vega-Lite without a browser; a page that holds them needs no script.

    Series(name, points)  ─► line_chart / histogram / cdf / bars / stacked_bars ─► a <figure> of HTML

A chart is a Vega-Lite specification, which `vl-convert` (one package with Vega inside, the extra `pages`) turns into
SVG. Altair would write the same JSON through classes, and bring data frames that nothing here needs. Title and legend
are HTML around the drawing: they wrap where the page is narrow, and so never overlap. Every chart is drawn for a narrow
and for a wide place; the page's style sheet shows the one that fits. Colours are variables of that style sheet, one set
for light and one for dark; lines differ in their dashes too, for prints and for readers who can't tell colours apart.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidConfig

NARROW, WIDE = (360, 230), (640, 280)  # pixels
VALUE_PIXELS = 52  # of a number at the end of a bar
FONT = "Arial, Liberation Sans, Helvetica, sans-serif"  # the converter measures by metrics that these share
COLOURS = ("#0b5394", "#c2410c", "#2f7d32", "#8a5a00", "#6d4fb3", "#0f7f8c", "#ad3a78", "#5b6470")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 3], [4, 2], [1, 3], [10, 2, 2, 2])
INK, SOFT, LINE, BAD = "#1f2328", "#59636e", "#d8dee4", "#b42318"
VARIABLES = {
    **{colour: f"var(--series-{number})" for number, colour in enumerate(COLOURS)},
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    BAD: "var(--bad)",
}
STYLE = {
    "font": FONT,
    "background": None,
    "view": {"stroke": None},
    "axis": {"labelColor": SOFT, "titleColor": SOFT, "gridColor": LINE, "domainColor": LINE, "tickColor": LINE,
             "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelFlush": False},
    "header": {"labelColor": INK, "labelFontSize": 12, "title": None},
    "text": {"color": INK, "fontSize": 12},
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    label: str
    is_log: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar with its name beside it; bars of one group stand together under the group's name."""

    group: str
    name: str
    value: float


# ── kinds of charts ──────────────────────────────────────────────────────────────────────────────────


def line_chart(
    title: str, x: Axis, y: Axis, series: Sequence[Series], *, marks: bool = True, limit: float | None = None
) -> str:
    """Lines; `limit` is a value that none should exceed, drawn across."""
    shown = [s for s in series if s.points]
    if not shown:
        return _empty(title)
    names = [s.name for s in shown]
    places = [(s.name, px, py) for s in shown for px, py in s.points if _drawable(px, py, x, y)]
    rows = [{"x": px, "y": py, "series": name} for name, px, py in places]
    colour = {"field": "series", "type": "nominal", "legend": None}
    encoding = {
        "x": _quantity("x", x, [px for _, px, _ in places]),
        "y": _quantity("y", y, [py for _, _, py in places], starts_at_zero=True),
        "color": {**colour, "scale": {"domain": names, "range": _cycled(COLOURS, names)}},
        "strokeDash": {**colour, "scale": {"domain": names, "range": _cycled(DASHES, names)}},
    }
    has_points = marks and max(len(s.points) for s in shown) <= 40
    point = {"filled": True, "size": 30} if has_points else False
    layers: list[dict[str, Any]] = [{"mark": {"type": "line", "point": point, "strokeWidth": 2}, "encoding": encoding}]
    if limit is not None:
        layers += _limit(limit)
    return _figure(title, {"data": {"values": rows}, "layer": layers}, names)


def _limit(limit: float) -> list[dict[str, Any]]:
    once: dict[str, Any] = {"values": [{}]}  # not for every row
    place = {"y": {"datum": limit}}
    rule = {"type": "rule", "color": BAD, "strokeDash": [4, 3], "strokeWidth": 1.5}
    words = {"type": "text", "text": f"limit {limit:g}", "align": "right", "baseline": "bottom", "dy": -3, "color": BAD}
    return [
        {"data": once, "mark": rule, "encoding": place},
        {"data": once, "mark": words, "encoding": {**place, "x": {"value": "width"}}},
    ]


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


def bars(title: str, unit: str, values: Sequence[Bar], *, is_development: bool = False) -> str:
    """Horizontal bars, each with its name and its value; names keep their colours from group to group.

    The longest bar of a group fills it, so that bars of one group can be compared however small its values are; the
    values are written, and need no axis. `is_development`: the bars are one thing at several times, so they have one
    colour."""
    if not values:
        return _empty(title)
    names = list(dict.fromkeys(bar.name for bar in values))
    longest: dict[str, float] = {}
    for bar in values:
        longest[bar.group] = max(bar.value, longest.get(bar.group, 0.0))
    rows = [{"group": bar.group, "name": bar.name, "share": bar.value / (longest[bar.group] or 1.0),
             "shown": short(bar.value)} for bar in values]  # fmt: skip
    encoding = {
        "y": {"field": "name", "type": "nominal", "sort": names, "axis": _names_axis()},
        "x": {"field": "share", "type": "quantitative", "axis": None, "scale": {"domain": [0, 1]}},
    }
    colours = [COLOURS[0]] * len(names) if is_development else _cycled(COLOURS, names)
    colour = {"field": "name", "type": "nominal", "legend": None, "scale": {"domain": names, "range": colours}}
    spec = {
        "layer": [
            {"mark": {"type": "bar", "height": {"band": 0.72}}, "encoding": {"color": colour}},
            {"mark": {"type": "text", "align": "left", "dx": 4}, "encoding": {"text": {"field": "shown"}}},
        ],
        "encoding": encoding,
        "height": {"step": 24},
    }
    groups = list(dict.fromkeys(bar.group for bar in values))
    if groups == [""]:
        return _figure(title, {"data": {"values": rows}, **spec}, [], unit=unit, beside=_longest(names))
    header = {"labelOrient": "top", "labelAnchor": "start", "labelFontWeight": "bold", "title": None}
    facet = {"field": "group", "type": "nominal", "sort": groups, "header": header, "title": None}
    whole = {"data": {"values": rows}, "facet": {"row": facet}, "spec": spec, "spacing": 12}
    return _figure(title, whole, [], unit=unit, beside=_longest(names))


def stacked_bars(title: str, x: Axis, values: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Each bar is a name and its parts from the left; parts of one name share a colour."""
    if not values:
        return _empty(title)
    parts = list(dict.fromkeys(part for _, sizes in values for part, _ in sizes))
    names = [name for name, _ in values]
    rows = [{"name": name, "part": part, "size": size, "order": parts.index(part)}
            for name, sizes in values for part, size in sizes]  # fmt: skip
    totals = [sum(size for _, size in sizes) for _, sizes in values]
    spec = {
        "data": {"values": rows},
        "height": {"step": 44},
        "mark": {"type": "bar", "height": {"band": 0.6}},
        "encoding": {
            "y": {"field": "name", "type": "nominal", "sort": names, "axis": _names_axis()},
            "x": {**_quantity("size", x, [0.0, *totals], starts_at_zero=True), "stack": "zero"},
            "order": {"field": "order", "type": "quantitative"},
            "color": {"field": "part", "type": "nominal", "legend": None,
                      "scale": {"domain": parts, "range": _cycled(COLOURS, parts)}},
        },
    }  # fmt: skip
    return _figure(title, spec, parts, beside=_longest(names), always_legend=True)


# ── from a specification to a figure ─────────────────────────────────────────────────────────────────


def svg(spec: dict[str, Any]) -> str:
    """The drawing of a Vega-Lite specification."""
    try:
        import vl_convert
    except ImportError:
        raise InvalidConfig("pages need a package to draw charts", hint="pip install 'tokenmill[pages]'") from None
    return str(vl_convert.vegalite_to_svg(spec, vl_version="6.4"))


def require_charts() -> None:
    """Refuse a page before its measurement begins where the charts could not be drawn."""
    svg({"width": 1, "height": 1, "data": {"values": []}, "mark": "point"})


def short(value: float) -> str:
    """A number in three or four digits: 12.3k, 980, 0.042."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _figure(
    title: str,
    spec: dict[str, Any],
    names: Sequence[str],
    *,
    unit: str = "",
    beside: int = 0,
    always_legend: bool = False,
) -> str:
    """Title, legend and the drawing for both widths. `beside`: pixels that names take beside the bars."""
    drawings = []
    for kind, (width, height) in (("narrow", NARROW), ("wide", WIDE)):
        taken = min(beside, width // 2)
        drawings.append(_themed(svg(_sized(spec, width, height, taken)), kind, title))
    legend = _legend(names, is_line="layer" in spec) if len(names) > 1 or always_legend else ""
    of_unit = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    return f"<figure><figcaption>{html.escape(title)}{of_unit}</figcaption>{legend}{''.join(drawings)}</figure>"


def _sized(spec: dict[str, Any], width: int, height: int, beside: int) -> dict[str, Any]:
    slack = 8 + beside // 5  # a reader's font may be wider than the one that was measured by
    padding = {"left": slack, "right": 10, "top": 6, "bottom": 6}
    schema = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "config": STYLE, "padding": padding}
    if "facet" in spec:  # its cells have a width; names and padding come on top
        plot = width - beside - slack - 10
        return {**schema, **spec, "spec": {**_with_room(spec["spec"], plot), "width": plot}}
    if "height" in spec:
        sized = _with_room(spec, width - beside - slack - 18)
        return {**schema, "width": width, "autosize": {"type": "fit-x", "contains": "padding"}, **sized}
    return {**schema, "width": width, "height": height, "autosize": {"type": "fit", "contains": "padding"}, **spec}


def _with_room(spec: dict[str, Any], plot: int) -> dict[str, Any]:
    """Bars that leave room for the values at their ends, in a plot of so many pixels."""
    across = spec["encoding"]["x"]
    if "domain" not in across["scale"]:
        return spec
    most = across["scale"]["domain"][1] * plot / max(plot - VALUE_PIXELS, plot // 2)
    return {**spec, "encoding": {**spec["encoding"], "x": {**across, "scale": {"domain": [0, most]}}}}


def _themed(drawing: str, kind: str, title: str) -> str:
    """The drawing with colours of the page, scaled to the place it has."""
    drawing = re.sub(r'"(#[0-9a-f]{6})"', lambda m: f'"{VARIABLES.get(m[1], m[1])}"', drawing)
    drawing = drawing.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    size = re.search(r' width="[\d.]+" height="[\d.]+"', drawing)
    drawing = drawing.replace(size.group(), "", 1) if size else drawing
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" data-place="{kind}" ', 1)


def _legend(names: Sequence[str], *, is_line: bool) -> str:
    entries = []
    for number, name in enumerate(names):
        colour = f"var(--series-{number % len(COLOURS)})"
        dashes = " ".join(map(str, DASHES[number % len(DASHES)]))
        mark = (
            f'<path d="M0 5h26" stroke="{colour}" stroke-width="3" stroke-dasharray="{dashes}"/>'
            if is_line
            else f'<rect width="14" height="10" fill="{colour}"/>'
        )
        swatch = f'<svg class="swatch" aria-hidden="true" width="{26 if is_line else 14}" height="10">{mark}</svg>'
        entries.append(f"<li>{swatch}{html.escape(name)}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _quantity(field: str, axis: Axis, values: Sequence[float], *, starts_at_zero: bool = False) -> dict[str, Any]:
    finite = [v for v in values if math.isfinite(v)] or [1.0]
    scale: dict[str, Any] = {"type": "log", "nice": False} if axis.is_log else {"zero": starts_at_zero, "nice": True}
    if min(finite) == max(finite) and not axis.is_log:
        scale["zero"] = True
    pattern = "~s" if max(finite) >= 10_000 else ",~r" if max(finite) >= 100 else ".3~r"
    shown: dict[str, Any] = {"title": axis.label, "format": pattern, "labelOverlap": True}
    shown |= {"values": _doublings(min(finite), max(finite))} if axis.is_log else {"tickCount": 5}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": shown}


def _doublings(low: float, high: float) -> list[float]:
    """Powers of two from one value to the other; every second, third, … of them where there are many."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    return [2.0**power for power in range(first, last + 1, (last - first) // 8 + 1)]


def _names_axis() -> dict[str, Any]:
    """Names beside bars, broken at their commas; the part of a name that does not fit is cut off with dots."""
    return {"title": None, "labelExpr": "split(datum.label, ', ')", "labelLimit": 170, "ticks": False, "domain": False,
            "labelColor": INK, "labelPadding": 8}  # fmt: skip


def _longest(names: Sequence[str]) -> int:
    """Pixels that the longest line of these names takes, about."""
    return min(170, max(len(line) for name in names for line in name.split(", ")) * 7 + 8)


def _cycled(values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [values[number % len(values)] for number in range(len(names))]


def _drawable(x: float, y: float, across: Axis, up: Axis) -> bool:
    return all(math.isfinite(v) and (v > 0 or not axis.is_log) for v, axis in ((x, across), (y, up)))


def _empty(title: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption><p>nothing was measured</p></figure>"
