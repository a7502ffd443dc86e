"""Endpoints that load and unload adapters while the server runs, compatible with vLLM's.

    POST /v1/load_lora_adapter      {"lora_name": "sql", "lora_path": "/adapters/sql"}
    POST /v1/unload_lora_adapter    {"lora_name": "sql"}

A loaded adapter is available as a model name, `sql` or `BASE:sql`. Replacing a loaded adapter of the same name needs
`load_inplace`: new requests use the new one, running requests keep the old one. Clients that may pull models may load
adapters: see --manage-models.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.server.adapters import AdapterEngine, adapter_engine, load_checked
from tokenmill.server.auth import require_manager
from tokenmill.server.body import BodyFields
from tokenmill.server.routing import READING, TEXT, Endpoint, RouteContext, Schema
from tokenmill.server.variants import gate_of

TAG = "Models"
FLAG: Schema = {"type": "boolean"}
LOAD_BODY: Schema = {
    "type": "object",
    "required": ["lora_name", "lora_path"],
    "properties": {"lora_name": TEXT, "lora_path": TEXT, "base_model_name": TEXT, "load_inplace": FLAG},
    "example": {"lora_name": "sql", "lora_path": "/adapters/sql"},
}
UNLOAD_BODY: Schema = {
    "type": "object",
    "required": ["lora_name"],
    "properties": {"lora_name": TEXT, "base_model_name": TEXT},
    "example": {"lora_name": "sql"},
}


def adapter_endpoints(context: RouteContext) -> list[Endpoint]:
    async def load_adapter(request: Request) -> Response:
        require_manager(request, context.config)
        fields = await context.parsed(request, BodyFields)
        name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
        replaces = fields.boolean("load_inplace")
        engine = await engine_of(context, fields.text("base_model_name"))
        if not replaces and any(one.name == name for one in engine.adapters):
            hint = "load_inplace replaces it"
            raise InvalidRequest(f"an adapter {name[:200]!r} is loaded already", param="lora_name", hint=hint)
        if name in context.registry.names():
            hint = "choose another name"
            raise InvalidRequest(f"{name[:200]!r} is the name of a model", param="lora_name", hint=hint)
        await load_checked(engine, name, Path(path))
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(request: Request) -> Response:
        require_manager(request, context.config)
        fields = await context.parsed(request, BodyFields)
        name = fields.required_text("lora_name")
        await (await engine_of(context, fields.text("base_model_name"))).unload_adapter(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    changing = (*READING, 403)
    return [
        Endpoint(
            "POST",
            "/v1/load_lora_adapter",
            load_adapter,
            TAG,
            TEXT,
            changing,
            LOAD_BODY,
            description="Load an adapter of a served model from a folder or file on the server's machine.",
            media_type="text/plain",
        ),
        Endpoint(
            "POST",
            "/v1/unload_lora_adapter",
            unload_adapter,
            TAG,
            TEXT,
            changing,
            UNLOAD_BODY,
            description="Unload an adapter; requests that run with it finish normally.",
            media_type="text/plain",
        ),
    ]


async def engine_of(context: RouteContext, base: str | None) -> AdapterEngine:
    """Return the engine of the model called `base`, or of the default model."""
    return await adapter_engine(
        gate_of(await context.when_read(lambda: context.registry.find(base, is_required=False)))
    )
