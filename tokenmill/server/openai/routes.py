"""OpenAI's routes: read the body, parse it into a job, let the native path answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tokenmill.engine.status import ModelInfo
from tokenmill.errors import UnknownModel
from tokenmill.server.fields import shown
from tokenmill.server.gate import ServedEngine
from tokenmill.server.generation import GenerationJob
from tokenmill.server.openai import request_schemas, response_schemas
from tokenmill.server.openai.embeddings import EmbeddingRendering
from tokenmill.server.openai.parse import CompletionCall, parse_chat, parse_completion, parse_embedding
from tokenmill.server.openai.render import ChatRendering, CompletionRendering
from tokenmill.server.route_context import RouteContext, json_response

EMBEDDINGS_IN_FLIGHT = 32  # a batch of thousands shares the queue with others


def openai_router(desk: RouteContext) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post(
        "/chat/completions", response_model=None, responses=response_schemas.CHAT, openapi_extra=request_schemas.CHAT
    )
    async def chat_completions(request: Request) -> Response:
        return await desk.answer(request, chat_job)

    @router.post(
        "/completions",
        response_model=None,
        responses=response_schemas.COMPLETION,
        openapi_extra=request_schemas.COMPLETION,
    )
    async def completions(request: Request) -> Response:
        return await desk.answer(request, completion_job)

    @router.post(
        "/embeddings",
        response_model=None,
        responses=response_schemas.EMBEDDINGS,
        openapi_extra=request_schemas.EMBEDDING,
    )
    async def embeddings(request: Request) -> Response:
        return await desk.answer(request, embedding_job)

    @router.get("/models", response_model=None, responses=response_schemas.MODELS)
    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(desk.info)]})

    @router.get("/models/{model_id:path}", response_model=None, responses=response_schemas.MODEL)
    async def model(request: Request, model_id: str) -> Response:
        info = desk.info
        if model_id != info.name and not desk.config.any_model_name:
            raise UnknownModel(f"the model {shown(model_id)} does not exist", param="model")
        return json_response(model_card(info))

    return router


def chat_job(body: dict[str, Any], desk: RouteContext) -> GenerationJob:
    call = parse_chat(body, desk.info, desk.config)
    num_choices = call.request.params.n
    rendering = ChatRendering(
        desk.info,
        num_choices=num_choices,
        is_stream=call.stream.is_stream,
        include_usage=call.stream.include_usage,
    )
    return GenerationJob([call.request], rendering, call.stream.is_stream, num_choices)


def completion_job(body: dict[str, Any], desk: RouteContext) -> GenerationJob:
    call = parse_completion(body, desk.info, desk.config)
    params = call.requests[0].params
    rendering = CompletionRendering(
        desk.info,
        num_choices=params.n * len(call.requests),
        include_usage=call.stream.include_usage,
        echoes=_echoes(call, desk.door.engine) if call.echo else None,
        wants_logprobs=params.logprobs is not None,
        wants_prompt_logprobs=body.get("prompt_logprobs") is not None,
    )
    return GenerationJob(call.requests, rendering, call.stream.is_stream, params.n, "prompt")


def _echoes(call: CompletionCall, engine: ServedEngine) -> list[str]:
    prompts = [request.prompt for request in call.requests]
    texts = [prompt if isinstance(prompt, str) else engine.detokenize(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(call.requests[0].params.n)]


def embedding_job(body: dict[str, Any], desk: RouteContext) -> GenerationJob:
    call = parse_embedding(body, desk.info, desk.config)
    rendering = EmbeddingRendering(desk.info, call)
    return GenerationJob(call.requests, rendering, prompt_param="input", max_in_flight=EMBEDDINGS_IN_FLIGHT)


def model_card(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "tokenmill",
        "max_model_len": info.max_context,
    }
