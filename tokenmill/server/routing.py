"""Endpoints as rows of a table: from it come the routes and the description of them that /openapi.json gives.

    Endpoint(method, path, handler, body schema, reply schema) ──► Starlette route
                                                               └─► /openapi.json, which /docs shows

Bodies are parsed by hand (`body.py`), strictly and in microseconds, so a web framework with models of its own would
check everything twice. The server is plain Starlette and the schemas are JSON Schema, held against real replies by
tests.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import tokenmill
from tokenmill.config.server import ServerConfig
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.text_workers import Result, TextWorkers
from tokenmill.observe.live_histogram import LiveHistogram
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.body import BodyReader, parse_object
from tokenmill.server.dialect import Dialect, Dialects, Recognises, RequestHead, head_of, json_bytes
from tokenmill.server.gate import NotRead
from tokenmill.server.generation import GenerationJob, GenerationResponse, GenerationRun
from tokenmill.server.keys import KeyRecord, KeyRing
from tokenmill.server.live import LiveRequests
from tokenmill.server.loader import ModelLoader
from tokenmill.server.logged_texts import LoggedTexts
from tokenmill.server.quotas import Quotas, RunQuota
from tokenmill.server.registry import ModelRegistry
from tokenmill.server.response_cache import ResponseCache
from tokenmill.server.state.server_state import ServerState, Service
from tokenmill.server.tenancy import as_tenant, require_allowed

Schema = dict[str, Any]
JsonHandler = Callable[[Request], Awaitable[Response]]
MakeJob = Callable[[bytes, str], Awaitable[GenerationJob]]  # the JSON of a body, and whose it is

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
MAX_USER_LENGTH = 128
LONG_BODY = 64 << 10  # bytes: parsed in a few milliseconds at most
READING = (400, 404, 408, 413, 415, 429, 503)  # how a request with a body may fail
FAILURES = {
    400: "The request is wrong; `param` names the field, `message` says why.",
    403: "Clients may not change the models of this server.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    409: "Something that has not ended needs it.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are waiting; try again after `Retry-After` seconds.",
    501: "There is no such operation here.",
    502: "No source could deliver the model.",
    503: "Loading, stopping or starting again; try again after `Retry-After` seconds.",
}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return json_bytes(orjson.dumps(content), status, headers)


# ── what handlers have at hand ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RouteContext:
    """The models, the settings, and the way from a request's body to its reply."""

    registry: ModelRegistry
    config: ServerConfig
    dialects: Dialects
    bodies: BodyReader
    workers: TextWorkers
    live: LiveRequests
    gaps_of: Callable[[str], LiveHistogram]  # where the times between a model's outputs are counted
    log_texts: Callable[[Sequence[ClientRequest]], LoggedTexts | None]  # of a new request, for the request log
    count: Callable[[RequestRecord], None]  # a generation that no HTTP request waited for, into the metrics
    state: ServerState
    loader: ModelLoader
    keys: KeyRing = field(default_factory=KeyRing)
    cache: ResponseCache | None = None
    quotas: Quotas = field(default_factory=Quotas)
    services: list[Service] = field(default_factory=list)  # added by endpoints: started and ended with the server

    async def parsed(self, request: Request, parse: Callable[[dict[str, Any]], Result]) -> Result:
        """Read and parse the body. Wrong JSON is refused even while the model still loads."""
        dialect = self.dialects.of(head_of(request.scope))
        data = await self.bodies.read(request, takes_any_type=dialect.takes_any_content_type)
        return await self.made_of(data, parse)

    async def made_of(self, data: bytes, parse: Callable[[dict[str, Any]], Result]) -> Result:
        """Parse some JSON; a long text is parsed in a thread."""
        while True:
            try:
                return await self.workers.run(len(data), lambda: parse(parse_object(data)), long=LONG_BODY)
            except NotRead as unread:
                await unread.read()

    def job_maker(self, make_job: Callable[[dict[str, Any], str], GenerationJob]) -> MakeJob:
        """Return a function that makes a job of a batch line's body, from a parser that takes the body and its
        owner."""

        async def make(data: bytes, owner: str) -> GenerationJob:
            return await self.made_of(data, lambda body: make_job(body, owner))

        return make

    def settings_of(self, key: KeyRecord | None) -> ServerConfig:
        """The settings that hold for a client: its key may have a smallest priority of its own."""
        if key is None or key.min_priority is None:
            return self.config
        return replace(self.config, min_priority=key.min_priority)

    async def when_read(self, ask: Callable[[], Result]) -> Result:
        """The answer to a question about a model, after its files were read if they were not."""
        while True:
            try:
                return ask()
            except NotRead as unread:
                await unread.read()

    async def generate(
        self, request: Request, make_job: Callable[[dict[str, Any]], GenerationJob | Response]
    ) -> Response:
        """A generation from body to reply; `make_job` is the dialect's parser, which may have a reply already."""
        record: RequestRecord = request.state.record
        record.is_generation = True

        def make(body: dict[str, Any]) -> GenerationJob | Response:
            record.user = user_in(body)
            return make_job(body)

        job = await self.parsed(request, make)
        if isinstance(job, Response):
            record.is_generation = False
            return job
        record.model = job.engine.info.name
        return GenerationResponse(self.start_run(job, record), self.config.keep_alive_s)

    def start_run(self, job: GenerationJob, record: RequestRecord) -> GenerationRun:
        """The run of a job. Every generation begins here, so that none shares cached work with another key's, and all
        are shown among the live ones once they are accepted, until they are closed."""
        record.key = record.key or self.keys.get(record.key_id)
        require_allowed(job, record.key)
        if record.key_id:
            job = as_tenant(job, record.key_id, record.key, shares_cache=self.config.share_cache)
        record.is_stream, record.first_request = job.is_stream, job.requests[0] if job.requests else None
        record.texts = self.log_texts(job.requests)
        record.gaps = self.gaps_of(job.engine.info.name)
        limits = record.limits = self.quotas.of(record.key)
        return GenerationRun(job, record, self.live, None if limits is None else RunQuota(limits), self.cache)


