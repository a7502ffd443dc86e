"""What /openapi.json says of answers: the fields that clients may rely on, and the one form of every error."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
MAYBE_OBJECT: Schema = {"type": ["object", "null"]}


def having(**properties: Schema) -> Schema:
    """An object that always has these fields, and perhaps more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


ERROR = having(error=having(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT))
FAILURES = {
    400: "The request is wrong; `param` names the field, `message` says why.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are waiting; try again after `Retry-After` seconds.",
    503: "Loading, stopping or starting again; try again after `Retry-After` seconds.",
}
READING = (400, 404, 408, 413, 415, 429, 503)


def answers(schema: Schema, failures: tuple[int, ...] = (), stream: str | None = None) -> Responses:
    """A route's responses. `default` has what any route may answer: a key that is missing, a mistake of ours."""
    content: Schema = {"application/json": {"schema": schema}}
    if stream is not None:
        content["text/event-stream"] = {}  # of events OpenAPI 3.1 can say nothing
    error = {"application/json": {"schema": ERROR}}
    return {
        200: {"description": stream or "Done.", "content": content},
        **{status: {"description": FAILURES[status], "content": error} for status in failures},
        "default": {"description": "Any other failure.", "content": error},
    }


USAGE = having(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
FINISH: Schema = {"enum": ["stop", "length"]}
ENVELOPE = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT, "usage": USAGE}
MESSAGE = having(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"})
CHAT_CHOICE = having(index=COUNT, message=MESSAGE, logprobs=MAYBE_OBJECT, finish_reason=FINISH)
TEXT_CHOICE = having(index=COUNT, text=TEXT, logprobs=MAYBE_OBJECT, finish_reason=FINISH)
VECTOR: Schema = {"anyOf": [many({"type": "number"}), {**TEXT, "description": "base64 of little-endian floats"}]}
EMBEDDING = having(object={"const": "embedding"}, index=COUNT, embedding=VECTOR)
CARD = having(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT)

CHAT = answers(
    having(object={"const": "chat.completion"}, choices=many(CHAT_CHOICE), **ENVELOPE),
    READING,
    "Done. With `stream`: `data:` lines, each a chat.completion.chunk, the last one `[DONE]`.",
)
COMPLETION = answers(
    having(object={"const": "text_completion"}, choices=many(TEXT_CHOICE), **ENVELOPE),
    READING,
    "Done. With `stream`: `data:` lines, each a text_completion, the last one `[DONE]`.",
)
EMBEDDINGS = answers(
    having(
        object={"const": "list"},
        data=many(EMBEDDING),
        model=TEXT,
        usage=having(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    READING,
)
MODELS = answers(having(object={"const": "list"}, data=many(CARD)), (503,))
MODEL = answers(CARD, (404, 503))
TOKENIZED = answers(having(count=COUNT, max_model_len=COUNT, tokens=many(COUNT)), READING)
DETOKENIZED = answers(having(prompt=TEXT), READING)
HEALTH = answers(having(status=TEXT, detail=TEXT), (503,))
PING = answers(having(status=TEXT))
VERSION = answers(having(version=TEXT))
ROOT = answers(having(name=TEXT, version=TEXT, docs=TEXT))
METRICS: Responses = {200: {"description": "Prometheus text format.", "content": {"text/plain": {"schema": TEXT}}}}
