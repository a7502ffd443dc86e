"""Lists of Anthropic's API, page by page: at most `limit` entries, after `after_id` or before `before_id`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.server.body import refuse

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def page_of(entries: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return the page that a request asks for; every entry has an `id`."""
    ids = [entry["id"] for entry in entries]
    limit = _limit(request)
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


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MAX_LIMIT:
        refuse("limit", f"must be an integer between 1 and {MAX_LIMIT}")
    return int(given)


def _position(ids: list[str], param: str, wanted: str) -> int:
    if wanted not in ids:
        refuse(param, "is not in this list")
    return ids.index(wanted)
