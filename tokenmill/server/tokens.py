"""/tokenize and /detokenize, in the shape vLLM's users know. The same tokenizer and template as for generation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tokenmill.engine.lengths import require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.server.fields import BodyFields, refuse
from tokenmill.server.gate import ServedEngine
from tokenmill.server.openai import request_schemas, response_schemas
from tokenmill.server.openai.messages import num_characters, parse_messages
from tokenmill.server.openai.parse import require_model, template_args
from tokenmill.server.route_context import RouteContext, json_response
from tokenmill.types import ChatRequest

MAX_DETOKENIZED = 1_000_000


def tokens_router(desk: RouteContext) -> APIRouter:
    router = APIRouter(tags=["Tokens"])

    @router.post(
        "/tokenize", response_model=None, responses=response_schemas.TOKENIZED, openapi_extra=request_schemas.TOKENIZE
    )
    async def tokenize(request: Request) -> Response:
        fields = BodyFields(await desk.read(request))
        engine = desk.door.engine
        require_model(fields, desk.info, desk.config, is_required=False)
        return json_response(tokenized(fields, engine, desk.info))

    @router.post(
        "/detokenize",
        response_model=None,
        responses=response_schemas.DETOKENIZED,
        openapi_extra=request_schemas.DETOKENIZE,
    )
    async def detokenize(request: Request) -> Response:
        fields = BodyFields(await desk.read(request))
        engine = desk.door.engine
        require_model(fields, desk.info, desk.config, is_required=False)
        ids = fields.token_ids("tokens", MAX_DETOKENIZED, desk.info.vocab_size)
        if ids is None:
            refuse("tokens", "is required: a list of token ids")
        return json_response({"prompt": engine.detokenize(ids)})

    return router


def tokenized(fields: BodyFields, engine: ServedEngine, info: ModelInfo) -> dict[str, Any]:
    ids = _ids(fields, engine, info)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_context, "tokens": ids}
    if fields.boolean("return_token_strs"):
        reply["token_strs"] = engine.token_texts(ids)
    return reply


def _ids(fields: BodyFields, engine: ServedEngine, info: ModelInfo) -> list[int]:
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        refuse("prompt", "or messages is required, and not both")
    if fields.get("messages") is not None:
        return engine.tokenize_chat(_conversation(fields, info))
    text = fields.required_text("prompt")
    require_plausible_length(len(text), info.max_context, "prompt")
    return engine.tokenize(text, fields.boolean("add_special_tokens", True))


def _conversation(fields: BodyFields, info: ModelInfo) -> ChatRequest:
    messages = parse_messages(fields)
    require_plausible_length(num_characters(messages), info.max_context, "messages")
    fields.refuse_any(("tools", "chat_template", "continue_final_message"))
    return ChatRequest(
        messages=messages,
        template_args=template_args(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
    )
