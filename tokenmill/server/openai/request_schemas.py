"""What /openapi.json says of requests. Bodies are parsed by hand, so this names the fields that matter, with the ranges
that the parser itself holds. Null counts as absent everywhere; fields that are not named here are ignored or refused.
"""

from __future__ import annotations

from typing import Any

from tokenmill.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, NUMBERS, WHOLE_NUMBERS
from tokenmill.server.openai.messages import MAX_MESSAGES, MAX_PARTS, ROLES
from tokenmill.server.openai.sampling import MAX_BEST_OF, MAX_COUNT, MAX_LEGACY_LOGPROBS, MAX_TOP_LOGPROBS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": ["boolean", "null"]}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
PROMPTS: Schema = {"anyOf": [TEXT, TEXTS, TOKEN_IDS, {"type": "array", "items": TOKEN_IDS, "minItems": 1}]}
STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}


def maybe(schema: Schema) -> Schema:
    """Null is the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def whole(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def body_of(required: list[str], properties: Schema, example: Schema) -> Schema:
    """The description of a POST route's body."""
    schema = {"type": "object", "required": required, "properties": properties, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


MODEL: Schema = {**TEXT, "description": "The name that GET /v1/models shows."}
SAMPLING: Schema = {
    **{name: number(*bounds) for name, bounds in NUMBERS.items()},
    **{name: whole(*bounds) for name, bounds in WHOLE_NUMBERS.items()},
    "temperature": number(0.0, 2.0),
    "top_n_sigma": number(-1.0, NUMBERS["top_n_sigma"][1]),
    "top_k": whole(-1, MAX_COUNT),
    "seed": {"type": ["integer", "null"], "format": "int64"},
    "best_of": whole(1, MAX_BEST_OF),
    "stop": maybe({"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOP_STRINGS}]}),
    "stream": FLAG,
    "logit_bias": maybe(
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
    ),
}

PART: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "refusal"]}}}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [TEXT, {"type": "array", "items": PART, "minItems": 1, "maxItems": MAX_PARTS}, {"type": "null"}]
        },
    },
}
MESSAGES: Schema = {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}

CHAT = body_of(
    ["model", "messages"],
    {
        "model": MODEL,
        "messages": MESSAGES,
        **SAMPLING,
        "max_tokens": whole(1, MAX_COUNT),
        "max_completion_tokens": whole(1, MAX_COUNT),
        "logprobs": FLAG,
        "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
    },
    {"model": "smollm2:135m", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
)
COMPLETION = body_of(
    ["model", "prompt"],
    {
        "model": MODEL,
        "prompt": PROMPTS,
        **SAMPLING,
        "max_tokens": whole(0, MAX_COUNT),
        "logprobs": whole(0, MAX_LEGACY_LOGPROBS),
        "echo": FLAG,
    },
    {"model": "smollm2:135m", "prompt": "Once upon a time", "max_tokens": 16},
)
EMBEDDING = body_of(
    ["model", "input"],
    {
        "model": MODEL,
        "input": PROMPTS,
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": whole(1, MAX_COUNT),
        "pooling": {"enum": ["mean", "last", "cls", None]},
    },
    {"model": "smollm2:135m", "input": "a sentence"},
)
TOKENIZE = body_of(
    [],
    {
        "model": maybe(MODEL),
        "prompt": maybe(TEXT),
        "messages": maybe(MESSAGES),
        "add_special_tokens": FLAG,
        "return_token_strs": FLAG,
    },
    {"prompt": "Once upon a time"},
)
DETOKENIZE = body_of(
    ["tokens"],
    {"model": maybe(MODEL), "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    {"tokens": [1, 2]},
)
