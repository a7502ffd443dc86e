"""OpenAI's endpoints for chats, completions, embeddings and models.

A generation goes from body to job to reply: the parser makes engine requests, `generation.py` runs them, and a
rendering makes the reply from their events.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.config.server import ServerConfig
from tokenmill.server.body import BodyFields
from tokenmill.server.gate import ServedEngine
from tokenmill.server.generation import GenerationJob
from tokenmill.server.model_admin import model_row, model_rows
from tokenmill.server.openai import schemas
from tokenmill.server.openai.params import guided_field
from tokenmill.server.openai.parse import (
    CompletionCall,
    parse_chat,
    parse_completion,
    parse_embedding,
)
from tokenmill.server.openai.render import ChatRendering, CompletionRendering, EmbeddingRendering
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response
from tokenmill.server.variants import FoundModel

REASONING_FIELDS = {  # `--reasoning-field` ─► names of the fields in replies
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
MAX_EMBEDDINGS_IN_FLIGHT = 32  # so that a request with thousands of inputs leaves room in the queue for others


def openai_endpoints(context: RouteContext) -> list[Endpoint]:
    async def chat_completions(request: Request) -> Response:
        settings = context.settings_of(request.state.record.key)
        return await context.generate(request, lambda body: chat_job(body, context, settings))

    async def completions(request: Request) -> Response:
        settings = context.settings_of(request.state.record.key)
        return await context.generate(request, lambda body: completion_job(body, context, settings))

    async def embeddings(request: Request) -> Response:
        settings = context.settings_of(request.state.record.key)
        return await context.generate(request, lambda body: embedding_job(body, context, settings))

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": await model_rows(context, request)})

    async def model(request: Request) -> Response:
        name = request.path_params["model_id"]
        return json_response(await context.when_read(lambda: model_row(context.registry.find(name), context, request)))

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
            job=context.job_maker(lambda body, _: chat_job(body, context, context.config)),
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
            job=context.job_maker(lambda body, _: completion_job(body, context, context.config)),
        ),
        Endpoint(
            "POST",
            "/v1/embeddings",
            embeddings,
            "OpenAI",
            schemas.EMBEDDING_REPLY,
            READING,
            schemas.EMBEDDING_BODY,
            job=context.job_maker(lambda body, _: embedding_job(body, context, context.config)),
        ),
        Endpoint("GET", "/v1/models", models, "OpenAI", schemas.MODELS_REPLY, (503,)),
        Endpoint("GET", "/v1/models/{model_id:path}", model, "OpenAI", schemas.MODEL_REPLY, (404, 503)),
    ]


# ── generations ────────────────────────────────────────────────────────────────────────────────────────


def named_model(body: dict[str, Any], context: RouteContext, *, is_required: bool = True) -> FoundModel:
    return context.registry.find(BodyFields(body).text("model"), is_required=is_required)


def chat_job(body: dict[str, Any], context: RouteContext, config: ServerConfig) -> GenerationJob:
    """`config`: the settings for this client."""
    model = named_model(body, context)
    call = parse_chat(body, model.info, config)
    num_choices = call.request.params.n
    rendering = ChatRendering(
        model.info,
        num_choices=num_choices,
        is_stream=call.stream.is_stream,
        include_usage=call.stream.include_usage,
        reasoning_fields=REASONING_FIELDS[context.config.reasoning_field],
        tier=call.tier,
    )
    return GenerationJob(
        model.engine,
        [call.request],
        rendering,
        call.stream.is_stream,
        num_choices,
        guided_param=guided_field(body) or "tools",
    )


def completion_job(body: dict[str, Any], context: RouteContext, config: ServerConfig) -> GenerationJob:
    model = named_model(body, context)
    call = parse_completion(body, model.info, config)
    params = call.requests[0].params
    rendering = CompletionRendering(
        model.info,
        num_choices=params.n * len(call.requests),
        include_usage=call.stream.include_usage,
        echoes=_echoes(call, model.engine) if call.echo else None,
        wants_logprobs=params.logprobs is not None,
        wants_prompt_logprobs=body.get("prompt_logprobs") is not None,
    )
    is_stream, guided_param = call.stream.is_stream, guided_field(body)
    return GenerationJob(
        model.engine, call.requests, rendering, is_stream, params.n, "prompt", guided_param=guided_param
    )


def _echoes(call: CompletionCall, engine: ServedEngine) -> list[str]:
    prompts = [request.prompt for request in call.requests]
    texts = [prompt if isinstance(prompt, str) else engine.detokenize(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(call.requests[0].params.n)]


def embedding_job(body: dict[str, Any], context: RouteContext, config: ServerConfig) -> GenerationJob:
    model = named_model(body, context)
    call = parse_embedding(body, model.info, config)
    rendering = EmbeddingRendering(model.info, call)
    return GenerationJob(
        model.engine, call.requests, rendering, prompt_param="input", max_in_flight=MAX_EMBEDDINGS_IN_FLIGHT
    )
