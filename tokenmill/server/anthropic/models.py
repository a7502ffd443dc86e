"""The models of a server in Anthropic's form, page by page."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from tokenmill.engine.status import ModelInfo
from tokenmill.server.anthropic.parse import EFFORTS
from tokenmill.server.body import refuse

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def model_card(info: ModelInfo) -> dict[str, Any]:
    return {
        "type": "model",
        "id": info.name,
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": info.max_context,
        "max_tokens": info.max_context,
        "capabilities": capabilities(info),
    }


def capabilities(info: ModelInfo) -> dict[str, Any]:
    """What the API offers with a model. What no model here has is said too: clients expect every key."""
    no, yes, thinks = {"supported": False}, {"supported": True}, {"supported": info.can_think}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": {**thinks, "clear_thinking_20251015": thinks},
        "effort": {**thinks, **{level: thinks for level in EFFORTS}},
        "image_input": no,
        "pdf_input": no,
        "server_tools": {**no, "code_execution": no, "web_search": no},
        "structured_outputs": yes,
        "thinking": {
            **thinks,
            "types": {"adaptive": yes, "between_tools": yes, "disabled": yes, "enabled": thinks},
        },
    }


def page_of(models: list[ModelInfo], request: Request) -> dict[str, Any]:
    """One page of the list: at most `limit` models, after `after_id` or before `before_id`."""
    names = [info.name for info in models]
    limit = _limit(request)
    first, last = 0, len(models)
    after, before = (request.query_params.get(name) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        refuse("before_id", "does not combine with after_id")
    if after is not None:
        first = _position(names, "after_id", after) + 1
    if before is not None:
        last = _position(names, "before_id", before)
        first = max(0, last - limit)
    page = models[first : min(last, first + limit)]
    has_more = first > 0 if before is not None else first + limit < last
    return {
        "data": [model_card(info) for info in page],
        "has_more": has_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MAX_LIMIT:
        refuse("limit", f"must be an integer between 1 and {MAX_LIMIT}")
    return int(given)


def _position(names: list[str], param: str, name: str) -> int:
    if name not in names:
        refuse(param, "is not the id of a model")
    return names.index(name)
