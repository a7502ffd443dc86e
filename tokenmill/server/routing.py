"""Endpoints as rows of a table, from which the routes and their OpenAPI description are made.

    Endpoint(method, path, handler, body schema, reply schema) ──► Starlette route
                                                               └─► /openapi.json, which /docs shows

Bodies are parsed by hand (`body.py`), strictly and in microseconds; a web framework with its own models would check
everything twice. So the server is plain Starlette, and the schemas are JSON Schema, which tests compare with real
replies.
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
MakeJob = Callable[[bytes, str], Awaitable[GenerationJob]]  # the JSON of a body, the id of its key ─► job

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
MAX_USER_LENGTH = 128
LONG_BODY = 64 << 10  # bytes: shorter ones are parsed on the event loop, in a few milliseconds at most
READING = (400, 404, 408, 413, 415, 429, 503)  # error statuses of endpoints that read a body
FAILURES = {
    400: "The request is invalid; `param` names the field, `message` the reason.",
    403: "Clients may not change the models of this server.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    409: "It is still needed by something that has not ended.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are waiting; try again after `Retry-After` seconds.",
    501: "This server does not support the operation.",
    502: "The model could not be downloaded.",
    503: "Loading, stopping or restarting; try again after `Retry-After` seconds.",
}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return json_bytes(orjson.dumps(content), status, headers)


# ── shared by all handlers ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RouteContext:
    """What handlers share: models, settings and services, and the steps from a request's body to its reply."""

    registry: ModelRegistry
    config: ServerConfig
    dialects: Dialects
    bodies: BodyReader
    workers: TextWorkers
    live: LiveRequests
    gaps_of: Callable[[str], LiveHistogram]  # model name ─► its histogram of times between outputs
    log_texts: Callable[[Sequence[ClientRequest]], LoggedTexts | None] | None  # collects texts for the request log
    count: Callable[[RequestRecord], None]  # counts a finished generation that belongs to no HTTP request
    state: ServerState
    loader: ModelLoader
    keys: KeyRing = field(default_factory=KeyRing)
    cache: ResponseCache | None = None
    quotas: Quotas = field(default_factory=Quotas)
    services: list[Service] = field(default_factory=list)  # started and closed with the server

    async def parsed(self, request: Request, parse: Callable[[dict[str, Any]], Result]) -> Result:
        """Read and parse the body. Invalid JSON is refused even while the model still loads."""
        dialect = self.dialects.of(head_of(request.scope))
        data = await self.bodies.read(request, takes_any_type=dialect.takes_any_content_type)
        return await self.parse_json(data, parse)

    async def parse_json(self, data: bytes, parse: Callable[[dict[str, Any]], Result]) -> Result:
        """Parse the JSON of a body, in a thread if it is long. If the parser needs a model whose files were not read
        yet, read them and parse again."""
        while True:
            try:
                return await self.workers.run(len(data), lambda: parse(parse_object(data)), long=LONG_BODY)
            except NotRead as unread:
                await unread.read()

    def job_maker(self, make_job: Callable[[dict[str, Any], str], GenerationJob]) -> MakeJob:
        """Return a function that makes a job from the body of a batch line. `make_job`: the parser, which takes the
        body's fields and the owner."""

        async def make(data: bytes, owner: str) -> GenerationJob:
            return await self.parse_json(data, lambda body: make_job(body, owner))

        return make

    def settings_of(self, key: KeyRecord | None) -> ServerConfig:
        """Return the settings for a client, with the `min_priority` of its key if it has one."""
        if key is None or key.min_priority is None:
            return self.config
        return replace(self.config, min_priority=key.min_priority)

    async def when_read(self, call: Callable[[], Result]) -> Result:
        """Return `call()`; if it needs a model whose files were not read yet, read them and call again."""
        while True:
            try:
                return call()
            except NotRead as unread:
                await unread.read()

    async def generate(
        self, request: Request, make_job: Callable[[dict[str, Any]], GenerationJob | Response]
    ) -> Response:
        """Handle a generation from body to reply. `make_job`: the dialect's parser, which may return a reply instead
        of a job."""
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
        """Create the run of a job. Every generation starts here, so that each is bound to its tenant and quota and is
        listed among the live requests while it runs."""
        if record.key_id and self.keys:
            record.key = self.keys.require(record.key_id)
        if record.key is not None:
            require_allowed(job.engine.info.name, record.key)
            record.limits = self.quotas.of(record.key)
        if job.keep_model is not None and (record.key is None or record.key.sees_all):
            job.keep_model()  # affects all users of the model
        if record.key_id:
            job = as_tenant(job, record.key_id, record.key, shares_cache=self.config.share_cache)
        record.is_stream, record.first_request = job.is_stream, job.requests[0] if job.requests else None
        record.texts = None if self.log_texts is None else self.log_texts(job.requests)
        record.gaps = self.gaps_of(job.engine.info.name)
        quota = None if record.limits is None else RunQuota(record.limits)
        return GenerationRun(job, record, self.live, quota, self.cache)


