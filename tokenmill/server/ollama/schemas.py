"""JSON Schemas of Ollama's endpoints, for /openapi.json: the important fields of bodies and replies."""

from __future__ import annotations

from tokenmill.server.ollama.parse import MAX_MESSAGES, MAX_TOP_LOGPROBS, ROLES
from tokenmill.server.openai.schemas import FLAG, body_of, integer, maybe
from tokenmill.server.routing import COUNT, TEXT, Schema, list_of, object_of

OBJECT: Schema = {"type": "object"}
MODEL: Schema = {**TEXT, "description": "The name of a model, as listed by GET /api/tags; `:latest` may be omitted."}
FORMAT: Schema = {"anyOf": [{"enum": ["", "json"]}, OBJECT, {"type": "null"}]}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"enum": list(ROLES)}, "content": maybe(TEXT), "thinking": maybe(TEXT)},
}
SHARED: Schema = {
    "model": MODEL,
    "stream": {**FLAG, "description": "Default: true."},
    "options": maybe({**OBJECT, "description": "Sampling: temperature, top_p, num_predict, seed, stop, …"}),
    "format": FORMAT,
    "keep_alive": {"type": ["string", "number", "null"]},
    "think": {"anyOf": [{"type": "boolean"}, {"enum": ["low", "medium", "high", "max", None]}]},
    "logprobs": FLAG,
    "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
    "shift": FLAG,
}
HELLO: Schema = {"role": "user", "content": "What is the capital of France?"}
CHAT_BODY = body_of(
    ["model"],
    {
        **SHARED,
        "messages": maybe({"type": "array", "items": MESSAGE, "maxItems": MAX_MESSAGES}),
        "tools": maybe(list_of(OBJECT)),
        "truncate": FLAG,
    },
    {"model": "smollm2:135m", "messages": [HELLO], "stream": False},
)
GENERATE_BODY = body_of(
    ["model"],
    {
        **SHARED,
        "prompt": maybe(TEXT),
        "system": maybe(TEXT),
        "template": maybe(TEXT),
        "suffix": maybe(TEXT),
        "raw": FLAG,
        "context": maybe(list_of(COUNT)),
    },
    {"model": "smollm2:135m", "prompt": "Why is the sky blue?", "stream": False},
)
EMBED_BODY = body_of(
    ["model"],
    {"model": MODEL, "input": {"anyOf": [TEXT, list_of(TEXT), {"type": "null"}]}, "truncate": FLAG},
    {"model": "smollm2:135m", "input": ["a sentence"]},
)
LEGACY_EMBED_BODY = body_of(
    ["model"], {"model": MODEL, "prompt": maybe(TEXT)}, {"model": "smollm2:135m", "prompt": "a"}
)
NAMED_BODY = body_of(["model"], {"model": MODEL}, {"model": "smollm2:135m"})
PULL_BODY = body_of(["model"], {"model": MODEL, "stream": FLAG}, {"model": "smollm2:135m"})
COPY_BODY = body_of(
    ["source", "destination"], {"source": TEXT, "destination": TEXT}, {"source": "a", "destination": "b"}
)
CREATE_BODY = body_of(
    ["model"],
    {
        "model": TEXT,
        "from": maybe(TEXT),
        "files": maybe(OBJECT),
        "system": maybe(TEXT),
        "template": maybe(TEXT),
        "parameters": maybe(OBJECT),
        "messages": maybe(list_of(MESSAGE)),
        "stream": FLAG,
    },
    {"model": "mario", "from": "smollm2:135m", "system": "You are Mario."},
)

# ── replies ────────────────────────────────────────────────────────────────────────────────────────────

STREAM = "Done. Streamed unless `stream` is false: one JSON object per line, the last one with `done`."
DONE = {"model": TEXT, "created_at": TEXT, "done": {"const": True}, "done_reason": TEXT}
CHAT_REPLY = object_of(message=object_of(role={"const": "assistant"}, content=TEXT), **DONE)
GENERATE_REPLY = object_of(response=TEXT, **DONE)
VECTOR = list_of({"type": "number"})
EMBED_REPLY = object_of(model=TEXT, embeddings=list_of(VECTOR), total_duration=COUNT)
LEGACY_EMBED_REPLY = object_of(embedding=VECTOR)
VERSION_REPLY = object_of(version=TEXT)
DETAILS = object_of(family=TEXT, format=TEXT, parameter_size=TEXT, quantization_level=TEXT)
LISTED = object_of(name=TEXT, model=TEXT, modified_at=TEXT, size=COUNT, digest=TEXT, details=DETAILS)
TAGS_REPLY = object_of(models=list_of(LISTED))
PS_REPLY = object_of(models=list_of(object_of(name=TEXT, expires_at=TEXT, size_vram=COUNT, context_length=COUNT)))
SHOW_REPLY = object_of(details=DETAILS, model_info=OBJECT, capabilities=list_of(TEXT), template=TEXT, modified_at=TEXT)
PROGRESS_REPLY = object_of(status=TEXT)
PROGRESS_STREAM = "Done. Streamed unless `stream` is false: one status per line, the last one `success` or an error."
NOTHING: Schema = {}
