"""A report as one HTML file: what it is about, tables, charts. No script, and nothing from elsewhere.

    Heading: what was asked, where, with which lengths, when, by which command
    matrix: names × figures, a mark where one is better or worse than the first

The page fills a wide window with several charts in a row and fits a phone; it follows the reader's choice of light or
dark. On a narrow screen titles of columns wrap, marks stand below their values, and a row of a table with many columns
becomes a list; a table that is wider all the same scrolls by itself.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --panel: #f6f8fa;
  --good: #1a7f37; --bad: #b42318;
  --series-0: #0b5394; --series-1: #c2410c; --series-2: #2f7d32; --series-3: #8a5a00;
  --series-4: #6d4fb3; --series-5: #0f7f8c; --series-6: #ad3a78; --series-7: #5b6470 }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1117; --ink: #e6edf3; --soft: #9da7b1; --line: #30363d;
  --panel: #161b22; --good: #56d364; --bad: #ff7b72;
  --series-0: #6cb2ff; --series-1: #ff9166; --series-2: #7fd486; --series-3: #e3b341;
  --series-4: #c3a6ff; --series-5: #5fd0dd; --series-6: #ff8fc4; --series-7: #aab4c0 } }
* { box-sizing: border-box }
body { font: 15px/1.45 Arial, "Liberation Sans", Helvetica, sans-serif; max-width: 1800px; margin: 0 auto;
  padding: 20px 16px 48px; color: var(--ink); background: var(--bg); overflow-wrap: anywhere }
h1 { font-size: 1.45em; margin: 0 0 .4em } h2 { font-size: 1.15em; margin: 1.8em 0 .6em }
dl.facts { display: flex; flex-wrap: wrap; gap: .2em 2em; margin: 0 0 .8em } dl.facts div { display: flex; gap: .5em }
dt { color: var(--soft); white-space: nowrap } dd { margin: 0 }
code, pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .7em 1em; margin: .6em 0;
  white-space: pre-wrap }
.verdict { font-size: 1.1em; border-left: 4px solid var(--series-0); padding: .3em .8em; margin: .8em 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: .4em 0 1em }
td, th { padding: .3em .8em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  overflow-wrap: break-word }
th { color: var(--soft); font-weight: normal; white-space: normal; vertical-align: bottom }
td { font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left; padding-left: 0; white-space: normal }
table.words td { text-align: left; white-space: normal } table.words td:first-child { color: var(--soft);
  white-space: nowrap }
tr.group td { font-weight: bold; border-bottom: 0; padding-top: .9em } mark { background: none; font-size: .9em }
details { margin: .4em 0 } summary { cursor: pointer } .good, mark.good { color: var(--good) } .bad, mark.bad {
  color: var(--bad) } .soft { color: var(--soft) }
.charts { display: grid; gap: 20px 28px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
@media (min-width: 1240px) { .charts { grid-template-columns: repeat(var(--columns), 1fr) } }
figure { margin: 0; max-width: 880px; min-width: 0; container-type: inline-size } figcaption { font-weight: bold }
figcaption .unit { font-weight: normal; color: var(--soft) }
ul.legend { display: flex; flex-wrap: wrap; gap: .1em 1.2em; list-style: none; margin: .3em 0; padding: 0;
  font-size: 13px }
ul.legend li { min-width: 0 } .swatch { margin-right: .5em; vertical-align: middle; flex: none }
@media (max-width: 1000px) { td, th { padding: .3em .45em } table.wide { font-size: 14px } }
@media (max-width: 600px) { table { width: 100%; font-size: 13px }
  td, th { padding: .3em .25em } td:last-child, th:last-child { padding-right: 0 } td mark { display: block;
  font-size: 12px } td mark.soft { white-space: normal }
  table.wide, table.wide tbody, table.wide tr { display: block } table.wide tr:first-child { display: none }
  table.wide td { display: flex; gap: .5em; padding: .3em 0; font-size: 15px }
  table.wide td::before { content: attr(data-title); color: var(--soft); margin-right: auto }
  table.wide td:first-child { font-weight: bold; padding-top: .8em } table.wide mark { display: inline }
  table.wide td:first-child::before { content: none } table.wide td:first-child:empty { display: none } }
svg[data-place] { display: none; width: 100%; height: auto } svg[data-place="narrow"] { display: block; max-width:
  500px }
@container (min-width: 500px) { svg[data-place="narrow"] { display: none } svg[data-place="wide"] { display: block } }
"""


