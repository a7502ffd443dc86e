"""Anthropic's endpoints: messages, batches of them, counting tokens, and its form of the list of models.

The paths of the models are OpenAI's too; a request that says a version of Anthropic's API gets Anthropic's form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.engine.request_ids import call_id
from tokenmill.engine.text_workers import text_size
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.anthropic import schemas
from tokenmill.server.anthropic.batches import PRIORITY, BatchRunner, BatchStore, MessageBatch, parse_batch
from tokenmill.server.anthropic.models import model_card
from tokenmill.server.anthropic.pages import page_of
from tokenmill.server.anthropic.parse import parse_count, parse_messages, require_room
from tokenmill.server.anthropic.render import MessageRendering, names_a_version
from tokenmill.server.anthropic.signatures import ThoughtSigner
from tokenmill.server.body import BodyFields
from tokenmill.server.generation import GenerationJob
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response
from tokenmill.server.variants import FoundModel
from tokenmill.types import ChatRequest


def anthropic_endpoints(context: RouteContext) -> list[Endpoint]:
    signer = ThoughtSigner()

    async def messages(request: Request) -> Response:
        return await context.generate(request, lambda body: messages_job(body, context, signer))

    async def count_tokens(request: Request) -> Response:
        return json_response({"input_tokens": await counted(request, context, signer)})

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
        *batch_endpoints(context, signer),
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


async def counted(request: Request, context: RouteContext, signer: ThoughtSigner) -> int:
    """The number of tokens of a prompt; a long one is tokenised in a thread."""

    def parse(body: dict[str, Any]) -> tuple[FoundModel, ChatRequest]:
        model = _named_model(body, context)
        return model, parse_count(body, model.info, signer)

    model, asked = await context.parsed(request, parse)
    engine = model.engine
    return await context.workers.run(text_size(asked), lambda: len(engine.tokenize_chat(asked)))


# ── batches ────────────────────────────────────────────────────────────────────────────────────────────


def batch_endpoints(context: RouteContext, signer: ThoughtSigner) -> list[Endpoint]:
    store = BatchStore()
    runner = BatchRunner(lambda body: answered(body, context, signer))

    def found(request: Request) -> MessageBatch:
        return store.find(request.state.record.key_id, request.path_params["batch_id"])

    def shown(request: Request, batch: MessageBatch) -> Response:
        return json_response(batch.as_object(str(request.base_url).rstrip("/")))

    async def create_message_batch(request: Request) -> Response:
        batch = MessageBatch(request.state.record.key_id, await context.parsed(request, parse_batch))
        store.add(batch)
        runner.start(batch)
        return shown(request, batch)

    async def message_batches(request: Request) -> Response:
        origin = str(request.base_url).rstrip("/")
        listed = [batch.as_object(origin) for batch in store.of(request.state.record.key_id)]
        return json_response(page_of(listed, request))

    async def message_batch(request: Request) -> Response:
        return shown(request, found(request))

    async def cancel_message_batch(request: Request) -> Response:
        batch = found(request)
        runner.cancel(batch)
        return shown(request, batch)

    async def delete_message_batch(request: Request) -> Response:
        batch = found(request)
        store.delete(batch)
        return json_response({"id": batch.id, "type": "message_batch_deleted"})

    async def message_batch_results(request: Request) -> Response:
        batch = found(request)
        if not batch.ended:
            raise InvalidRequest("the message batch has not ended yet, so it has no results")
        return Response(b"".join(item.line() for item in batch.items), media_type="application/x-jsonl")

    path = "/v1/messages/batches"
    batch, missing = schemas.BATCH_REPLY, (404,)
    return [
        Endpoint("GET", path, message_batches, "Anthropic", schemas.BATCHES_REPLY, (400,)),
        Endpoint("POST", path, create_message_batch, "Anthropic", batch, READING, schemas.BATCH_BODY),
        Endpoint("GET", f"{path}/{{batch_id}}", message_batch, "Anthropic", batch, missing),
        Endpoint("DELETE", f"{path}/{{batch_id}}", delete_message_batch, "Anthropic", schemas.DELETED_REPLY, missing),
        Endpoint("POST", f"{path}/{{batch_id}}/cancel", cancel_message_batch, "Anthropic", batch, missing),
        Endpoint(
            "GET",
            f"{path}/{{batch_id}}/results",
            message_batch_results,
            "Anthropic",
            {"type": "string"},
            missing,
            media_type="application/x-jsonl",
        ),
    ]


async def answered(body: bytes, context: RouteContext, signer: ThoughtSigner) -> bytes:
    """The message that answers one request of a batch, as JSON."""
    job = await context.made_of(body, lambda asked: messages_job(asked, context, signer, PRIORITY))
    record = RequestRecord(call_id(""), "POST", "/v1/messages", is_generation=True, model=job.engine.info.name)
    run = context.start_run(job, record)
    try:
        await run.accept()
        reply = await run.whole()
    except TokenmillError as error:
        record.note_failure(error)
        raise
    finally:
        await run.close()
        context.count(record)
    return bytes(reply.body)
