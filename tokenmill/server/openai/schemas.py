"""JSON Schemas of OpenAI's endpoints, for /openapi.json.

Bodies are parsed by hand; the schemas describe the important fields, with the ranges of the parser. Null counts as
absent everywhere; fields that are not listed are ignored or refused. The schemas of replies list the fields that
clients may rely on.
"""

from __future__ import annotations

from typing import get_args

from tokenmill.params import INTEGERS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, NUMBERS
from tokenmill.server.openai.params import MAX_BEST_OF, MAX_COUNT, MAX_LEGACY_LOGPROBS, MAX_TOP_LOGPROBS
from tokenmill.server.openai.parse import MAX_MESSAGES, MAX_PARTS, ROLES
from tokenmill.server.openai.tools import MAX_TOOLS, MODES
from tokenmill.server.routing import COUNT, TEXT, Schema, list_of, object_of
from tokenmill.types import Effort

# ── bodies ─────────────────────────────────────────────────────────────────────────────────────────────

FLAG: Schema = {"type": ["boolean", "null"]}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
PROMPTS: Schema = {"anyOf": [TEXT, TEXTS, TOKEN_IDS, {"type": "array", "items": TOKEN_IDS, "minItems": 1}]}
STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}


def maybe(schema: Schema) -> Schema:
    """Return the schema of a field that may be null, which has the same meaning as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def body_of(required: list[str], properties: Schema, example: Schema) -> Schema:
    """Return the schema of a POST endpoint's body."""
    return {"type": "object", "required": required, "properties": properties, "example": example}


MODEL: Schema = {**TEXT, "description": "The name of a model, as listed by GET /v1/models."}
SAMPLING: Schema = {
    **{name: number(*bounds) for name, bounds in NUMBERS.items()},
    **{name: integer(*bounds) for name, bounds in INTEGERS.items()},
    "temperature": number(0.0, 2.0),
    "top_n_sigma": number(-1.0, NUMBERS["top_n_sigma"][1]),
    "top_k": integer(-1, MAX_COUNT),
    "seed": {"type": ["integer", "null"], "format": "int64"},
    "best_of": integer(1, MAX_BEST_OF),
    "stop": maybe({"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOP_STRINGS}]}),
    "stream": FLAG,
    "logit_bias": maybe(
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
    ),
}

PART: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "refusal"]}}}
CHAT_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [TEXT, {"type": "array", "items": PART, "minItems": 1, "maxItems": MAX_PARTS}, {"type": "null"}]
        },
    },
}
TYPED: Schema = {"type": "object", "required": ["type"], "properties": {"type": TEXT}}
TOOL: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["function", "custom"]}}}
MESSAGES: Schema = {"type": "array", "items": CHAT_MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}

