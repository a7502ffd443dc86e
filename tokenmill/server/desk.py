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
from tokenmill.server.door import Door
from tokenmill.server.limits import Bodies
from tokenmill.server.native import Job, Reply, Run
from tokenmill.server.record import Record


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


@dataclass(frozen=True)
class Desk:
    door: Door
    config: ServerConfig
    bodies: Bodies

    @property
    def info(self) -> ModelInfo:
        return self.door.info

    async def read(self, request: Request) -> dict[str, Any]:
        """The body; a wrong one is refused even while the model loads."""
        return await self.bodies.read_json(request)

    async def answer(self, request: Request, make_job: Callable[[dict[str, Any], Desk], Job]) -> Response:
        """A generation from body to reply; `make_job` is the dialect's."""
        record: Record = request.state.record
        record.is_generation = True
        body = await self.read(request)
        engine = self.door.engine
        job = make_job(body, self)
        record.model = self.info.name
        run = Run(engine, job, record)
        await run.accept()
        return Reply(run, job, record, self.config.keep_alive_s)
