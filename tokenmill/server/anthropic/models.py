"""The descriptions of models in Anthropic's form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tokenmill.engine.status import ModelInfo
from tokenmill.server.anthropic.parse import EFFORTS


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
    """Return a model's capabilities, including those that no model here has: clients expect every key."""
    no, yes, thinks = {"supported": False}, {"supported": True}, {"supported": info.can_think}
    return {
        "batch": yes,
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
