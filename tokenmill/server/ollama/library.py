"""Ollama's model endpoints: tags, show and ps, and those that change the store: pull, create, copy, delete, blobs.

/api/tags lists the models that this server serves, and those created from them. A pull downloads a model into the
store, from which it can be loaded; it does not change the list.

Changing the store is for administrators: these routes are open if the server listens on this machine alone, or with
--manage-models. Other web pages can't use them: a body from a browser must be JSON, which needs the server's permission
(CORS).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.errors import InvalidRequest, UnknownModel
from tokenmill.server.auth import is_operator, require_manager
from tokenmill.server.body import BROWSER_HEADERS, BodyFields, shown
from tokenmill.server.dialect import NDJSON_HEADERS, ndjson_line
from tokenmill.server.errors import BodyTooSlow, ModelsAreFixed, RoutingError
from tokenmill.server.ollama import schemas
from tokenmill.server.ollama.cards import running_card, show_card, tag_card
from tokenmill.server.ollama.parse import model_name_in
from tokenmill.server.ollama.store_work import (
    ConcurrencyLimit,
    Progress,
    ProgressTask,
    create_named,
    parse_create,
    pull_named,
)
from tokenmill.server.registry import ModelRegistry
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response
from tokenmill.server.variants import FoundModel
from tokenmill.store import LocalModel, Manifest, Store, copy_model, find_created, parse_name, plain_name
from tokenmill.store.created import BlobUpload

TAG = "Ollama"
MAX_PULLS = 2  # concurrent
MAX_UPLOADS = 4  # concurrent
MAX_UPLOAD_BYTES = 1 << 40  # the free disk space is a limit too
STALL_S = 60.0  # longest pause of an upload
FindModel = Callable[[str, ModelRegistry], FoundModel]


def library_endpoints(context: RouteContext, find_model: FindModel) -> list[Endpoint]:
    library = Library(context, find_model)
    progress: dict[str, Any] = {"stream": schemas.PROGRESS_STREAM, "stream_media_type": "application/x-ndjson"}
    changing = (*READING, 403)
    return [
        Endpoint("GET", "/api/tags", library.tags, TAG, schemas.TAGS_REPLY, (503,)),
        Endpoint("GET", "/api/ps", library.ps, TAG, schemas.PS_REPLY, (503,)),
        Endpoint("POST", "/api/show", library.show, TAG, schemas.SHOW_REPLY, READING, schemas.NAMED_BODY),
        Endpoint(
            "POST",
            "/api/pull",
            library.pull,
            TAG,
            schemas.PROGRESS_REPLY,
            (*changing, 502),
            schemas.PULL_BODY,
            **progress,
        ),
        Endpoint(
            "POST",
            "/api/create",
            library.create,
            TAG,
            schemas.PROGRESS_REPLY,
            changing,
            schemas.CREATE_BODY,
            **progress,
        ),
        Endpoint("POST", "/api/copy", library.copy, TAG, schemas.NOTHING, changing, schemas.COPY_BODY),
        Endpoint("DELETE", "/api/delete", library.delete, TAG, schemas.NOTHING, changing, schemas.NAMED_BODY),
        Endpoint("POST", "/api/push", library.push, TAG, schemas.NOTHING, (501,)),
        Endpoint("GET", "/api/blobs/{digest}", library.has_blob, TAG, schemas.NOTHING, (400, 403, 404)),
        Endpoint("POST", "/api/blobs/{digest}", library.add_blob, TAG, schemas.NOTHING, (400, 403, 408, 503)),
    ]


class Library:
    """The handlers of the model endpoints."""

    def __init__(self, context: RouteContext, find_model: FindModel) -> None:
        self._context = context
        self._find_model = find_model
        self._pulls, self._uploads = ConcurrencyLimit(MAX_PULLS, "downloads"), ConcurrencyLimit(MAX_UPLOADS, "uploads")

    # ── lists and descriptions ─────────────────────────────────────────────────────────────────────────

    async def tags(self, request: Request) -> Response:
        await self._context.registry.read_all()
        return json_response({"models": [tag_card(info) for info in self._context.registry.listed()]})

    async def ps(self, request: Request) -> Response:
        gates = [gate for gate in self._context.registry.gates if gate.loaded is not None]
        if not gates:
            self._context.registry.default.require_open()
        memory_of, shows_usage = self._context.loader.memory_of, is_operator(request.scope)
        cards = [running_card(gate, memory_of(gate), shows_usage=shows_usage) for gate in gates]
        return json_response({"models": cards})

    async def show(self, request: Request) -> Response:
        def parse(body: dict[str, Any]) -> dict[str, Any]:
            return show_card(self._find_model(model_name_in(body), self._context.registry).info)

        return json_response(await self._context.parsed(request, parse))

    # ── changes of the store ───────────────────────────────────────────────────────────────────────────

    async def pull(self, request: Request) -> Response:
        require_manager(request, self._context.config)

        def parse(body: dict[str, Any]) -> tuple[str, bool]:
            fields = BodyFields(body)
            fields.refuse_any(("insecure", "username", "password"))
            return model_name_in(body), fields.boolean("stream", True)

        name, is_stream = await self._context.parsed(request, parse)
        return await self._progress(lambda progress: pull_named(name, progress), is_stream, self._pulls)

    async def create(self, request: Request) -> Response:
        require_manager(request, self._context.config)
        call = await self._context.parsed(request, parse_create)
        base = await self._context.when_read(lambda: self._base(call.base)) if call.base else None
        return await self._progress(lambda progress: create_named(call, base, progress), call.is_stream, self._pulls)

    def _base(self, name: str) -> Manifest | None:
        """Return the manifest of the model to create another from; None if it was not downloaded yet."""
        try:
            info = self._find_model(name, self._context.registry).info
        except UnknownModel:
            return find_created(name, Store()) or find_stored(name)
        if info.manifest is not None:
            return info.manifest
        stored = Store().get(plain_name(info.name)) if info.path is not None else None
        if stored is not None:
            return stored
        return Manifest(name=info.name, source="local", files=[], weights=str(info.path.resolve() if info.path else ""))

    async def copy(self, request: Request) -> Response:
        require_manager(request, self._context.config)

        def parse(body: dict[str, Any]) -> tuple[str, str]:
            fields = BodyFields(body)
            return fields.required_text("source"), fields.required_text("destination")

        source, destination = await self._context.parsed(request, parse)
        self._refuse_served(destination, "replaced")
        base = await self._context.when_read(lambda: self._base(source))
        if base is None:
            raise UnknownModel(f'model "{source[:200]}" not found', param="source")
        await asyncio.to_thread(copy_model, Store(), base, destination)
        return Response(status_code=200)

    async def delete(self, request: Request) -> Response:
        require_manager(request, self._context.config)
        name = await self._context.parsed(request, model_name_in)
        await self._stop_serving_added(plain_name(name))
        self._refuse_served(name, "deleted")
        manifest = find_created(name, Store()) or find_stored(name)
        if manifest is None:
            raise UnknownModel(f"model '{name[:200]}' not found", param="model")
        await asyncio.to_thread(Store().remove, manifest.name)
        return Response(status_code=200)

    async def _stop_serving_added(self, name: str) -> None:
        """Stop serving a model that a client added, before its files are deleted."""
        registry = self._context.registry
        for gate in registry.gates:
            if gate.is_added and gate.name == name:
                registry.remove(gate)
                await self._context.loader.remove(gate)

    def _refuse_served(self, name: str, what: str) -> None:
        if plain_name(name) in self._context.registry.names():
            raise InvalidRequest(f"{shown(name)} is being served and can't be {what}", param="model")

    async def push(self, request: Request) -> Response:
        require_manager(request, self._context.config)
        raise RoutingError(501, "this server can't push models")

    # ── uploaded content ───────────────────────────────────────────────────────────────────────────────

    async def has_blob(self, request: Request) -> Response:
        require_manager(request, self._context.config)
        sha256 = digest_in(request)
        if not Store().has_blob(sha256):
            raise UnknownModel(f'blob "sha256:{sha256}" not found')
        return Response(status_code=200)

    async def add_blob(self, request: Request) -> Response:
        """Receive a file. Its content type may be anything, so browsers are refused by the headers that they send."""
        require_manager(request, self._context.config)
        if any(name in request.headers for name in BROWSER_HEADERS):
            raise ModelsAreFixed("files can't be uploaded by web pages")
        sha256 = digest_in(request)
        if Store().has_blob(sha256):
            return Response(status_code=200)
        with self._uploads.held():
            upload = BlobUpload(Store(), sha256, MAX_UPLOAD_BYTES)
            try:
                await self._receive(request, upload)
                await asyncio.to_thread(upload.finish)
            finally:
                upload.close()
        return Response(status_code=201)

    async def _receive(self, request: Request, upload: BlobUpload) -> None:
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout(STALL_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise BodyTooSlow(f"nothing of the file arrived within {STALL_S:g} s") from None
            if chunk is None:
                return
            await asyncio.to_thread(upload.write, chunk)

    # ── progress ───────────────────────────────────────────────────────────────────────────────────────

    async def _progress(self, work: Callable[[Progress], object], is_stream: bool, limit: ConcurrencyLimit) -> Response:
        """Start some work; stream its progress lines, or return only the last one."""
        task = ProgressTask(work, limit)
        if is_stream:
            lines = (ndjson_line(orjson.dumps(line)) async for line in task.lines())
            headers = {name.decode(): value.decode() for name, value in NDJSON_HEADERS}
            return StreamingResponse(lines, headers=headers)
        last: dict[str, Any] = {}
        async for line in task.lines():
            last = line
        if task.error is not None:
            raise task.error
        return json_response(last)


def digest_in(request: Request) -> str:
    kind, _, sha256 = str(request.path_params["digest"]).partition(":")
    Store().blob_path(sha256 if kind == "sha256" else "")  # refuses an invalid digest
    return sha256


def find_stored(name: str) -> Manifest | None:
    """Return the manifest of a downloaded model; None if there is none of this name."""
    try:
        model = parse_name(plain_name(name))
        return None if isinstance(model, LocalModel) else Store().get(model.name)
    except UnknownModel:
        return None
