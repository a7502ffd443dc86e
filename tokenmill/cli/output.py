"""Terminal output other than answers: download progress, tables, readable sizes, JSON lines."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


NUMBERS_WIDTH = 48  # columns for size, speed, remaining time and a part of the bar


# ── download progress ───────────────────────────────────────────────────────────────────────────


class PullScreen:
    """Progress of a download: a bar per file on a terminal, plain lines elsewhere. A context manager, which removes the
    bar at its end."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> PullScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr)

    def begin(self, file: str, total_bytes: int | None, done_bytes: int, sha256: str | None = None) -> None:
        if sys.stderr.isatty():
            bar = self._shown()
            name = shortened(file, bar.console.width - NUMBERS_WIDTH)
            self._task = bar.add_task(name, total=total_bytes, completed=done_bytes)
        else:
            resumed = f", from {size(done_bytes)} on" if done_bytes else ""
            print(f"pulling {file} ({size(total_bytes or 0)}{resumed})", file=sys.stderr)

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, num_bytes)

    def end(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.stop_task(self._task)

    def _shown(self) -> Progress:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.progress import TransferSpeedColumn as Speed

            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        return self._bar


def shortened(name: str, width: int) -> str:
    """Shorten a name to a width by removing its middle; its end, such as a part number, is kept."""
    width = max(width, 16)
    return name if len(name) <= width else f"{name[: width // 2]}…{name[len(name) - (width - width // 2 - 1) :]}"


# ── formatting and columns ────────────────────────────────────────────────────────────────────────────────


def size(num_bytes: float) -> str:
    """Format bytes: 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def count(number: float) -> str:
    """Format a count: 134.5 M."""
    for unit in ("", " k", " M", " B"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"


def print_facts(rows: list[tuple[str, str]]) -> None:
    """Print two aligned columns as plain text."""
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        print(f"{label:{width}}  {text}" if text else label)


def print_table(titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    cells = [titles, *[tuple(str(cell) for cell in row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


# ── tables and JSON lines ─────────────────────────────────────────────────────────────────────────


def print_rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table) if console.is_terminal else Console(width=200).print(table)


def print_result(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print a result as a JSON line if requested, or if the output is a pipe."""
    if as_json or not sys.stdout.isatty():
        print_json_line(facts)


def print_json_line(facts: dict[str, Any]) -> None:
    """Print an object as one line of JSON; NaN and infinities become null."""
    print(msgspec.json.encode(finite(facts)).decode(), flush=True)


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a table, with thousands separators; a dash if unknown."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value * 100:.0f} %"
