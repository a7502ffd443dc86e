"""Anthropic's Message Batches: many requests in one body, processed in the background, with results to fetch later.

    create ─► in_progress: every request is `processing` ─► ended: each has succeeded, errored, expired or was canceled
                   └─► canceling ─┘                              └─► results, one JSON line per request, in any order

They use the same machinery as OpenAI's batches (`server/batches`): the requests of the body are stored as the batch's
input file, each with its own model, and the results are served from the database instead of a file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.errors import InvalidRequest
from tokenmill.server.anthropic import schemas
from tokenmill.server.anthropic.pages import page_of
from tokenmill.server.anthropic.schemas import CUSTOM_ID, MAX_REQUESTS
from tokenmill.server.batches import table
from tokenmill.server.batches.answers import LineAnswer
from tokenmill.server.batches.lines import BatchLine
from tokenmill.server.batches.runner import BatchDialect, BatchRunner
from tokenmill.server.batches.table import NewBatch, Outcome
from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response, owner_of
from tokenmill.server.state.files import HIDDEN

DIALECT = "anthropic"
ENDPOINT = "/v1/messages"
LIFETIME_S = 24 * 3600.0  # requests that did not start by then expire
OUTCOMES = ("succeeded", "errored", "canceled", "expired")
ENDED = ("completed", "expired", "cancelled")


def message_batch_endpoints(context: RouteContext, runner: BatchRunner) -> list[Endpoint]:
    database = context.state.database
    runner.dialects[DIALECT] = BatchDialect(
        answered_line, unanswered_line, lambda row, status: finish(runner, row, status)
    )

    async def find(request: Request) -> sqlite3.Row:
        owner, batch_id = owner_of(request), request.path_params["batch_id"]
        return await database.read(lambda connection: table.find_batch(connection, owner, DIALECT, batch_id))

    def batch_reply(request: Request, row: sqlite3.Row) -> Response:
        return json_response(batch_object(row, origin_of(request)))

    async def create_message_batch(request: Request) -> Response:
        lines = await context.parsed(request, parse_batch)
        owner, writer = owner_of(request), runner.files.writer()
        try:
            await writer.add(b"".join(lines))
            file = await runner.files.keep(writer, owner, name="", purpose=HIDDEN, expires_s=None)
        finally:
            writer.drop()
        batch = NewBatch(
            owner,
            DIALECT,
            ENDPOINT,
            file["id"],
            LIFETIME_S,
            status="in_progress",
            num_lines=len(lines),
            num_bytes=file["num_bytes"],
            prefix="msgbatch_",
        )
        return batch_reply(request, await runner.add(batch))

    async def message_batches(request: Request) -> Response:
        owner, origin = owner_of(request), origin_of(request)
        rows = await database.read(lambda connection: table.list_batches(connection, owner, DIALECT))
        return json_response(page_of([batch_object(row, origin) for row in rows], request))

    async def message_batch(request: Request) -> Response:
        return batch_reply(request, await find(request))

    async def cancel_message_batch(request: Request) -> Response:
        row = await runner.cancel(owner_of(request), DIALECT, request.path_params["batch_id"])
        return batch_reply(request, row)

    async def delete_message_batch(request: Request) -> Response:
        row = await find(request)
        if row["status"] not in ENDED:
            raise InvalidRequest("a message batch that is in progress can't be deleted", hint="cancel it first")
        await database.write(lambda connection: connection.execute("DELETE FROM batches WHERE id = ?", (row["id"],)))
        return json_response({"id": row["id"], "type": "message_batch_deleted"})

    async def message_batch_results(request: Request) -> Response:
        row = await find(request)
        if row["status"] not in ENDED:
            raise InvalidRequest("the message batch has not ended yet, so it has no results")
        return StreamingResponse(result_lines(runner, row["id"]), media_type="application/x-jsonl")

    path = "/v1/messages/batches"
    batch, missing = schemas.BATCH_REPLY, (404,)
    return [
        Endpoint("GET", path, message_batches, "Anthropic", schemas.BATCHES_REPLY, (400,)),
        Endpoint("POST", path, create_message_batch, "Anthropic", batch, READING, schemas.BATCH_BODY),
        Endpoint("GET", f"{path}/{{batch_id}}", message_batch, "Anthropic", batch, missing),
        Endpoint("DELETE", f"{path}/{{batch_id}}", delete_message_batch, "Anthropic", schemas.DELETED_REPLY, missing),
        Endpoint("POST", f"{path}/{{batch_id}}/cancel", cancel_message_batch, "Anthropic", batch, missing),
        Endpoint(
            "GET",
            f"{path}/{{batch_id}}/results",
            message_batch_results,
            "Anthropic",
            {"type": "string"},
            missing,
            media_type="application/x-jsonl",
        ),
    ]


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────


def parse_batch(body: dict[str, Any]) -> list[bytes]:
    """Return the requests of a batch as the lines of its input file. Their bodies are checked when they are run, so an
    invalid one fails alone."""
    requests = BodyFields(body).items("requests", MAX_REQUESTS)
    if not requests:
        refuse("requests", "is required and must not be empty")
    seen: set[str] = set()
    lines = []
    for number, value in enumerate(requests):
        custom_id, params = _request(value, f"requests[{number}]")
        if custom_id in seen:
            refuse(f"requests[{number}].custom_id", f"{shown(custom_id)} is repeated")
        seen.add(custom_id)
        line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": params}
        lines.append(orjson.dumps(line) + b"\n")
    return lines


def _request(value: object, path: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with custom_id and params, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    custom_id = fields.required_text("custom_id")
    if not CUSTOM_ID.fullmatch(custom_id):
        refuse(fields.name("custom_id"), "must be 1 to 64 letters, digits, _ or -")
    params = fields.object("params")
    if params is None:
        refuse(fields.name("params"), "is required: the body of a message")
    if params.boolean("stream"):
        refuse(params.name("stream"), "is not possible in a batch")
    return custom_id, params.values


# ── replies ────────────────────────────────────────────────────────────────────────────────────────────


def origin_of(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def batch_object(row: sqlite3.Row, origin: str) -> dict[str, Any]:
    """Return the batch in Anthropic's form. All requests count as processing until the batch has ended."""
    facts, is_ended = table.facts_of(row), row["status"] in ENDED
    cancelled_s = facts.get("cancelling_s")
    status = "ended" if is_ended else "in_progress" if cancelled_s is None else "canceling"
    ended_s = next((facts[f"{one}_s"] for one in ENDED if f"{one}_s" in facts), None)
    counts = {kind: row[kind] if is_ended else 0 for kind in OUTCOMES}
    return {
        "id": row["id"],
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {"processing": 0 if is_ended else row["num_lines"], **counts},
        "created_at": _timestamp(row["created_s"]),
        "expires_at": _timestamp(row["due_s"]),
        "cancel_initiated_at": _timestamp(cancelled_s),
        "ended_at": _timestamp(ended_s),
        "archived_at": None,
        "results_url": f"{origin}/v1/messages/batches/{row['id']}/results" if is_ended else None,
    }