CHAT_BODY = body_of(
    ["model", "messages"],
    {
        "model": MODEL,
        "messages": MESSAGES,
        **SAMPLING,
        "max_tokens": integer(1, MAX_COUNT),
        "max_completion_tokens": integer(1, MAX_COUNT),
        "logprobs": FLAG,
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "tools": maybe({"type": "array", "items": TOOL, "minItems": 1, "maxItems": MAX_TOOLS}),
        "tool_choice": maybe({"anyOf": [{"enum": list(MODES)}, TYPED]}),
        "parallel_tool_calls": FLAG,
        "reasoning_effort": maybe({"enum": list(get_args(Effort))}),
        "chat_template_kwargs": maybe({"type": "object"}),
    },
    {"model": "smollm2:135m", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
)
COMPLETION_BODY = body_of(
    ["model", "prompt"],
    {
        "model": MODEL,
        "prompt": PROMPTS,
        **SAMPLING,
        "max_tokens": integer(0, MAX_COUNT),
        "logprobs": integer(0, MAX_LEGACY_LOGPROBS),
        "echo": FLAG,
        "suffix": maybe(TEXT),
    },
    {"model": "smollm2:135m", "prompt": "Once upon a time", "max_tokens": 16},
)
EMBEDDING_BODY = body_of(
    ["model", "input"],
    {
        "model": MODEL,
        "input": PROMPTS,
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": integer(1, MAX_COUNT),
        "pooling": {"enum": ["mean", "last", "cls", None]},
    },
    {"model": "smollm2:135m", "input": "a sentence"},
)
TOKENIZE_BODY = body_of(
    [],
    {
        "model": maybe(MODEL),
        "prompt": maybe(TEXT),
        "messages": maybe(MESSAGES),
        "content": {**maybe(TEXT), "description": "llama.cpp's field"},
        "inputs": {**maybe(TEXT), "description": "TGI's field"},
        "add_special_tokens": FLAG,
        "return_token_strs": FLAG,
    },
    {"prompt": "Once upon a time"},
)
DETOKENIZE_BODY = body_of(
    ["tokens"],
    {"model": maybe(MODEL), "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    {"tokens": [1, 2]},
)

# ── replies ────────────────────────────────────────────────────────────────────────────────────────────

MAYBE_OBJECT: Schema = {"type": ["object", "null"]}
USAGE = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
FINISH: Schema = {"enum": ["stop", "length"]}
CHAT_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
ENVELOPE = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT, "usage": USAGE}
ANSWER = object_of(role={"const": "assistant"}, content={"type": ["string", "null"]}, refusal={"type": "null"})
CHAT_CHOICE = object_of(index=COUNT, message=ANSWER, logprobs=MAYBE_OBJECT, finish_reason=CHAT_FINISH)
TEXT_CHOICE = object_of(index=COUNT, text=TEXT, logprobs=MAYBE_OBJECT, finish_reason=FINISH)
VECTOR: Schema = {"anyOf": [list_of({"type": "number"}), {**TEXT, "description": "base64 of little-endian floats"}]}
EMBEDDING = object_of(object={"const": "embedding"}, index=COUNT, embedding=VECTOR)

CHAT_REPLY = object_of(object={"const": "chat.completion"}, choices=list_of(CHAT_CHOICE), **ENVELOPE)
CHAT_STREAM = "Done. With `stream`: `data:` lines, each a chat.completion.chunk, the last one `[DONE]`."
COMPLETION_REPLY = object_of(object={"const": "text_completion"}, choices=list_of(TEXT_CHOICE), **ENVELOPE)
COMPLETION_STREAM = "Done. With `stream`: `data:` lines, each a text_completion, the last one `[DONE]`."
EMBEDDING_REPLY = object_of(
    object={"const": "list"},
    data=list_of(EMBEDDING),
    model=TEXT,
    usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
)
MODEL_REPLY = object_of(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    max_model_len={**COUNT, "type": ["integer", "null"]},
    status=object_of(value=TEXT),
)
MODELS_REPLY = object_of(object={"const": "list"}, data=list_of(MODEL_REPLY))
PIECE: Schema = {"anyOf": [TEXT, list_of(COUNT)]}
TOKENIZE_REPLY: Schema = {
    "anyOf": [
        object_of(count=COUNT, max_model_len=COUNT, tokens=list_of(COUNT)),
        object_of(tokens={"anyOf": [list_of(COUNT), list_of(object_of(id=COUNT, piece=PIECE))]}),
        list_of(object_of(id=COUNT, text=TEXT, start=COUNT, stop=COUNT)),
    ]
}
DETOKENIZE_REPLY = object_of(prompt=TEXT, content=TEXT)

# ── files and batches ──────────────────────────────────────────────────────────────────────────────────

MAYBE_MOMENT: Schema = {"type": ["integer", "null"]}
FILE_BODY: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch", "user_data", "assistants", "vision", "evals"]},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
FILE_REPLY = object_of(
    id=TEXT,
    object={"const": "file"},
    bytes=COUNT,
    created_at=COUNT,
    expires_at=MAYBE_MOMENT,
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
)
PAGE = {"object": {"const": "list"}, "has_more": {"type": "boolean"}}
FILES_REPLY = object_of(data=list_of(FILE_REPLY), **PAGE)
FILE_DELETED_REPLY = object_of(id=TEXT, object={"const": "file"}, deleted={"const": True})
BATCH_BODY = body_of(
    ["input_file_id", "endpoint", "completion_window"],
    {
        "input_file_id": TEXT,
        "endpoint": TEXT,
        "completion_window": {**TEXT, "description": "`24h`, or another time of up to 30 days: `90m`, `1h`, `7d`"},
        "metadata": maybe({"type": "object", "maxProperties": 16, "additionalProperties": {**TEXT, "maxLength": 512}}),
        "output_expires_after": maybe({"type": "object"}),
    },
    {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
)
BATCH_REPLY = object_of(
    id=TEXT,
    object={"const": "batch"},
    endpoint=TEXT,
    errors=MAYBE_OBJECT,
    input_file_id=TEXT,
    completion_window=TEXT,
    status=TEXT,
    output_file_id={"type": ["string", "null"]},
    error_file_id={"type": ["string", "null"]},
    created_at=COUNT,
    expires_at=COUNT,
    in_progress_at=MAYBE_MOMENT,
    completed_at=MAYBE_MOMENT,
    request_counts=object_of(total=COUNT, completed=COUNT, failed=COUNT),
    metadata=MAYBE_OBJECT,
)
BATCHES_REPLY = object_of(data=list_of(BATCH_REPLY), **PAGE)
