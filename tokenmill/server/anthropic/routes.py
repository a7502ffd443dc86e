"""Anthropic's endpoints: messages, token counts, and the list of models in its form.

OpenAI's API has the same paths for models; a request with a version of Anthropic's API gets Anthropic's form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.engine.text_workers import text_size
from tokenmill.server.anthropic import schemas
from tokenmill.server.anthropic.models import model_card
from tokenmill.server.anthropic.pages import page_of
from tokenmill.server.anthropic.parse import parse_count, parse_messages, require_room
from tokenmill.server.anthropic.render import MessageRendering, names_a_version
from tokenmill.server.body import BodyFields
from tokenmill.server.generation import GenerationJob
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response
from tokenmill.server.signatures import ThoughtKeys, ThoughtSigner
from tokenmill.server.variants import FoundModel
from tokenmill.types import ChatRequest


def anthropic_endpoints(context: RouteContext) -> list[Endpoint]:
    thought_keys = ThoughtKeys()

    def signer(request: Request) -> ThoughtSigner:
        return thought_keys.signer(request.state.record.key_id)

    async def messages(request: Request) -> Response:
        return await context.generate(request, lambda body: messages_job(body, context, signer(request)))

    async def count_tokens(request: Request) -> Response:
        return json_response({"input_tokens": await count_prompt_tokens(request, context, signer(request))})

    async def anthropic_models(request: Request) -> Response:
        await context.registry.read_all()
        return json_response(page_of([model_card(info) for info in context.registry.listed()], request))

    async def anthropic_model(request: Request) -> Response:
        name = request.path_params["model_id"]
        return json_response(await context.when_read(lambda: model_card(context.registry.find(name).info)))

    return [
        Endpoint(
            "POST",
            "/v1/messages",
            messages,
            "Anthropic",
            schemas.MESSAGE_REPLY,
            READING,
            schemas.MESSAGES_BODY,
            stream=schemas.MESSAGES_STREAM,
            job=context.job_maker(lambda body, owner: messages_job(body, context, thought_keys.signer(owner))),
        ),
        Endpoint(
            "POST",
            "/v1/messages/count_tokens",
            count_tokens,
            "Anthropic",
            schemas.COUNT_REPLY,
            READING,
            schemas.COUNT_BODY,
        ),
        Endpoint(
            "GET", "/v1/models", anthropic_models, "Anthropic", schemas.MODELS_REPLY, (503,), when=names_a_version
        ),
        Endpoint(
            "GET",
            "/v1/models/{model_id:path}",
            anthropic_model,
            "Anthropic",
            schemas.MODEL_REPLY,
            (404, 503),
            when=names_a_version,
        ),
    ]


def _named_model(body: dict[str, Any], context: RouteContext) -> FoundModel:
    return context.registry.find(BodyFields(body).text("model"))


def messages_job(
    body: dict[str, Any], context: RouteContext, signer: ThoughtSigner, priority: int = 0
) -> GenerationJob:
    model = _named_model(body, context)
    info = model.info
    call = parse_messages(body, info, signer)
    return GenerationJob(
        model.engine,
        [msgspec.structs.replace(call.request, priority=priority)],
        MessageRendering(info, call, signer),
        call.is_stream,
        check=partial(require_room, max_context=info.max_context),
    )


async def count_prompt_tokens(request: Request, context: RouteContext, signer: ThoughtSigner) -> int:
    """Return the number of tokens of a prompt; a long one is tokenised in a thread."""

    def parse(body: dict[str, Any]) -> tuple[FoundModel, ChatRequest]:
        model = _named_model(body, context)
        return model, parse_count(body, model.info, signer)

    model, chat = await context.parsed(request, parse)
    engine = model.engine
    return await context.workers.run(text_size(chat), lambda: len(engine.tokenize_chat(chat)))
