"""OpenAI's endpoints, and vLLM's /tokenize and /detokenize, which take the same bodies.

A generation goes from body to job to reply: the parser makes engine requests, `generation.py` runs them, a rendering
writes what comes.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.engine.status import ModelInfo
from tokenmill.engine.text_workers import text_size
from tokenmill.server.body import BodyFields
from tokenmill.server.generation import GenerationJob
from tokenmill.server.openai import schemas
from tokenmill.server.openai.parse import (
    CompletionCall,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_embedding,
    parse_tokenize,
)
from tokenmill.server.openai.render import ChatRendering, CompletionRendering, EmbeddingRendering
from tokenmill.server.registry import EngineGate, ServedEngine
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response
from tokenmill.types import ChatRequest

REASONING_OUT = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
EMBEDDINGS_IN_FLIGHT = 32  # a call with thousands of inputs shares the queue with others


def openai_endpoints(context: RouteContext) -> list[Endpoint]:
    async def chat_completions(request: Request) -> Response:
        return await context.generate(request, lambda body: chat_job(body, context))

    async def completions(request: Request) -> Response:
        return await context.generate(request, lambda body: completion_job(body, context))

    async def embeddings(request: Request) -> Response:
        return await context.generate(request, lambda body: embedding_job(body, context))

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(info) for info in context.registry.listed()]})

    async def model(request: Request) -> Response:
        return json_response(model_card(context.registry.find(request.path_params["model_id"]).info))

    async def tokenize(request: Request) -> Response:
        return json_response(await tokenized(request, context))

    async def detokenize(request: Request) -> Response:
        return json_response(await detokenized(request, context))

    return [
        Endpoint(
            "POST",
            "/v1/chat/completions",
            chat_completions,
            "OpenAI",
            schemas.CHAT_REPLY,
            READING,
            schemas.CHAT_BODY,
            stream=schemas.CHAT_STREAM,
        ),
        Endpoint(
            "POST",
            "/v1/completions",
            completions,
            "OpenAI",
            schemas.COMPLETION_REPLY,
            READING,
            schemas.COMPLETION_BODY,
            stream=schemas.COMPLETION_STREAM,
        ),
        Endpoint(
            "POST", "/v1/embeddings", embeddings, "OpenAI", schemas.EMBEDDING_REPLY, READING, schemas.EMBEDDING_BODY
        ),
        Endpoint("GET", "/v1/models", models, "OpenAI", schemas.MODELS_REPLY, (503,)),
        Endpoint("GET", "/v1/models/{model_id:path}", model, "OpenAI", schemas.MODEL_REPLY, (404, 503)),
        Endpoint("POST", "/tokenize", tokenize, "Tokens", schemas.TOKENIZE_REPLY, READING, schemas.TOKENIZE_BODY),
        Endpoint(
            "POST", "/detokenize", detokenize, "Tokens", schemas.DETOKENIZE_REPLY, READING, schemas.DETOKENIZE_BODY
        ),
    ]


# ── generations ────────────────────────────────────────────────────────────────────────────────────────


def named_model(body: dict[str, Any], context: RouteContext, *, is_required: bool = True) -> EngineGate:
    return context.registry.find(BodyFields(body).text("model"), is_required=is_required)


def chat_job(body: dict[str, Any], context: RouteContext) -> GenerationJob:
    model = named_model(body, context)
    call = parse_chat(body, model.info, context.config)
    num_choices = call.request.params.n
    rendering = ChatRendering(
        model.info,
        num_choices=num_choices,
        is_stream=call.stream.is_stream,
        include_usage=call.stream.include_usage,
        reasoning_fields=REASONING_OUT[context.config.reasoning_field],
    )
    return GenerationJob(model.engine, [call.request], rendering, call.stream.is_stream, num_choices)


def completion_job(body: dict[str, Any], context: RouteContext) -> GenerationJob:
    model = named_model(body, context)
    call = parse_completion(body, model.info, context.config)
    params = call.requests[0].params
    rendering = CompletionRendering(
        model.info,
        num_choices=params.n * len(call.requests),
        include_usage=call.stream.include_usage,
        echoes=_echoes(call, model.engine) if call.echo else None,
        wants_logprobs=params.logprobs is not None,
        wants_prompt_logprobs=body.get("prompt_logprobs") is not None,
    )
    return GenerationJob(model.engine, call.requests, rendering, call.stream.is_stream, params.n, "prompt")


def _echoes(call: CompletionCall, engine: ServedEngine) -> list[str]:
    prompts = [request.prompt for request in call.requests]
    texts = [prompt if isinstance(prompt, str) else engine.detokenize(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(call.requests[0].params.n)]


def embedding_job(body: dict[str, Any], context: RouteContext) -> GenerationJob:
    model = named_model(body, context)
    call = parse_embedding(body, model.info, context.config)
    rendering = EmbeddingRendering(model.info, call)
    return GenerationJob(
        model.engine, call.requests, rendering, prompt_param="input", max_in_flight=EMBEDDINGS_IN_FLIGHT
    )


# ── models and tokens ──────────────────────────────────────────────────────────────────────────────────


def model_card(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "tokenmill",
        "max_model_len": info.max_context,
    }


async def tokenized(request: Request, context: RouteContext) -> dict[str, Any]:
    """The reply of /tokenize; a long text is tokenised in a thread."""

    def parse(body: dict[str, Any]) -> tuple[EngineGate, BodyFields, ChatRequest | str]:
        model, fields = named_model(body, context, is_required=False), BodyFields(body)
        return model, fields, parse_tokenize(fields, model.info)

    model, fields, asked = await context.parsed(request, parse)
    engine = model.engine
    adds_special_tokens = fields.boolean("add_special_tokens", True)
    wants_texts = fields.boolean("return_token_strs")

    def tokenize() -> dict[str, Any]:
        ids = engine.tokenize(asked, adds_special_tokens) if isinstance(asked, str) else engine.tokenize_chat(asked)
        reply: dict[str, Any] = {"count": len(ids), "max_model_len": model.info.max_context, "tokens": ids}
        if wants_texts:
            reply["token_strs"] = engine.token_texts(ids)
        return reply

    size = len(asked) if isinstance(asked, str) else text_size(asked)
    return await context.workers.run(size, tokenize)


async def detokenized(request: Request, context: RouteContext) -> dict[str, Any]:
    """The reply of /detokenize."""

    def parse(body: dict[str, Any]) -> tuple[EngineGate, list[int]]:
        model = named_model(body, context, is_required=False)
        return model, parse_detokenize(BodyFields(body), model.info)

    model, ids = await context.parsed(request, parse)
    return {"prompt": await context.workers.run(len(ids), lambda: model.engine.detokenize(ids))}
