"""Lists of the Responses API, page by page: at most `limit` entries after the one with the id `after`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.server.body import refuse

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def item_page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """The page of items that a request asks for; the newest come first unless `order` is asc."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", "must be asc or desc")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        refuse("limit", f"must be an integer between 1 and {MAX_LIMIT}")
    listed = items if order == "asc" else items[::-1]
    first = 0
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            refuse("after", "is not in this list")
        first = ids.index(after) + 1
    return list_object(listed[first : first + int(limit)], has_more=first + int(limit) < len(listed))


def list_object(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
