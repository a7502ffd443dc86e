"""Lists of OpenAI's API, page by page: at most `limit` entries, after the one whose id is `after`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.server.body import refuse


def query_integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    """An integer among the parameters of a URL."""
    given = request.query_params.get(name, str(default))
    if not given.isascii() or not given.isdigit() or not low <= int(given[:9]) <= high:
        refuse(name, f"must be an integer between {low} and {high}")
    return int(given)


def page_after(entries: list[dict[str, Any]], request: Request, limit: int) -> dict[str, Any]:
    """Return the page that a request asks for; every entry has an `id`."""
    after = request.query_params.get("after")
    first = 0
    if after is not None:
        found = next((place for place, entry in enumerate(entries) if entry["id"] == after), None)
        if found is None:
            refuse("after", "is not in this list")
        first = found + 1
    page = entries[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(entries),
    }
