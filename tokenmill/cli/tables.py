"""Tables for people (rich, on stdout) and the one JSON line for programs that ends them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec


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


def print_json_line(facts: dict[str, Any]) -> None:
    """One object on one line; NaN and infinities, which are no JSON, become null."""
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
    """For a table cell: thousands separated, a dash where nothing is known."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value * 100:.0f} %"
