"""Request bodies for the interactive documentation. Bodies are parsed by hand, so the schema names what matters."""

from __future__ import annotations

from typing import Any

NUMBER, INTEGER, TEXT, FLAG = {"type": "number"}, {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
SAMPLING = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "n": INTEGER,
    "seed": INTEGER,
    "max_tokens": INTEGER,
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "stream": FLAG,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
}


def body_of(required: list[str], properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": properties, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


CHAT = body_of(
    ["model", "messages"],
    {"model": TEXT, "messages": {"type": "array", "items": {"type": "object"}}, "logprobs": FLAG, **SAMPLING},
    {"model": "smollm2:135m", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
)
COMPLETION = body_of(
    ["model", "prompt"],
    {"model": TEXT, "prompt": {}, "echo": FLAG, "logprobs": INTEGER, **SAMPLING},
    {"model": "smollm2:135m", "prompt": "Once upon a time", "max_tokens": 16},
)
EMBEDDING = body_of(
    ["model", "input"],
    {
        "model": TEXT,
        "input": {},
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": INTEGER,
        "pooling": {"enum": ["mean", "last", "cls"]},
    },
    {"model": "smollm2:135m", "input": "a sentence"},
)
TOKENIZE = body_of(
    [],
    {"model": TEXT, "prompt": TEXT, "messages": {"type": "array"}, "add_special_tokens": FLAG},
    {"prompt": "Once upon a time"},
)
DETOKENIZE = body_of(["tokens"], {"model": TEXT, "tokens": {"type": "array", "items": INTEGER}}, {"tokens": [1, 2]})
