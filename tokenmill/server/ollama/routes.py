"""Ollama's endpoints of generations and embeddings; the model endpoints are in `library.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

import tokenmill
from tokenmill.errors import InvalidRequest, UnknownModel
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.auth import is_operator
from tokenmill.server.body import BodyFields
from tokenmill.server.dialect import RequestHead
from tokenmill.server.errors import ModelsAreFixed
from tokenmill.server.generation import GenerationJob
from tokenmill.server.ollama import schemas
from tokenmill.server.ollama.library import library_endpoints
from tokenmill.server.ollama.parse import (
    model_name_in,
    parse_chat,
    parse_embed,
    parse_generate,
    parse_keep_alive,
    parse_legacy_embedding,
)
from tokenmill.server.ollama.render import ChatReply, EmbedReply, GenerateReply, embed_reply, loaded_reply
from tokenmill.server.registry import ModelRegistry
from tokenmill.server.routing import READING, TEXT, Endpoint, RouteContext, json_response
from tokenmill.server.tenancy import require_allowed
from tokenmill.server.variants import FoundModel, gate_of
from tokenmill.store import find_entry, plain_name

VERSION = "0.33.0"  # the newest version of Ollama whose API is implemented; clients compare it
TAG = "Ollama"
RUNNING = "Ollama is running"
MAX_EMBEDDINGS_IN_FLIGHT = 32


def ollama_endpoints(context: RouteContext) -> list[Endpoint]:
    async def ollama_chat(request: Request) -> Response:
        return await context.generate(request, lambda body: chat_job(body, context))

    async def ollama_generate(request: Request) -> Response:
        return await context.generate(request, lambda body: generate_job(body, context))

    async def ollama_embed(request: Request) -> Response:
        return await context.generate(request, lambda body: embed_job(body, context))

    async def ollama_embeddings(request: Request) -> Response:
        return await context.generate(request, lambda body: legacy_embedding_job(body, context))

    async def ollama_version(request: Request) -> Response:
        return json_response({"version": VERSION}, headers={"x-tokenmill-version": tokenmill.__version__})

    async def ollama_is_running(request: Request) -> Response:
        return PlainTextResponse(RUNNING)

    return [
        Endpoint(
            "POST",
            "/api/chat",
            ollama_chat,
            TAG,
            schemas.CHAT_REPLY,
            READING,
            schemas.CHAT_BODY,
            stream=schemas.STREAM,
            stream_media_type="application/x-ndjson",
        ),
        Endpoint(
            "POST",
            "/api/generate",
            ollama_generate,
            TAG,
            schemas.GENERATE_REPLY,
            READING,
            schemas.GENERATE_BODY,
            stream=schemas.STREAM,
            stream_media_type="application/x-ndjson",
        ),
        Endpoint("POST", "/api/embed", ollama_embed, TAG, schemas.EMBED_REPLY, READING, schemas.EMBED_BODY),
        Endpoint(
            "POST",
            "/api/embeddings",
            ollama_embeddings,
            TAG,
            schemas.LEGACY_EMBED_REPLY,
            READING,
            schemas.LEGACY_EMBED_BODY,
            description="The older form of /api/embed: one prompt, one vector, not normalised.",
        ),
        Endpoint("GET", "/api/version", ollama_version, TAG, schemas.VERSION_REPLY),
        Endpoint("GET", "/", ollama_is_running, TAG, TEXT, media_type="text/plain", when=wants_no_page),
        *library_endpoints(context, find_model),
    ]


def wants_no_page(head: RequestHead) -> bool:
    """Return whether `GET /` comes from a client that probes for Ollama, not from a browser."""
    return "text/html" not in head.headers.get("accept", "")


def find_model(name: str, registry: ModelRegistry) -> FoundModel:
    """Return the model of this name in any of Ollama's spellings: without a tag, with the tag `latest`, in any case."""
    plain = plain_name(name)
    entry = find_entry(plain)
    by_case = {one.lower(): one for one in registry.names()}
    for candidate in (name, plain, entry.name if entry else plain, by_case.get(plain.lower(), plain)):
        try:
            return registry.find(candidate)
        except UnknownModel:
            continue
    raise UnknownModel(f"model '{name[:200]}' not found", param="model")


# ── generations ────────────────────────────────────────────────────────────────────────────────────────


