"""JSON Schemas of the Responses API, for /openapi.json."""

from __future__ import annotations

from typing import get_args

from tokenmill.server.openai.params import MAX_COUNT, MAX_TOP_LOGPROBS
from tokenmill.server.openai.responses.items import MAX_ITEMS
from tokenmill.server.openai.responses.parse import INCLUDABLE, SUMMARIES
from tokenmill.server.openai.schemas import FLAG, MODEL, TYPED, body_of, integer, maybe, number
from tokenmill.server.openai.tools import MAX_TOOLS, MODES
from tokenmill.server.routing import COUNT, TEXT, Schema, list_of, object_of
from tokenmill.types import Effort

ITEM: Schema = {"type": "object", "properties": {"type": TEXT, "id": TEXT, "role": TEXT}}
ITEMS: Schema = {"type": "array", "items": ITEM, "maxItems": MAX_ITEMS}
METADATA: Schema = maybe({"type": "object", "additionalProperties": TEXT})
MAYBE_TEXT: Schema = {"type": ["string", "null"]}

RESPONSE_BODY = body_of(
    ["model"],
    {
        "model": MODEL,
        "input": maybe({"anyOf": [TEXT, ITEMS]}),
        "instructions": MAYBE_TEXT,
        "previous_response_id": MAYBE_TEXT,
        "conversation": maybe({"anyOf": [TEXT, {"type": "object", "required": ["id"], "properties": {"id": TEXT}}]}),
        "stream": FLAG,
        "store": FLAG,
        "background": FLAG,
        "max_output_tokens": integer(1, MAX_COUNT),
        "temperature": number(0.0, 2.0),
        "top_p": number(0.0, 1.0),
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "include": maybe({"type": "array", "items": {"enum": list(INCLUDABLE)}}),
        "reasoning": maybe(
            {
                "type": "object",
                "properties": {
                    "effort": maybe({"enum": list(get_args(Effort))}),
                    "summary": maybe({"enum": list(SUMMARIES)}),
                },
            }
        ),
        "text": maybe({"type": "object", "properties": {"format": maybe(TYPED)}}),
        "tools": maybe({"type": "array", "items": TYPED, "maxItems": MAX_TOOLS}),
        "tool_choice": maybe({"anyOf": [{"enum": list(MODES)}, TYPED]}),
        "parallel_tool_calls": FLAG,
        "truncation": {"enum": ["auto", "disabled", None]},
        "metadata": METADATA,
    },
    {"model": "smollm2:135m", "input": "What is the capital of France?"},
)
CONVERSATION_BODY = body_of(
    [],
    {"items": maybe(ITEMS), "metadata": METADATA},
    {"items": [{"type": "message", "role": "user", "content": "My name is Ada."}], "metadata": {"topic": "names"}},
)
METADATA_BODY = body_of(["metadata"], {"metadata": METADATA}, {"metadata": {"topic": "names"}})
ITEMS_BODY = body_of(
    ["items"], {"items": ITEMS}, {"items": [{"type": "message", "role": "user", "content": "My name is Ada."}]}
)

MAYBE_OBJECT: Schema = {"type": ["object", "null"]}
RESPONSE_REPLY = object_of(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    error=MAYBE_OBJECT,
    incomplete_details=MAYBE_OBJECT,
    instructions=MAYBE_TEXT,
    metadata={"type": "object"},
    model=TEXT,
    output=list_of(ITEM),
    parallel_tool_calls={"type": "boolean"},
    temperature={"type": "number"},
    tool_choice={"anyOf": [TEXT, {"type": "object"}]},
    tools=list_of({"type": "object"}),
    top_p={"type": "number"},
    usage=MAYBE_OBJECT,
)
RESPONSE_STREAM = (
    "Done. With `stream`: named events, numbered from 0; the last is response.completed, .incomplete or .failed."
)
COUNT_REPLY = object_of(object={"const": "response.input_tokens"}, input_tokens=COUNT)
DELETED_REPLY = object_of(id=TEXT, object=TEXT, deleted={"const": True})
ITEMS_REPLY = object_of(
    object={"const": "list"}, data=list_of(ITEM), first_id=MAYBE_TEXT, last_id=MAYBE_TEXT, has_more={"type": "boolean"}
)
CONVERSATION_REPLY = object_of(id=TEXT, object={"const": "conversation"}, created_at=COUNT, metadata={"type": "object"})
