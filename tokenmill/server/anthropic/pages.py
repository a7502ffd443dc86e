"""Pagination of Anthropic's lists: at most `limit` entries, after `after_id` or before `before_id`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.server.body import refuse
from tokenmill.server.openai.pages import query_integer

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def page_of(entries: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return the requested page of a list; every entry has an `id`."""
    ids = [entry["id"] for entry in entries]
    limit = query_integer(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    first, last = 0, len(entries)
    after, before = (request.query_params.get(name) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        refuse("before_id", "does not combine with after_id")
    if after is not None:
        first = _position(ids, "after_id", after) + 1
    if before is not None:
        last = _position(ids, "before_id", before)
        first = max(0, last - limit)
    page = entries[first : min(last, first + limit)]
    return {
        "data": page,
        "has_more": first > 0 if before is not None else first + limit < last,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _position(ids: list[str], param: str, entry_id: str) -> int:
    if entry_id not in ids:
        refuse(param, "is not in this list")
    return ids.index(entry_id)
