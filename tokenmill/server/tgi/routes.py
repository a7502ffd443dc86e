"""TGI's endpoints: /generate, /generate_stream, `POST /` and /info. /health is in `server/admin.py`, /tokenize in
`server/tokens.py`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import tokenmill
from tokenmill.errors import UnknownModel
from tokenmill.params import MAX_STOP_STRINGS
from tokenmill.server.body import BodyFields
from tokenmill.server.generation import GenerationJob
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
from tokenmill.server.tgi.parse import MAX_BEST_OF, parse_text_generation
from tokenmill.server.tgi.render import TextGenerationRendering
from tokenmill.server.variants import FoundModel, adapter_variant, gate_of

TAG = "TGI"
BODY: Schema = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"inputs": TEXT, "parameters": {"type": ["object", "null"]}, "stream": {"type": ["boolean", "null"]}},
    "example": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
}
REPLY = object_of(generated_text=TEXT)
STREAM = "Done. Streamed: `data:` lines, one per token, the last one with the whole text."
INFO = object_of(model_id=TEXT, max_total_tokens=COUNT, max_input_tokens=COUNT, version=TEXT)


def tgi_endpoints(context: RouteContext) -> list[Endpoint]:
    async def generate(request: Request) -> Response:
        return await context.generate(request, lambda body: generation_job(body, context, is_stream=False))

    async def generate_stream(request: Request) -> Response:
        return await context.generate(request, lambda body: generation_job(body, context, is_stream=True))

    async def generate_at_root(request: Request) -> Response:
        return await context.generate(request, lambda body: generation_job(body, context, is_stream=None))

    async def info(request: Request) -> Response:
        return json_response(await context.when_read(lambda: server_info(context)))

    return [
        Endpoint("POST", "/generate", generate, TAG, REPLY, READING, BODY),
        Endpoint("POST", "/generate_stream", generate_stream, TAG, TEXT, READING, BODY, media_type="text/event-stream"),
        Endpoint("POST", "/", generate_at_root, TAG, list_of(REPLY), READING, BODY, stream=STREAM),
        Endpoint("GET", "/info", info, TAG, INFO, (503,)),
    ]


def generation_job(body: dict[str, Any], context: RouteContext, is_stream: bool | None) -> GenerationJob:
    model = model_of(BodyFields(body), context)
    call = parse_text_generation(body, model.engine, is_stream)
    rendering = TextGenerationRendering(call, is_listed=is_stream is None)
    return GenerationJob(model.engine, [call.request], rendering, call.is_stream, prompt_param="inputs")


def model_of(fields: BodyFields, context: RouteContext) -> FoundModel:
    """Return the model that a body names, or the variant of its adapter `adapter_id`."""
    model = context.registry.find(fields.text("model"), is_required=False)
    parameters = fields.object("parameters")
    adapter = None if parameters is None else parameters.text("adapter_id")
    if adapter is None:
        return model
    info = gate_of(model).info
    if adapter not in info.adapters:
        hint = f"{info.name} has {', '.join(info.adapters) or 'none'}"
        raise UnknownModel(f"the adapter {adapter[:200]!r} is not loaded", param="parameters.adapter_id", hint=hint)
    return adapter_variant(gate_of(model), info, adapter)


def server_info(context: RouteContext) -> dict[str, Any]:
    info = context.registry.default.info
    return {
        "model_id": info.name,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": info.max_context - 1,
        "max_total_tokens": info.max_context,
        "max_client_batch_size": 1,
        "router": "tokenmill",
        "version": tokenmill.__version__,
    }
