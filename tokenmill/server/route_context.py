"""What every route of every dialect needs at hand: the door to the engine, the settings, and how to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.config.server import ServerConfig
from tokenmill.engine.status import ModelInfo
from tokenmill.server.bodies import BodyReader
from tokenmill.server.gate import EngineGate
from tokenmill.server.generation import GenerationJob, GenerationResponse, GenerationRun
from tokenmill.server.request_record import RequestRecord


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


@dataclass(frozen=True)
class RouteContext:
    door: EngineGate
    config: ServerConfig
    bodies: BodyReader

    @property
    def info(self) -> ModelInfo:
        return self.door.info

    async def read(self, request: Request) -> dict[str, Any]:
        """The body; a wrong one is refused even while the model loads."""
        return await self.bodies.read_json(request)

    async def answer(
        self, request: Request, make_job: Callable[[dict[str, Any], RouteContext], GenerationJob]
    ) -> Response:
        """A generation from body to reply; `make_job` is the dialect's."""
        record: RequestRecord = request.state.record
        record.is_generation = True
        body = await self.read(request)
        engine = self.door.engine
        job = make_job(body, self)
        record.model = self.info.name
        run = GenerationRun(engine, job, record)
        await run.accept()
        return GenerationResponse(run, job, record, self.config.keep_alive_s)
