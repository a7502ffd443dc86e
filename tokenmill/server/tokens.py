"""/tokenize and /detokenize, which three dialects share: the field with the text determines the dialect.

| field | dialect | reply |
|---|---|---|
| prompt, messages | vLLM | `{count, max_model_len, tokens, token_strs?}` |
| content | llama.cpp | `{tokens: [id]}`, or `[{id, piece}]` `with_pieces` |
| inputs | TGI | `[{id, text, start, stop}]`, positions counted in characters |

A long text is tokenised in a thread. The reply of /detokenize has the text in the fields of both vLLM and llama.cpp.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.engine.input_processor import require_plausible_length
from tokenmill.engine.text_workers import text_size
from tokenmill.server.body import BodyFields, refuse
from tokenmill.server.gate import ServedEngine
from tokenmill.server.openai import schemas
from tokenmill.server.openai.parse import parse_detokenize, parse_tokenize
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response
from tokenmill.server.variants import FoundModel

TAG = "Tokens"


@dataclass(frozen=True)
class TokenizeCall:
    """A text to tokenise: its length, and the function that makes the reply."""

    num_characters: int
    reply: Callable[[], Any]


def token_endpoints(context: RouteContext) -> list[Endpoint]:
    async def tokenize(request: Request) -> Response:
        call = await context.parsed(request, lambda body: tokenize_call(body, context))
        return json_response(await context.workers.run(call.num_characters, call.reply))

    async def detokenize(request: Request) -> Response:
        def parse(body: dict[str, Any]) -> tuple[FoundModel, list[int]]:
            model = context.registry.find(BodyFields(body).text("model"), is_required=False)
            return model, parse_detokenize(BodyFields(body), model.info)

        model, ids = await context.parsed(request, parse)
        text = await context.workers.run(len(ids), lambda: model.engine.detokenize(ids))
        return json_response({"prompt": text, "content": text})

    return [
        Endpoint("POST", "/tokenize", tokenize, TAG, schemas.TOKENIZE_REPLY, READING, schemas.TOKENIZE_BODY),
        Endpoint("POST", "/detokenize", detokenize, TAG, schemas.DETOKENIZE_REPLY, READING, schemas.DETOKENIZE_BODY),
    ]


def tokenize_call(body: dict[str, Any], context: RouteContext) -> TokenizeCall:
    fields = BodyFields(body)
    model = context.registry.find(fields.text("model"), is_required=False)
    present = [name for name in ("prompt", "messages", "content", "inputs") if fields.get(name) is not None]
    if len(present) != 1:
        refuse("prompt", "or messages, content or inputs is required, and only one of them")
    if present[0] == "content":
        return _llamacpp_call(fields, model)
    return _tgi_call(fields, model) if present[0] == "inputs" else _vllm_call(fields, model)


def _text(fields: BodyFields, name: str, model: FoundModel) -> str:
    text = fields.required_text(name)
    require_plausible_length(len(text), model.info.max_context, name)
    return text


# ── vLLM ───────────────────────────────────────────────────────────────────────────────────────────────


def _vllm_call(fields: BodyFields, model: FoundModel) -> TokenizeCall:
    prompt, engine, info = parse_tokenize(fields, model.info), model.engine, model.info
    adds_special_tokens = fields.boolean("add_special_tokens", True)
    wants_texts = fields.boolean("return_token_strs")

    def reply() -> dict[str, Any]:
        ids = engine.tokenize(prompt, adds_special_tokens) if isinstance(prompt, str) else engine.tokenize_chat(prompt)
        content: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_context, "tokens": ids}
        if wants_texts:
            content["token_strs"] = [raw.decode("utf-8", "replace") for raw in engine.token_bytes(ids)]
        return content

    return TokenizeCall(len(prompt) if isinstance(prompt, str) else text_size(prompt), reply)


# ── llama.cpp ──────────────────────────────────────────────────────────────────────────────────────────


def _llamacpp_call(fields: BodyFields, model: FoundModel) -> TokenizeCall:
    text, engine = _text(fields, "content", model), model.engine
    adds_special_tokens, parses_special = fields.boolean("add_special"), fields.boolean("parse_special", True)
    wants_pieces = fields.boolean("with_pieces")

    def reply() -> dict[str, Any]:
        ids = engine.tokenize(text, adds_special_tokens, parses_special)
        if not wants_pieces:
            return {"tokens": ids}
        pieces = zip(ids, engine.token_bytes(ids), strict=True)
        return {"tokens": [{"id": token_id, "piece": _piece(raw)} for token_id, raw in pieces]}

    return TokenizeCall(len(text), reply)


def _piece(raw: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if it holds only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


# ── TGI ────────────────────────────────────────────────────────────────────────────────────────────────


def _tgi_call(fields: BodyFields, model: FoundModel) -> TokenizeCall:
    text, engine = _text(fields, "inputs", model), model.engine
    adds_special_tokens = fields.boolean("add_special_tokens", True)
    return TokenizeCall(len(text), lambda: tokens_with_offsets(text, engine, adds_special_tokens))


def tokens_with_offsets(text: str, engine: ServedEngine, adds_special_tokens: bool) -> list[dict[str, Any]]:
    """Return the tokens of a text, each with its character range; that of a special token is empty.

    text    " caf" "é" (two tokens)   →   start, stop: 0 4, 4 4, 4 5: a character belongs to its last token
    """
    plain = engine.tokenize(text, False)
    ids = engine.tokenize(text, True) if adds_special_tokens else plain
    first = next((at for at in range(len(ids)) if ids[at : at + len(plain)] == plain), 0)
    bounds = _bounds(text, engine.token_bytes(plain))
    end = len(text)
    ranges = [(0, 0)] * first + bounds + [(end, end)] * (len(ids) - first - len(plain))
    return [
        {"id": token_id, "text": text[start:stop], "start": start, "stop": stop}
        for token_id, (start, stop) in zip(ids, ranges, strict=True)
    ]


def _bounds(text: str, pieces: list[bytes]) -> list[tuple[int, int]]:
    """Return the character range of each token. Tokenizers that add a space before the text yield one character more,
    which is not counted."""
    num_added = max(0, len(b"".join(pieces).decode("utf-8", "replace")) - len(text))
    decoder = getincrementaldecoder("utf-8")("replace")
    bounds, num_read, last = [], 0, 0
    for piece in pieces:
        num_read += len(decoder.decode(piece))
        stop = min(len(text), max(last, num_read - num_added))
        bounds.append((last, stop))
        last = stop
    return bounds
