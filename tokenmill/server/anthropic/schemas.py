"""JSON Schemas of Anthropic's endpoints, for /openapi.json.

Bodies are parsed by hand; the schemas describe the important fields, with the ranges of the parser. Null counts as
absent everywhere; fields that are not listed are ignored or refused.
"""

from __future__ import annotations

import re

from tokenmill.params import MAX_STOP_STRINGS
from tokenmill.server.anthropic.conversation import MAX_MESSAGES, ROLES
from tokenmill.server.anthropic.parse import EFFORTS, MAX_COUNT, THINKING_TYPES
from tokenmill.server.anthropic.tools import CHOICES, MAX_TOOLS
from tokenmill.server.routing import COUNT, TEXT, Schema, list_of, object_of

BLOCKS: Schema = {
    "anyOf": [TEXT, {"type": "array", "items": {"type": "object", "required": ["type"], "properties": {"type": TEXT}}}]
}
TURN: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": list(ROLES)}, "content": BLOCKS},
}
TOOL: Schema = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": TEXT,
        "description": TEXT,
        "input_schema": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
CONTENT: Schema = {
    "model": {**TEXT, "description": "The name of a model, as listed by GET /v1/models."},
    "messages": {"type": "array", "items": TURN, "minItems": 1, "maxItems": MAX_MESSAGES},
    "system": {"anyOf": [BLOCKS, {"type": "null"}]},
    "tools": {"type": ["array", "null"], "items": TOOL, "maxItems": MAX_TOOLS},
    "tool_choice": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": list(CHOICES)}, "name": TEXT, "disable_parallel_tool_use": {"type": "boolean"}},
    },
    "thinking": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {
            "type": {"enum": list(THINKING_TYPES)},
            "budget_tokens": {"type": "integer", "minimum": 1},
            "display": {"enum": ["summarized", "omitted", None]},
        },
    },
    "output_config": {
        "type": ["object", "null"],
        "properties": {"effort": {"enum": [*EFFORTS, None]}, "format": {"type": ["object", "null"]}},
    },
}
EXAMPLE: Schema = {
    "model": "smollm2:135m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
MESSAGES_BODY: Schema = {
    "type": "object",
    "required": ["model", "max_tokens", "messages"],
    "properties": {
        **CONTENT,
        "max_tokens": {"type": "integer", "minimum": 0, "maximum": MAX_COUNT},
        "stop_sequences": {
            "type": ["array", "null"],
            "items": {"type": "string", "minLength": 1},
            "maxItems": MAX_STOP_STRINGS,
        },
        "stream": {"type": ["boolean", "null"]},
        "temperature": {"type": ["number", "null"], "minimum": 0.0, "maximum": 1.0},
        "top_p": {"type": ["number", "null"], "minimum": 0.0, "maximum": 1.0},
        "top_k": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_COUNT},
    },
    "example": {**EXAMPLE, "max_tokens": 64},
}
COUNT_BODY: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": CONTENT,
    "example": EXAMPLE,
}

USAGE = object_of(
    input_tokens=COUNT, cache_creation_input_tokens=COUNT, cache_read_input_tokens=COUNT, output_tokens=COUNT
)
STOP_REASONS = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
BLOCK: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "thinking", "tool_use"]}},
}
MESSAGE_REPLY = object_of(
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content=list_of(BLOCK),
    stop_reason={"enum": STOP_REASONS},
    stop_sequence={"type": ["string", "null"]},
    usage=USAGE,
)
MESSAGES_STREAM = (
    "Done. With `stream`: events message_start, then content_block_start, content_block_delta and content_block_stop "
    "for each block, then message_delta and message_stop."
)
COUNT_REPLY = object_of(input_tokens=COUNT)
MODEL_REPLY = object_of(id=TEXT, type={"const": "model"}, display_name=TEXT, created_at=TEXT, lifecycle=TEXT)
MODELS_REPLY = object_of(data=list_of(MODEL_REPLY), has_more={"type": "boolean"})

# ── batches ────────────────────────────────────────────────────────────────────────────────────────────

MAX_REQUESTS = 50_000  # of a batch
CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
BATCH_REQUEST: Schema = {
    "type": "object",
    "required": ["custom_id", "params"],
    "properties": {"custom_id": {**TEXT, "pattern": f"^{CUSTOM_ID.pattern}$"}, "params": {"type": "object"}},
}
BATCH_BODY: Schema = {
    "type": "object",
    "required": ["requests"],
    "properties": {"requests": {"type": "array", "items": BATCH_REQUEST, "minItems": 1, "maxItems": MAX_REQUESTS}},
    "example": {"requests": [{"custom_id": "first", "params": {**EXAMPLE, "max_tokens": 64}}]},
}
BATCH_REPLY = object_of(
    id=TEXT,
    type={"const": "message_batch"},
    processing_status={"enum": ["in_progress", "canceling", "ended"]},
    request_counts=object_of(processing=COUNT, succeeded=COUNT, errored=COUNT, canceled=COUNT, expired=COUNT),
    created_at=TEXT,
    expires_at=TEXT,
    results_url={"type": ["string", "null"]},
)
BATCHES_REPLY = object_of(data=list_of(BATCH_REPLY), has_more={"type": "boolean"})
DELETED_REPLY = object_of(id=TEXT, type={"const": "message_batch_deleted"})
