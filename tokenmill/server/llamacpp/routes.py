"""llama.cpp's native endpoints: /completion, /infill, /apply-template, /props and /slots.

/tokenize and /detokenize are in `server/tokens.py`, /health and /metrics in `server/admin.py`. A slot is a row of the
scheduler, and any request may use any row, so /slots shows only how many are in use. With several API keys, it needs
one with `sees_all`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import tokenmill
from tokenmill.config.server import ServerConfig
from tokenmill.engine.text_workers import text_size
from tokenmill.errors import Overloaded
from tokenmill.params import SamplingParams
from tokenmill.server.auth import require_operator
from tokenmill.server.body import BodyFields, refuse
from tokenmill.server.gate import ServedEngine
from tokenmill.server.generation import GenerationJob
from tokenmill.server.llamacpp.parse import DEFAULTS, NativeCall, parse_infill, parse_native_completion
from tokenmill.server.llamacpp.render import NativeRendering, generation_settings
from tokenmill.server.openai.parse import parse_tokenize
from tokenmill.server.routing import READING, TEXT, Endpoint, RouteContext, Schema, json_response, list_of, object_of
from tokenmill.server.variants import FoundModel
from tokenmill.types import ChatRequest

TAG = "llama.cpp"
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
SLOT: Schema = object_of(id={"type": "integer"}, is_processing=FLAG)
REPLY: Schema = {"anyOf": [object_of(content=TEXT, stop=FLAG), list_of(object_of(content=TEXT, stop=FLAG))]}
STREAM = "Done. With `stream`: `data:` lines with `content`, the last one with `stop: true`."
COMPLETION_BODY: Schema = {"type": "object", "required": ["prompt"], "properties": {}, "example": {"prompt": "1, 2,"}}
INFILL_BODY: Schema = {
    "type": "object",
    "required": ["input_prefix", "input_suffix"],
    "properties": {"input_prefix": TEXT, "input_suffix": TEXT},
    "example": {"input_prefix": "def f():\n", "input_suffix": "    return x"},
}
TEMPLATE_BODY: Schema = {"type": "object", "required": ["messages"], "properties": {"messages": {"type": "array"}}}
ParseCall = Callable[[dict[str, Any], ServedEngine, ServerConfig], NativeCall]


class NoFreeSlot(Overloaded):
    """All slots are in use, and the client set `fail_on_no_slot`."""

    http_status = 503


def llamacpp_endpoints(context: RouteContext) -> list[Endpoint]:
    async def native_completion(request: Request) -> Response:
        return await context.generate(request, lambda body: native_job(body, context, parse_native_completion))

    async def infill(request: Request) -> Response:
        return await context.generate(request, lambda body: native_job(body, context, parse_infill))

    async def apply_template(request: Request) -> Response:
        model, conversation = await context.parsed(request, lambda body: parse_template_body(body, context))
        text = await context.workers.run(text_size(conversation), lambda: model.engine.chat_text(conversation))
        return json_response({"prompt": text})

    async def props(request: Request) -> Response:
        return json_response(await context.when_read(lambda: properties(context.registry.default)))

    async def slots(request: Request) -> Response:
        require_operator(request)
        rows = await context.when_read(lambda: slots_of(context.registry.default))
        if "fail_on_no_slot" in request.query_params and all(slot["is_processing"] for slot in rows):
            raise NoFreeSlot("no slot is free")
        return json_response(rows)

    return [
        Endpoint("POST", "/completion", native_completion, TAG, REPLY, READING, COMPLETION_BODY, stream=STREAM),
        Endpoint("POST", "/infill", infill, TAG, REPLY, READING, INFILL_BODY, stream=STREAM),
        Endpoint("POST", "/apply-template", apply_template, TAG, object_of(prompt=TEXT), READING, TEMPLATE_BODY),
        Endpoint(
            "GET", "/props", props, TAG, object_of(default_generation_settings=OBJECT, chat_template=TEXT), (503,)
        ),
        Endpoint(
            "GET", "/slots", slots, TAG, list_of(object_of(id={"type": "integer"}, is_processing=FLAG)), (403, 503)
        ),
    ]


def native_job(body: dict[str, Any], context: RouteContext, parse: ParseCall) -> GenerationJob:
    model = context.registry.find(BodyFields(body).text("model"), is_required=False)
    engine = model.engine
    call = parse(body, engine, context.config)
    prompts = [one.prompt if isinstance(one.prompt, str) else engine.detokenize(one.prompt) for one in call.requests]
    rendering = NativeRendering(call, model.info, prompts)
    param = "prompt" if call.requests[0].suffix is None else "input_prefix"
    return GenerationJob(engine, call.requests, rendering, call.is_stream, prompt_param=param)


def parse_template_body(body: dict[str, Any], context: RouteContext) -> tuple[FoundModel, ChatRequest]:
    fields = BodyFields(body)
    model = context.registry.find(fields.text("model"), is_required=False)
    conversation = parse_tokenize(fields, model.info) if fields.get("messages") is not None else None
    if not isinstance(conversation, ChatRequest):
        refuse("messages", "is required")
    return model, conversation


def properties(model: FoundModel) -> dict[str, Any]:
    info, engine = model.info, model.engine
    bos, ends = info.spec.bos_token_id, info.spec.eos_token_ids
    return {
        "default_generation_settings": {
            "n_ctx": info.max_context,
            "params": generation_settings(SamplingParams(**{**DEFAULTS, **info.defaults}), is_stream=True),
        },
        "total_slots": info.max_running,
        "model_alias": info.name,
        "model_path": "" if info.path is None else str(info.path),
        "modalities": {"vision": False, "audio": False},
        "chat_template": info.chat_template,
        "bos_token": "" if bos is None else engine.detokenize([bos]),
        "eos_token": engine.detokenize(list(ends[:1])),
        "build_info": f"tokenmill {tokenmill.__version__}",
    }


def slots_of(model: FoundModel) -> list[dict[str, Any]]:
    num_busy = model.engine.stats().running
    return [
        {"id": slot, "n_ctx": model.info.max_context, "is_processing": slot < num_busy}
        for slot in range(model.info.max_running)
    ]
