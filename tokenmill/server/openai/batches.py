"""OpenAI's Batches: a file of requests in, a file of replies and a file of errors out.

The output file has the lines that succeeded, with status and body; the error file has those that failed, expired or
were cancelled. A file without lines is not created.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.server.batches import table
from tokenmill.server.batches.answers import LineAnswer
from tokenmill.server.batches.lines import BatchLine
from tokenmill.server.batches.runner import BatchDialect, BatchRunner
from tokenmill.server.batches.table import NewBatch, Outcome
from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.openai import schemas
from tokenmill.server.openai.files import BATCH_FILE_LIFETIME_S, parse_expiry
from tokenmill.server.openai.pages import page_after, query_integer
from tokenmill.server.openai.params import parse_metadata
from tokenmill.server.request_ids import new_id
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response, owner_of
from tokenmill.server.state.files import FileWriter

DIALECT = "openai"
WINDOW = re.compile(r"([1-9][0-9]{0,3})(m|h|d)")
WINDOW_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 30 * 86_400
UNANSWERED_ERRORS = {
    "canceled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "the batch's completion window ended before this request was answered"),
}
STATUSES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_endpoints(context: RouteContext, runner: BatchRunner) -> list[Endpoint]:
    database = context.state.database
    runner.dialects[DIALECT] = BatchDialect(
        answered_line, unanswered_line, lambda row, status: finish(runner, row, status)
    )

    async def create_batch(request: Request) -> Response:
        batch = await context.parsed(request, lambda body: parse_batch(body, owner_of(request), list(runner.jobs)))
        file = await runner.files.use(batch.owner, batch.input, "input_file_id")
        if file["purpose"] != "batch":
            refuse("input_file_id", f"must be a file with the purpose batch, not {file['purpose']}")
        return json_response(batch_object(await runner.add(batch)))

    async def list_batches(request: Request) -> Response:
        limit = query_integer(request, "limit", 20, 1, 100)
        rows = await database.read(lambda connection: table.list_batches(connection, owner_of(request), DIALECT))
        return json_response(page_after([batch_object(row) for row in rows], request, limit))

    async def retrieve_batch(request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        owner = owner_of(request)
        row = await database.read(lambda connection: table.find_batch(connection, owner, DIALECT, batch_id))
        return json_response(batch_object(row))

    async def cancel_batch(request: Request) -> Response:
        row = await runner.cancel(owner_of(request), DIALECT, request.path_params["batch_id"])
        return json_response(batch_object(row))

    one, reply = "/v1/batches/{batch_id}", schemas.BATCH_REPLY
    return [
        Endpoint("GET", "/v1/batches", list_batches, "OpenAI", schemas.BATCHES_REPLY, (400,)),
        Endpoint("POST", "/v1/batches", create_batch, "OpenAI", reply, READING, schemas.BATCH_BODY),
        Endpoint("GET", one, retrieve_batch, "OpenAI", reply, (404,)),
        Endpoint("POST", f"{one}/cancel", cancel_batch, "OpenAI", reply, (404,)),
    ]


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────


def parse_batch(body: dict[str, Any], owner: str, urls: Sequence[str]) -> NewBatch:
    fields = BodyFields(body)
    endpoint = fields.required_text("endpoint")
    if endpoint not in urls:
        refuse("endpoint", f"must be one of {', '.join(urls)}, got {shown(endpoint)}")
    window = fields.required_text("completion_window")
    lifetime_s = window_s(window)
    metadata = None if fields.get("metadata") is None else parse_metadata(fields)
    facts: dict[str, Any] = {"completion_window": window, "metadata": metadata}
    expiry = fields.object("output_expires_after")
    if expiry is not None:
        expiry.one_of("anchor", ("created_at",))
        facts["output_kept_s"] = parse_expiry(expiry.get("seconds"), "output_expires_after.seconds")
    return NewBatch(owner, DIALECT, endpoint, fields.required_text("input_file_id"), lifetime_s, facts=facts)


def window_s(window: str) -> int:
    """Parse a completion window such as 24h."""
    match = WINDOW.fullmatch(window)
    seconds = 0 if match is None else int(match[1]) * WINDOW_UNITS_S[match[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        refuse("completion_window", f"must be a time of up to 30 days, such as 24h or 90m, got {shown(window)}")
    return seconds


# ── replies ────────────────────────────────────────────────────────────────────────────────────────────


def batch_object(row: sqlite3.Row) -> dict[str, Any]:
    facts = table.facts_of(row)
    moments = {f"{status}_at": _seconds(facts.get(f"{status}_s")) for status in STATUSES}
    errors = facts.get("errors")
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "model": row["model"],
        "errors": None if errors is None else {"object": "list", "data": errors},
        "input_file_id": row["input"],
        "completion_window": facts["completion_window"],
        "status": row["status"],
        "output_file_id": facts.get("output_file"),
        "error_file_id": facts.get("error_file"),
        "created_at": int(row["created_s"]),
        "expires_at": int(row["due_s"]),
        **moments,
        "request_counts": {
            "total": row["num_lines"],
            "completed": row["succeeded"],
            "failed": row["errored"] + row["canceled"] + row["expired"],
        },
        "usage": {
            "input_tokens": row["input_tokens"],
            "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
            "output_tokens": row["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": row["reasoning_tokens"]},
            "total_tokens": row["input_tokens"] + row["output_tokens"],
        },
        "metadata": facts["metadata"],
    }


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


def answered_line(line: BatchLine, answer: LineAnswer) -> bytes:
    """Return a line of an output or error file. The reply's JSON is inserted unchanged."""
    head = {"id": new_id("batch_req_"), "custom_id": line.custom_id}
    response = {"status_code": answer.status, "request_id": answer.request_id}
    return (
        orjson.dumps(head)[:-1]
        + b',"response":'
        + orjson.dumps(response)[:-1]
        + b',"body":'
        + answer.body
        + b'},"error":null}'
    )