def user_in(body: dict[str, Any]) -> str:
    """The user that a client names in a body, in OpenAI's way or in Anthropic's."""
    metadata = body.get("metadata")
    named = [body.get("safety_identifier"), body.get("user")]
    named += [metadata.get("user_id")] if isinstance(metadata, dict) else []
    return next((name[:MAX_USER_LENGTH] for name in named if isinstance(name, str) and name), "")


# ── the table ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Endpoint:
    """One row: a route and its description."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # as Starlette writes it: `/v1/models/{model_id:path}`
    handler: JsonHandler
    tag: str
    reply: Schema
    failures: tuple[int, ...] = ()  # statuses; any endpoint may also fail in ways that all share
    body: Schema | None = None
    description: str = ""
    stream: str | None = None  # what a streamed reply is like, where there is one
    media_type: str = "application/json"
    stream_media_type: str = "text/event-stream"
    when: Recognises | None = None  # of several endpoints with this path the first that recognises a request answers
    job: MakeJob | None = None  # what a body asks for, where a line of a batch may ask it too
    body_media_type: str = "application/json"

    @property
    def documented_path(self) -> str:
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)


def routes_of(endpoints: Sequence[Endpoint], dialects: Dialects) -> list[Route]:
    """The routes of all endpoints, and of their description."""
    document = openapi_document(endpoints, dialects)

    async def openapi(request: Request) -> Response:
        return json_response(document)

    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)
    return [*(_route_of(path, rows) for path, rows in by_path.items()), get_route("/openapi.json", openapi)]


def _route_of(path: str, endpoints: list[Endpoint]) -> Route:
    """Return one route for all endpoints of a path, so that the answer to a wrong method lists the allowed ones."""
    methods: set[str] = {endpoint.method for endpoint in endpoints}
    if len(endpoints) == 1:
        return _route(path, endpoints[0].handler, methods)
    ordered = sorted(endpoints, key=lambda endpoint: endpoint.when is None)  # the one for all others comes last

    async def choose(request: Request) -> Response:
        head = head_of(request.scope)
        for endpoint in ordered:
            if endpoint.method == head.method and (endpoint.when is None or endpoint.when(head)):
                return await endpoint.handler(request)
        raise HTTPException(404, "Not Found")

    return _route(path, choose, methods)


def get_route(path: str, handler: JsonHandler) -> Route:
    """Return a route that the OpenAPI description leaves out: files of pages, and the description itself."""
    return _route(path, handler, {"GET"})


def _route(path: str, handler: JsonHandler, methods: set[str]) -> Route:
    route = Route(path, handler)
    route.methods = methods  # without HEAD, which Starlette adds: the middleware answers it as GET
    return route


def openapi_document(endpoints: Sequence[Endpoint], dialects: Dialects) -> Schema:
    """The OpenAPI 3.1 description of a server."""
    paths: dict[str, Schema] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.when is None):  # the one for all others counts
        dialect = dialects.of(RequestHead(endpoint.method, endpoint.path, Headers()))
        operation, methods = _operation(endpoint, dialect), paths.setdefault(endpoint.documented_path, {})
        if (other := methods.get(endpoint.method.lower())) is not None:  # replies of other media types
            content = operation["responses"]["200"]["content"]
            operation["responses"]["200"]["content"] = {**other["responses"]["200"]["content"], **content}
        methods[endpoint.method.lower()] = operation
    info = {"title": "Tokenmill", "description": "OpenAI-compatible inference.", "version": tokenmill.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _operation(endpoint: Endpoint, dialect: Dialect) -> Schema:
    name = endpoint.handler.__name__
    operation: Schema = {
        "tags": [endpoint.tag],
        "summary": name.replace("_", " ").capitalize(),
        "operationId": name,
        "responses": _responses(endpoint, dialect),
    }
    if endpoint.description:
        operation["description"] = endpoint.description
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {endpoint.body_media_type: {"schema": endpoint.body}}}
    parameters = re.findall(r"{(\w+)}", endpoint.documented_path)
    if parameters:
        operation["parameters"] = [{"name": p, "in": "path", "required": True, "schema": TEXT} for p in parameters]
    return operation


def _responses(endpoint: Endpoint, dialect: Dialect) -> Schema:
    error_content = {"application/json": {"schema": dialect.error_schema}}
    content: Schema = {endpoint.media_type: {"schema": endpoint.reply}}
    if endpoint.stream is not None:
        content[endpoint.stream_media_type] = {}  # OpenAPI 3.1 has no schemas for events
    failures = {
        str(dialect.statuses.get(status, status)): {"description": FAILURES[status], "content": error_content}
        for status in endpoint.failures
    }
    return {
        "200": {"description": endpoint.stream or "Done.", "content": content},
        **failures,
        "default": {"description": "Any other failure.", "content": error_content},
    }


def object_of(**properties: Schema) -> Schema:
    """Return the schema of an object that always has these fields, and perhaps more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}