def owner_of(request: Request) -> str:
    """Return the owner of what a request stores: the id of its API key, "" if the server has no keys."""
    key_id: str = request.state.record.key_id
    return key_id


def user_in(body: dict[str, Any]) -> str:
    """Return the end user that a body names, in OpenAI's or Anthropic's field; "" if it names none."""
    metadata = body.get("metadata")
    names = [body.get("safety_identifier"), body.get("user")]
    names += [metadata.get("user_id")] if isinstance(metadata, dict) else []
    user = next((name for name in names if isinstance(name, str) and name), "")
    return "".join(filter(str.isprintable, user[:MAX_USER_LENGTH]))  # shown in operators' terminals


# ── the table ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Endpoint:
    """One row: a route and its OpenAPI description."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # in Starlette's notation: `/v1/models/{model_id:path}`
    handler: JsonHandler
    tag: str
    reply: Schema
    failures: tuple[int, ...] = ()  # error statuses, besides those that every endpoint has
    body: Schema | None = None
    description: str = ""
    stream: str | None = None  # description of the streamed reply, if it can be streamed
    media_type: str = "application/json"
    stream_media_type: str = "text/event-stream"
    when: Recognises | None = None  # of several endpoints of a path, the first that recognises the request handles it
    job: MakeJob | None = None  # makes a generation job from a body, if lines of a batch may use this endpoint
    body_media_type: str = "application/json"

    @property
    def documented_path(self) -> str:
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)


def routes_of(endpoints: Sequence[Endpoint], dialects: Dialects) -> list[Route]:
    """Return the routes of all endpoints, and of their OpenAPI description."""
    document = openapi_document(endpoints, dialects)

    async def openapi(request: Request) -> Response:
        return json_response(document)

    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)
    return [*(_route_of(path, rows) for path, rows in by_path.items()), get_route("/openapi.json", openapi)]


def _route_of(path: str, endpoints: list[Endpoint]) -> Route:
    """Return one route for all endpoints of a path, so that a 405 lists all allowed methods."""
    methods: set[str] = {endpoint.method for endpoint in endpoints}
    if len(endpoints) == 1:
        return _route(path, endpoints[0].handler, methods)
    ordered = sorted(endpoints, key=lambda endpoint: endpoint.when is None)  # the endpoint without `when` comes last

    async def choose(request: Request) -> Response:
        head = head_of(request.scope)
        for endpoint in ordered:
            if endpoint.method == head.method and (endpoint.when is None or endpoint.when(head)):
                return await endpoint.handler(request)
        raise HTTPException(404, "Not Found")

    return _route(path, choose, methods)


def get_route(path: str, handler: JsonHandler) -> Route:
    """Return a route that is not part of the OpenAPI description: files of pages, and the description itself."""
    return _route(path, handler, {"GET"})


def _route(path: str, handler: JsonHandler, methods: set[str]) -> Route:
    route = Route(path, handler)
    route.methods = methods  # without HEAD, which Starlette adds: the middleware turns it into GET
    return route


def openapi_document(endpoints: Sequence[Endpoint], dialects: Dialects) -> Schema:
    """Return the OpenAPI 3.1 description of a server."""
    paths: dict[str, Schema] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.when is None):  # one without `when` overrides
        dialect = dialects.of(RequestHead(endpoint.method, endpoint.path, Headers()))
        operation, methods = _operation(endpoint, dialect), paths.setdefault(endpoint.documented_path, {})
        if (other := methods.get(endpoint.method.lower())) is not None:  # add its replies of other media types
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
        content[endpoint.stream_media_type] = {}  # OpenAPI 3.1 can't describe server-sent events
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
    """Return the schema of an object that has at least these fields."""
    return {"type": "object", "required": list(properties), "properties": properties}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}
