"""Pagination of the Responses API's lists: at most `limit` items, after the one whose id is `after`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.server.body import refuse
from tokenmill.server.openai.pages import query_integer

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def item_page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return the requested page of items; the newest come first unless `order` is asc."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", "must be asc or desc")
    limit = query_integer(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    ordered = items if order == "asc" else items[::-1]
    first = 0
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            refuse("after", "is not in this list")
        first = ids.index(after) + 1
    return list_object(ordered[first : first + limit], has_more=first + limit < len(ordered))


def list_object(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
