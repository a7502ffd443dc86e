"""Pagination of OpenAI's lists: at most `limit` entries, after the one whose id is `after`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.server.body import refuse

MAX_DIGITS = 9


def parse_digits(text: str) -> int | None:
    """Convert at most nine ASCII digits to an integer; None for any other text."""
    return int(text) if len(text) <= MAX_DIGITS and text.isascii() and text.isdigit() else None


def query_integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    """Return an integer query parameter."""
    value = parse_digits(request.query_params.get(name, str(default)))
    if value is None or not low <= value <= high:
        refuse(name, f"must be an integer between {low} and {high}")
    return value


def page_after(entries: list[dict[str, Any]], request: Request, limit: int) -> dict[str, Any]:
    """Return the requested page of a list; every entry has an `id`."""
    after = request.query_params.get("after")
    first = 0
    if after is not None:
        position = next((position for position, entry in enumerate(entries) if entry["id"] == after), None)
        if position is None:
            refuse("after", "is not in this list")
        first = position + 1
    page = entries[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(entries),
    }