WIDE_COLUMNS = 6  # a table with more of them is a list of lists on a phone


@dataclass(frozen=True)
class Heading:
    """The heading of a page; `facts` are pairs of a name and a value, empty values are left out."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    command: str = ""
    verdict: str = ""

    def html(self) -> str:
        known = [(html.escape(name), html.escape(value)) for name, value in self.facts if value]
        rows = [f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in known]
        facts = f'<dl class="facts">{"".join(rows)}</dl>' if rows else ""
        command = f"<pre>{html.escape(self.command)}</pre>" if self.command else ""
        verdict = f'<p class="verdict">{html.escape(self.verdict)}</p>' if self.verdict else ""
        return f"<h1>{html.escape(self.title)}</h1>{facts}{verdict}{command}"


@dataclass(frozen=True)
class Cell:
    """A value of a matrix; `change` says how it compares with the first one, in words."""

    text: str
    change: str = ""
    is_better: bool | None = None  # None: no better and no worse, or not for a machine to say


@dataclass(frozen=True)
class Group:
    """Rows of a matrix that belong together under a name."""

    name: str
    rows: Sequence[tuple[str, Sequence[Cell]]] = field(default_factory=tuple)


def page(heading: Heading, sections: Sequence[str]) -> str:
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(heading.title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>{STYLE}</style></head><body>{heading.html()}
{body}
</body></html>
"""


def charts(drawn: Sequence[str]) -> str:
    """Charts in as many columns as the page has room for; on a wide one in full rows, where their number allows it."""
    columns = {1: 1, 2: 2, 4: 2, 8: 4}.get(len(drawn), 3)
    return f'<div class="charts" style="--columns: {columns}">{"".join(drawn)}</div>'


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, is_words: bool = False) -> str:
    """A table of figures, or of words in two columns."""
    found = [(row[0], [Cell(text) for text in row[1:]]) for row in rows]
    return _table(titles, [Group("", found)], kind="words" if is_words else "")


def matrix(titles: Sequence[str], groups: Sequence[Group]) -> str:
    """Figures by name, with marks for better and worse."""
    return _table(titles, groups, kind="")


def _table(titles: Sequence[str], groups: Sequence[Group], *, kind: str) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = [f"<tr>{head}</tr>"] if any(titles) else []
    is_wide = len(titles) > WIDE_COLUMNS
    for group in groups:
        if group.name:
            lines.append(f'<tr class="group"><td colspan="{len(titles)}">{html.escape(group.name)}</td></tr>')
        for name, cells in group.rows:
            named = [f' data-title="{html.escape(title)}"' if is_wide else "" for title in titles[1:]]
            shown = "".join(f"<td{title}>{_cell(cell)}</td>" for title, cell in zip(named, cells, strict=True))
            lines.append(f"<tr><td>{html.escape(name)}</td>{shown}</tr>")
    kinds = " ".join(filter(None, (kind, "wide" if is_wide else "")))
    attribute = f' class="{kinds}"' if kinds else ""
    return f'<div class="scroll"><table{attribute}>{"".join(lines)}</table></div>'


def _cell(cell: Cell) -> str:
    if not cell.change:
        return html.escape(cell.text)
    kind = "soft" if cell.is_better is None else "good" if cell.is_better else "bad"
    return f'{html.escape(cell.text)} <mark class="{kind}">{html.escape(cell.change)}</mark>'


def change_of(first: float | None, value: float | None, *, more_is_better: bool | None) -> tuple[str, bool | None]:
    """Compare a value with the first one: in words, and whether it is better. Less than one percent is equal."""
    if not first or value is None:
        return "", None
    ratio = value / first
    if abs(ratio - 1) < 0.01:
        return "=", None
    shown = f"{ratio:.1f}×" if ratio >= 2 else f"{ratio - 1:+.0%}".replace("-", "−")
    if more_is_better is None:
        return shown, None
    is_better = (ratio > 1) == more_is_better
    return f"{'▲' if is_better else '▼'} {shown}", is_better


def today() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