def unanswered_line(line: BatchLine, outcome: Outcome) -> bytes:
    code, message = UNANSWERED_ERRORS[outcome]
    error = {"code": code, "message": message}
    return orjson.dumps({"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": None, "error": error})


async def finish(runner: BatchRunner, row: sqlite3.Row, status: str) -> None:
    """Create the result files of a batch whose lines have all ended. They and the final status become visible in one
    transaction."""
    output = await write_results(runner, row, ("succeeded",))
    errors = await write_results(runner, row, ("errored", "canceled", "expired"))
    facts = table.facts_of(row)
    expires_s = time.time() + facts.get("output_kept_s", BATCH_FILE_LIFETIME_S)
    contents = [
        (fact, name, writer, await asyncio.to_thread(writer.finish))
        for fact, name, writer in (("output_file", "output", output), ("error_file", "error", errors))
    ]

    def work(connection: sqlite3.Connection) -> None:
        file_ids: dict[str, str] = {}
        for fact, name, writer, sha256 in contents:
            if writer.num_bytes:
                file = runner.files.insert(
                    connection,
                    writer,
                    sha256,
                    row["owner"],
                    name=f"{row['id']}_{name}.jsonl",
                    purpose="batch_output",
                    expires_s=expires_s,
                )
                file_ids[fact] = file["id"]
        connection.execute("DELETE FROM batch_lines WHERE batch = ?", (row["id"],))
        table.move(connection, row["id"], status, server=None, num_bytes=0, **file_ids)

    try:
        await runner.database.write(work)
    finally:
        for _, _, writer, _ in contents:
            writer.drop()


async def write_results(runner: BatchRunner, row: sqlite3.Row, outcomes: Sequence[str]) -> FileWriter:
    """Write the results of all lines with these outcomes to a file, in the order of the batch."""
    writer = runner.files.writer()
    last = 0
    while True:
        lines = await runner.database.read(table.Results(row["id"], last, outcomes))
        if not lines:
            return writer
        await writer.add(b"".join(line["result"] + b"\n" for line in lines))
        last = lines[-1]["line"]
