"""The endpoints of /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.errors import InvalidRequest
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.body import parse_object, refuse
from tokenmill.server.dialect import STREAM_HEADERS
from tokenmill.server.generation import GenerationJob, GenerationResponse
from tokenmill.server.openai.responses import schemas
from tokenmill.server.openai.responses.background import BackgroundResponse, BackgroundResponses, lifecycle_frames
from tokenmill.server.openai.responses.conversations import conversation_endpoints
from tokenmill.server.openai.responses.generate import ResponseGenerator
from tokenmill.server.openai.responses.pages import item_page
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response

PATH = "/v1/responses"


def response_endpoints(context: RouteContext) -> list[Endpoint]:
    generator = ResponseGenerator(context)
    background = BackgroundResponses(context, generator)
    context.services.append(background)
    database, store = context.state.database, generator.store

    async def create_response(request: Request) -> Response:
        record: RequestRecord = request.state.record
        record.is_generation = True
        body = await context.parsed(request, dict[str, Any])
        made = await generator.make(body, record.key_id)
        if made.call.references.is_background:
            record.is_generation = False  # it is counted when it is over
            running = await background.begin(made)
            return follow(running, -1) if made.call.references.is_stream else json_response(made.writer.response)
        record.model = made.engine.info.name
        return GenerationResponse(context.start_run(generator.job(made), record), context.config.keep_alive_s)

    async def count_input_tokens(request: Request) -> Response:
        body = await context.parsed(request, dict[str, Any])
        count = await generator.count(body, request.state.record.key_id)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def response(request: Request) -> Response:
        name, owner = named(request)
        running = background.find(name, owner)
        if _flag(request, "stream"):
            after = _starting_after(request)
            if running is not None:
                return follow(running, after)
            kept, frames = await database.read(partial(store.events, response_id=name, owner=owner))
            return replay(kept, frames, after)
        if running is not None:
            return json_response(running.made.writer.response)
        return json_response(await database.read(partial(store.response, response_id=name, owner=owner)))

    async def delete_response(request: Request) -> Response:
        name, owner = named(request)
        if (running := background.find(name, owner)) is not None:
            await background.cancel(running)
        await database.write(partial(store.delete, response_id=name, owner=owner))
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel_response(request: Request) -> Response:
        name, owner = named(request)
        if (running := background.find(name, owner)) is not None:
            await background.cancel(running)
        return json_response(await database.write(partial(store.cancel, response_id=name, owner=owner)))

    async def response_input_items(request: Request) -> Response:
        name, owner = named(request)
        items = await database.read(partial(store.input_items, response_id=name, owner=owner))
        return json_response(item_page(items, request))

    def follow(running: BackgroundResponse, after: int) -> Response:
        return events_response(running.follow(after, context.config.keep_alive_s))

    async def response_job(data: bytes, owner: str) -> GenerationJob:
        made = await generator.make(parse_object(data), owner)
        if made.call.references.is_background:
            refuse("background", "is not possible in a batch, which is in the background itself")
        return generator.job(made)

    one, missing = f"{PATH}/{{response_id}}", (404,)
    reply = schemas.RESPONSE_REPLY
    return [
        Endpoint(
            "POST",
            PATH,
            create_response,
            "OpenAI",
            reply,
            READING,
            schemas.RESPONSE_BODY,
            stream=schemas.RESPONSE_STREAM,
            job=response_job,
        ),
        Endpoint(
            "POST",
            f"{PATH}/input_tokens",
            count_input_tokens,
            "OpenAI",
            schemas.COUNT_REPLY,
            READING,
            schemas.RESPONSE_BODY,
        ),
        Endpoint("GET", one, response, "OpenAI", reply, (400, 404), stream=schemas.RESPONSE_STREAM),
        Endpoint("DELETE", one, delete_response, "OpenAI", schemas.DELETED_REPLY, missing),
        Endpoint("POST", f"{one}/cancel", cancel_response, "OpenAI", reply, (400, 404)),
        Endpoint("GET", f"{one}/input_items", response_input_items, "OpenAI", schemas.ITEMS_REPLY, (400, 404)),
        *conversation_endpoints(context, generator),
    ]


def named(request: Request) -> tuple[str, str]:
    """The id that a request names, and whose it must be."""
    return request.path_params["response_id"], request.state.record.key_id


def replay(response: dict[str, Any], frames: list[bytes], after: int) -> Response:
    """The stream of a response that is over."""
    if not response["background"]:
        raise InvalidRequest("only responses with background: true can be streamed again", param="stream")
    return events_response(iterate((frames or lifecycle_frames(response))[after + 1 :]))


async def iterate(frames: Iterable[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


def events_response(frames: AsyncIterator[bytes]) -> Response:
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    return StreamingResponse(frames, headers=headers, media_type="text/event-stream")


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false").lower()
    if given not in ("true", "false"):
        refuse(name, "must be true or false")
    return given == "true"


def _starting_after(request: Request) -> int:
    given = request.query_params.get("starting_after")
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        refuse("starting_after", "must be the number of an event")
    return int(given)