def keep_alive_setter(model: FoundModel, body: dict[str, Any]) -> Callable[[], None] | None:
    """Return a function that sets the model's keep-alive time to the request's; None if the request has none."""
    keep_alive = parse_keep_alive(BodyFields(body))
    return None if keep_alive is None else partial(model.keep, keep_alive.seconds)


def chat_job(body: dict[str, Any], context: RouteContext) -> GenerationJob | Response:
    name = model_name_in(body)
    model = find_model(name, context.registry)
    call, keep = parse_chat(body, name, model.engine), keep_alive_setter(model, body)
    if call is None:
        return presence_reply(body, model, context, name, {"message": {"role": "assistant", "content": ""}})
    return GenerationJob(model.engine, [call.request], ChatReply(name), call.is_stream, keep_model=keep)


def generate_job(body: dict[str, Any], context: RouteContext) -> GenerationJob | Response:
    name = model_name_in(body)
    model = find_model(name, context.registry)
    call, keep = parse_generate(body, name, model.engine), keep_alive_setter(model, body)
    if call is None:
        return presence_reply(body, model, context, name, {"response": ""})
    rendering = GenerateReply(name, has_context=call.has_context)
    return GenerationJob(
        model.engine, [call.request], rendering, call.is_stream, prompt_param="prompt", keep_model=keep
    )


def embed_job(body: dict[str, Any], context: RouteContext) -> GenerationJob | Response:
    name = model_name_in(body)
    model = find_model(name, context.registry)
    engine = model.engine
    call, keep = parse_embed(body, engine, context.config.max_embedding_inputs), keep_alive_setter(model, body)
    if not call.requests:
        return json_response(embed_reply(name, [], {}))
    rendering = EmbedReply(name, dimensions=call.dimensions, is_legacy=False)
    return GenerationJob(
        engine,
        call.requests,
        rendering,
        prompt_param="input",
        max_in_flight=MAX_EMBEDDINGS_IN_FLIGHT,
        keep_model=keep,
    )


def legacy_embedding_job(body: dict[str, Any], context: RouteContext) -> GenerationJob | Response:
    name = model_name_in(body)
    model = find_model(name, context.registry)
    engine = model.engine
    call, keep = parse_legacy_embedding(body, engine), keep_alive_setter(model, body)
    if not call.requests:
        return json_response({"embedding": []})
    rendering = EmbedReply(name, dimensions=None, is_legacy=True)
    return GenerationJob(engine, call.requests, rendering, prompt_param="prompt", keep_model=keep)


# ── requests without a prompt ──────────────────────────────────────────────────────────────────────────


def presence_reply(
    body: dict[str, Any], model: FoundModel, context: RouteContext, name: str, content: dict[str, Any]
) -> Response:
    """Handle a request without a prompt, which loads the model, or unloads it if `keep_alive` is 0."""
    keep_alive, gate = parse_keep_alive(BodyFields(body)), gate_of(model)
    if keep_alive is None or keep_alive.seconds != 0:
        keep = keep_alive_setter(model, body)
        return PresenceReply(model.name, gate.enter, lambda: loaded_reply(name, content, "load"), keep_model=keep)
    if gate.is_pinned or gate.load is None:
        raise InvalidRequest(f"{gate.name} can't be unloaded: it is always loaded on this server", param="keep_alive")
    return PresenceReply(
        model.name,
        lambda: context.loader.unload(gate),
        lambda: loaded_reply(name, content, "unload"),
        needs_operator=True,
    )


class PresenceReply(Response):
    """A reply that is sent once the model is loaded or unloaded. `needs_operator`: refuse requests of tenants.
    `keep_model`: see GenerationJob."""

    def __init__(
        self,
        name: str,
        change: Callable[[], Awaitable[object]],
        content: Callable[[], dict[str, Any]],
        *,
        needs_operator: bool = False,
        keep_model: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self._change = change
        self._content = content
        self._needs_operator = needs_operator
        self._keep_model = keep_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope["state"]["record"]
        require_allowed(self._name, record.key)
        if self._needs_operator and not is_operator(scope):
            raise ModelsAreFixed(
                "unloading a model needs a key that sees all (an operator's)", hint="tokenmill keys add NAME --sees-all"
            )
        if self._keep_model is not None and is_operator(scope):
            self._keep_model()
        await self._change()
        await json_response(self._content())(scope, receive, send)
