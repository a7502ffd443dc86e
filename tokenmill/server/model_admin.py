"""Endpoints that list, load and unload the models of a server.

Paths and names are llama.cpp's: GET /models lists models, POST /models/load and /models/unload change their state.
Downloading a model, with its progress, is Ollama's /api/pull. Loading a model of the store that the server was not
started with adds it to the list. Clients that may pull models may load them: see --manage-models.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.engine.status import EngineStats
from tokenmill.errors import UnknownModel
from tokenmill.server.auth import is_operator, require_manager
from tokenmill.server.body import BodyFields
from tokenmill.server.gate import EngineGate
from tokenmill.server.routing import (
    COUNT,
    READING,
    TEXT,
    Endpoint,
    RouteContext,
    Schema,
    json_response,
    list_of,
    object_of,
)
from tokenmill.server.variants import FoundModel, Variant, gate_of

TAG = "Models"


FLAG: Schema = {"type": "boolean"}
STATUS: Schema = {"enum": ["unloaded", "loading", "loaded", "unloading", "failed"]}


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


ROW: Schema = object_of(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    max_model_len=_or_null(COUNT),
    aliases=list_of(TEXT),
    parent=_or_null(TEXT),
    is_default=FLAG,
    is_pinned=FLAG,
    status=object_of(value=STATUS, reason=_or_null(TEXT)),
    num_running=_or_null(COUNT),
    num_waiting=_or_null(COUNT),
    device=_or_null(TEXT),
    memory_bytes=_or_null(COUNT),
    keep_alive_s=_or_null({"type": "number"}),
    expires_in_s=_or_null({"type": "number"}),
)
CHANGED: Schema = object_of(success=FLAG, model=TEXT, status=STATUS)
LOAD_BODY: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": TEXT, "wait": FLAG},
    "example": {"model": "smollm2:135m", "wait": True},
}
UNLOAD_BODY: Schema = {"type": "object", "required": ["model"], "properties": {"model": TEXT}}


def model_endpoints(context: RouteContext) -> list[Endpoint]:
    async def list_models(request: Request) -> Response:
        memory = {
            device: {"total_bytes": total, "used_bytes": used}
            for device, (total, used) in context.loader.memory().items()
        }
        return json_response({"object": "list", "data": await model_rows(context, request), "memory": memory})

    async def load_model(request: Request) -> Response:
        require_manager(request, context.config)
        name, waits = await context.parsed(request, _parse_load)
        model = await context.when_read(lambda: _found(name, context)) or await _added(name, context)
        gate = gate_of(model)
        if waits:
            await gate.enter()
        else:
            context.loader.begin(gate)
        return json_response({"success": True, "model": model.name, "status": gate.state})

    async def unload_model(request: Request) -> Response:
        require_manager(request, context.config)
        name = await context.parsed(request, lambda body: BodyFields(body).required_text("model"))
        gate = gate_of(await context.when_read(lambda: context.registry.find(name)))
        await context.loader.unload(gate)
        return json_response({"success": True, "model": gate.name, "status": gate.state})

    changing = (*READING, 403)
    return [
        Endpoint("GET", "/models", list_models, TAG, object_of(object=TEXT, data=list_of(ROW)), (503,)),
        Endpoint(
            "POST",
            "/models/load",
            load_model,
            TAG,
            CHANGED,
            changing,
            LOAD_BODY,
            description="Load a model. Replies immediately, or with `wait` once it is loaded.",
        ),
        Endpoint(
            "POST",
            "/models/unload",
            unload_model,
            TAG,
            CHANGED,
            changing,
            UNLOAD_BODY,
            description="Unload a model once its running requests are finished. The next request loads it again.",
        ),
    ]


async def model_rows(context: RouteContext, request: Request) -> list[dict[str, Any]]:
    """Return a row for each model and each variant, with its state."""
    await context.registry.read_all()
    unread = [gate for gate in context.registry.gates if gate.known is None]
    return [model_row(model, context, request) for model in (*context.registry.known(), *unread)]


def model_row(model: FoundModel, context: RouteContext, request: Request) -> dict[str, Any]:
    """Describe a model. Only operators see how much it is used and when it will be unloaded."""
    gate, known = gate_of(model), model.info if isinstance(model, Variant) else model.known
    stats, memory = gate.stats() or EngineStats(), context.loader.memory_of(gate)
    shows_usage = is_operator(request.scope)
    return {
        "id": model.name,
        "object": "model",
        "created": 0 if known is None else known.created,
        "owned_by": "tokenmill",
        "max_model_len": None if known is None else known.max_context,
        "aliases": [] if isinstance(model, Variant) else list(gate.aliases),
        "parent": gate.name if isinstance(model, Variant) else None,
        "is_default": model is context.registry.default,
        "is_pinned": gate.is_pinned,
        "status": {"value": gate.state, "reason": None if gate.failure is None else str(gate.failure)},
        "num_running": stats.running + stats.waiting if shows_usage else None,
        "num_waiting": gate.num_waiting if shows_usage else None,
        "device": None if known is None or not known.device else known.device,
        "memory_bytes": None if memory is None else memory.total_bytes,
        "keep_alive_s": gate.keep_alive_s,
        "expires_in_s": expires_in_s(gate) if shows_usage else None,
    }


def expires_in_s(gate: EngineGate) -> float | None:
    """Return the seconds until the model is unloaded if no request comes; None: it is not loaded, or stays loaded."""
    if gate.state != "loaded" or gate.is_pinned or gate.keep_alive_s is None:
        return None
    idle_s = time.monotonic() - gate.last_used_s if gate.is_idle else 0.0
    return round(max(0.0, gate.keep_alive_s - idle_s), 1)


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────


def _parse_load(body: dict[str, Any]) -> tuple[str, bool]:
    fields = BodyFields(body)
    return fields.required_text("model"), fields.boolean("wait")


def _found(name: str, context: RouteContext) -> FoundModel | None:
    """Return the model with this name; None if there is none. `--any-model-name` applies to generation only, not to
    loading."""
    try:
        found = context.registry.find(name)
    except UnknownModel:
        return None
    is_fallback = found is context.registry.default and name not in (found.name, *found.aliases)
    return None if is_fallback else found


async def _added(name: str, context: RouteContext) -> EngineGate:
    """Add a model of the store to the server; return its gate."""
    if context.loader.make_model is None:
        raise UnknownModel(f"the model {name[:200]!r} does not exist", param="model")
    gate, source = await asyncio.to_thread(context.loader.make_model, name)
    if gate.name in context.registry.names():  # `name` is another name of a served model
        return context.registry.gates[context.registry.names().index(gate.name)]
    context.registry.add(gate)
    context.loader.add(gate, source)
    return gate