def _timestamp(moment_s: float | None) -> str | None:
    return None if moment_s is None else datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def answered_line(line: BatchLine, answer: LineAnswer) -> bytes:
    kind, field = (b"errored", b"error") if answer.is_error else (b"succeeded", b"message")
    result = b'{"type":"' + kind + b'","' + field + b'":' + answer.body + b"}"
    return b'{"custom_id":' + orjson.dumps(line.custom_id) + b',"result":' + result + b"}"


def unanswered_line(line: BatchLine, outcome: Outcome) -> bytes:
    return orjson.dumps({"custom_id": line.custom_id, "result": {"type": outcome}})


async def finish(runner: BatchRunner, row: sqlite3.Row, status: str) -> None:
    """Set the final status of a batch and delete its requests; its results are kept."""

    def work(connection: sqlite3.Connection) -> None:
        table.move(connection, row["id"], status, server=None)
        runner.files.remove(connection, row["input"])

    await runner.database.write(work)


async def result_lines(runner: BatchRunner, batch_id: str) -> AsyncIterator[bytes]:
    last = 0
    while True:
        lines = await runner.database.read(table.Results(batch_id, last, OUTCOMES))
        if not lines:
            return
        yield b"".join(line["result"] + b"\n" for line in lines)
        last = lines[-1]["line"]
