"""Processes one line of a batch like a request over HTTP (same parser, engine and rendering), at a lower priority."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace

import msgspec

from tokenmill.errors import EngineDead, Overloaded, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.batches.lines import BatchLine
from tokenmill.server.dialect import path_only
from tokenmill.server.errors import RETRY_AFTER_S, InternalError
from tokenmill.server.generation import GenerationJob
from tokenmill.server.request_ids import new_id
from tokenmill.server.routing import MakeJob, RouteContext
from tokenmill.types import BACKGROUND_PRIORITY, Usage

log = get_log("server")


@dataclass(frozen=True)
class LineAnswer:
    """The result of a batch line: the body of a reply, or of an error."""

    request_id: str
    status: int  # HTTP status
    body: bytes
    usage: Usage | None = None

    @property
    def is_error(self) -> bool:
        return self.status >= 400


async def answer_line(
    line: BatchLine,
    owner: str,
    make_job: MakeJob,
    context: RouteContext,
    *,
    priority: int = BACKGROUND_PRIORITY,
    engine_timeout_s: float = math.inf,
) -> LineAnswer:
    """Process a line; return its reply or its error. While the engine is full or restarting, wait.
    `engine_timeout_s`: how long to wait for a dead engine before raising EngineDead."""
    until = time.monotonic() + engine_timeout_s
    while True:
        request_id = new_id("req-")
        try:
            job = with_priority(await make_job(line.body, owner), priority)
            return await _answer(line, request_id, owner, job, context)
        except (Overloaded, EngineDead) as error:
            if isinstance(error, EngineDead) and time.monotonic() > until:
                raise
            await asyncio.sleep(error.retry_after_s if isinstance(error, Overloaded) else RETRY_AFTER_S)
        except TokenmillError as error:
            return failed_line(line, request_id, error, context)
        except Exception:
            log.exception("line %d of a batch failed (%s)", line.number, request_id)
            return failed_line(line, request_id, InternalError(), context)


def failed_line(line: BatchLine, request_id: str, error: TokenmillError, context: RouteContext) -> LineAnswer:
    """Return the answer for a failed line, with the error in the dialect of the line's endpoint."""
    dialect = context.dialects.of(path_only(line.url))
    return LineAnswer(request_id, dialect.error_status(error), dialect.error_body(error, request_id))


async def _answer(
    line: BatchLine, request_id: str, owner: str, job: GenerationJob, context: RouteContext
) -> LineAnswer:
    model = job.engine.info.name
    record = RequestRecord(
        request_id, "POST", line.url, key_id=owner, is_generation=True, is_batch_line=True, model=model
    )
    run = context.start_run(job, record)
    try:
        await run.accept()
        reply = await run.whole()
    except TokenmillError as error:
        record.note_failure(error)
        raise
    finally:
        await run.close()
        context.count(record)
    return LineAnswer(request_id, reply.status_code, bytes(reply.body), record.usage)


def with_priority(job: GenerationJob, base: int) -> GenerationJob:
    """Return the job with its priorities added to `base`, so that lines keep their order among each other. A smaller
    number runs first; negative priorities count as 0."""
    requests = [msgspec.structs.replace(one, priority=base + max(one.priority, 0)) for one in job.requests]
    return replace(job, requests=requests)
