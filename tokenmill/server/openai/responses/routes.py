"""The endpoints of /v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.errors import InvalidRequest
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.body import parse_object, refuse
from tokenmill.server.dialect import SSE_PING, STREAM_HEADERS
from tokenmill.server.generation import GenerationJob, GenerationResponse
from tokenmill.server.openai.pages import parse_digits
from tokenmill.server.openai.responses import schemas
from tokenmill.server.openai.responses.background import (
    POLL_S,
    BackgroundResponse,
    BackgroundResponses,
    lifecycle_frames,
)
from tokenmill.server.openai.responses.conversations import conversation_endpoints
from tokenmill.server.openai.responses.generate import ResponseGenerator
from tokenmill.server.openai.responses.pages import item_page
from tokenmill.server.openai.responses.parse import require_includable
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response, owner_of
from tokenmill.server.state.responses import UNFINISHED
from tokenmill.server.state.rows import UnknownRow

PATH = "/v1/responses"


def response_endpoints(context: RouteContext) -> list[Endpoint]:
    generator = ResponseGenerator(context)
    background = BackgroundResponses(context, generator)
    context.services.append(background)
    routes = ResponseRoutes(context, generator, background)
    one, reply, stream = f"{PATH}/{{response_id}}", schemas.RESPONSE_REPLY, schemas.RESPONSE_STREAM
    body, items = schemas.RESPONSE_BODY, schemas.ITEMS_REPLY
    create, count = routes.create_response, routes.count_input_tokens
    return [
        Endpoint("POST", PATH, create, "OpenAI", reply, READING, body, stream=stream, job=routes.line_job),
        Endpoint("POST", f"{PATH}/input_tokens", count, "OpenAI", schemas.COUNT_REPLY, READING, body),
        Endpoint("GET", one, routes.response, "OpenAI", reply, (400, 404), stream=stream),
        Endpoint("DELETE", one, routes.delete_response, "OpenAI", schemas.DELETED_REPLY, (404,)),
        Endpoint("POST", f"{one}/cancel", routes.cancel_response, "OpenAI", reply, (400, 404)),
        Endpoint("GET", f"{one}/input_items", routes.response_input_items, "OpenAI", items, (400, 404)),
        *conversation_endpoints(context, generator),
    ]


class ResponseRoutes:
    """The handlers of the Responses endpoints."""

    def __init__(self, context: RouteContext, generator: ResponseGenerator, background: BackgroundResponses) -> None:
        self._context = context
        self._generator = generator
        self._background = background
        self._database = context.state.database
        self._store = generator.store

    async def create_response(self, request: Request) -> Response:
        record: RequestRecord = request.state.record
        record.is_generation = True
        body = await self._context.parsed(request, dict[str, Any])
        job = await self._generator.make(body, record.key_id)
        if job.call.references.is_background:
            record.is_generation = False  # the background response is counted when it ends
            running = await self._background.begin(job)
            is_stream = job.call.references.is_stream
            return self._follow(running, -1) if is_stream else json_response(job.writer.response)
        record.model = job.model
        run = self._context.start_run(self._generator.generation_job(job), record)
        return GenerationResponse(run, self._context.config.keep_alive_s)

    async def line_job(self, data: bytes, owner: str) -> GenerationJob:
        """Return the job of a batch line."""
        job = await self._generator.make(parse_object(data), owner)
        if job.call.references.is_background:
            refuse("background", "is not possible in a batch, which runs in the background anyway")
        return self._generator.generation_job(job)

    async def count_input_tokens(self, request: Request) -> Response:
        body = await self._context.parsed(request, dict[str, Any])
        count = await self._generator.count(body, request.state.record.key_id)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def response(self, request: Request) -> Response:
        name, owner = named(request)
        _require_known_queries(request)
        running = self._background.find(name, owner)
        if _flag(request, "stream"):
            after = _starting_after(request)
            if running is not None:
                return self._follow(running, after)
            stored, frames = await self._database.read(partial(self._store.events, response_id=name, owner=owner))
            require_background(stored)
            if stored["status"] in UNFINISHED:
                return events_response(self._follow_elsewhere(name, owner, after))
            return events_response(iterate(replayed(stored, frames)[after + 1 :]))
        if running is not None:
            return json_response(running.job.writer.response)
        return json_response(await self._database.read(partial(self._store.response, response_id=name, owner=owner)))

    async def delete_response(self, request: Request) -> Response:
        name, owner = named(request)
        await self._end(name, owner)
        await self._database.write(partial(self._store.delete, response_id=name, owner=owner))
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        name, owner = named(request)
        await self._end(name, owner)
        return json_response(await self._database.write(partial(self._store.cancel, response_id=name, owner=owner)))

    async def response_input_items(self, request: Request) -> Response:
        name, owner = named(request)
        _require_known_queries(request)
        items = await self._database.read(partial(self._store.input_items, response_id=name, owner=owner))
        return json_response(item_page(items, request))

    async def _end(self, name: str, owner: str) -> None:
        if (running := self._background.find(name, owner)) is not None:
            await self._background.cancel(running)

    def _follow(self, running: BackgroundResponse, after: int) -> Response:
        return events_response(running.follow(after, self._context.config.keep_alive_s))

    async def _follow_elsewhere(self, name: str, owner: str, after: int) -> AsyncIterator[bytes]:
        """Wait until a response that runs on another server has ended, then yield its events."""
        next_ping = time.monotonic() + self._context.config.keep_alive_s
        find = partial(self._store.events, response_id=name, owner=owner)
        with contextlib.suppress(UnknownRow):  # deleted meanwhile
            while (found := await self._database.read(find))[0]["status"] in UNFINISHED:
                await asyncio.sleep(POLL_S)
                if time.monotonic() >= next_ping:
                    next_ping = time.monotonic() + self._context.config.keep_alive_s
                    yield SSE_PING
            for frame in replayed(*found)[after + 1 :]:
                yield frame


def named(request: Request) -> tuple[str, str]:
    """Return the id of the response that a request names, and its owner."""
    return request.path_params["response_id"], owner_of(request)


def require_background(response: dict[str, Any]) -> None:
    if not response["background"]:
        raise InvalidRequest("only responses with background: true can be streamed later", param="stream")


def replayed(response: dict[str, Any], frames: list[bytes]) -> list[bytes]:
    """Return the events of a finished response."""
    return frames or lifecycle_frames(response)


async def iterate(frames: Iterable[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


def events_response(frames: AsyncIterator[bytes]) -> Response:
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    return StreamingResponse(frames, headers=headers, media_type="text/event-stream")


def _require_known_queries(request: Request) -> None:
    """Refuse query parameters for data that this server does not have."""
    for name in ("include", "include[]"):
        require_includable(request.query_params.getlist(name))
    if _flag(request, "include_obfuscation"):
        refuse("include_obfuscation", "is not supported by this server")


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        refuse(name, "must be true or false")
    return value == "true"


def _starting_after(request: Request) -> int:
    value = request.query_params.get("starting_after")
    if value is None:
        return -1
    number = parse_digits(value)
    if number is None:
        refuse("starting_after", "must be the number of an event")
    return number
