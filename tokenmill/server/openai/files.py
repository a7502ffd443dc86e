"""OpenAI's Files: upload, list, retrieve, content, delete.

An upload is written to disk while it arrives, so its size is limited by a setting and not by memory. Batches read and
write files. A file belongs to the API key that uploaded it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.errors import Overloaded
from tokenmill.server.body import refuse
from tokenmill.server.multipart import Form, read_form
from tokenmill.server.openai import schemas
from tokenmill.server.openai.pages import page_after, parse_digits, query_integer
from tokenmill.server.routing import Endpoint, RouteContext, json_response, owner_of
from tokenmill.server.state.files import StoredFiles

PURPOSES = ("batch", "user_data", "assistants", "vision", "evals")
BATCH_FILE_LIFETIME_S = 30 * 86_400.0
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_NAME = 512  # characters
MAX_UPLOADS = 16  # concurrent
MAX_LISTED = 10_000
PART_BYTES = 64 * 1024  # of a download


def file_endpoints(context: RouteContext, files: StoredFiles) -> list[Endpoint]:
    num_uploads = 0

    async def upload_file(request: Request) -> Response:
        nonlocal num_uploads
        if num_uploads >= MAX_UPLOADS:
            raise Overloaded("too many files are being sent at the same time", retry_after_s=2.0)
        num_uploads += 1
        writer = files.writer()
        try:
            config = context.config
            form = await read_form(
                request,
                writer.add,
                max_file_bytes=config.max_file_bytes,
                stall_s=config.body_timeout_s,
                origins=config.cors_origin,
            )
            purpose, expires_s = parse_form(form)
            name = (form.file_name or "")[:MAX_NAME]
            row = await files.keep(writer, owner_of(request), name=name, purpose=purpose, expires_s=expires_s)
        finally:
            num_uploads -= 1
            writer.drop()
        return json_response(file_object(row))

    async def list_files(request: Request) -> Response:
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            refuse("order", "must be asc or desc")
        limit = query_integer(request, "limit", MAX_LISTED, 1, MAX_LISTED)
        rows = await files.list_of(owner_of(request), request.query_params.get("purpose"), order == "desc")
        return json_response(page_after([file_object(row) for row in rows], request, limit))

    async def retrieve_file(request: Request) -> Response:
        return json_response(file_object(await files.get(owner_of(request), request.path_params["file_id"])))

    async def file_content(request: Request) -> Response:
        content = await files.open(owner_of(request), request.path_params["file_id"])
        length = {"content-length": str(os.fstat(content.fileno()).st_size)}
        return StreamingResponse(parts_of(content), headers=length, media_type="application/octet-stream")

    async def delete_file(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await files.delete(owner_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    one = "/v1/files/{file_id}"
    return [
        Endpoint("GET", "/v1/files", list_files, "OpenAI", schemas.FILES_REPLY, (400,)),
        Endpoint(
            "POST",
            "/v1/files",
            upload_file,
            "OpenAI",
            schemas.FILE_REPLY,
            (400, 408, 413, 415, 429),
            schemas.FILE_BODY,
            body_media_type="multipart/form-data",
        ),
        Endpoint("GET", one, retrieve_file, "OpenAI", schemas.FILE_REPLY, (404,)),
        Endpoint("DELETE", one, delete_file, "OpenAI", schemas.FILE_DELETED_REPLY, (404, 409)),
        Endpoint(
            "GET",
            f"{one}/content",
            file_content,
            "OpenAI",
            {"type": "string"},
            (404,),
            media_type="application/octet-stream",
        ),
    ]


def parts_of(content: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file in parts, then close it. Starlette runs this iterator in threads."""
    with content:
        while data := content.read(PART_BYTES):
            yield data


def parse_form(form: Form) -> tuple[str, float | None]:
    """Return the purpose of an upload and its expiry time, in seconds since the epoch."""
    if form.file_name is None:
        refuse("file", "is required, with a file name")
    purpose = form.fields.get("purpose", "")
    if purpose not in PURPOSES:
        refuse("purpose", f"must be one of {', '.join(PURPOSES)}, got {purpose[:60]!r}")
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return purpose, time.time() + BATCH_FILE_LIFETIME_S if purpose == "batch" else None
    if anchor != "created_at":
        refuse("expires_after[anchor]", "must be created_at")
    return purpose, time.time() + parse_expiry(seconds, "expires_after[seconds]")


def parse_expiry(seconds: Any, param: str) -> int:
    """Check a number of seconds, which is a JSON number or the text of a form field."""
    number = parse_digits(seconds) if isinstance(seconds, str) else seconds
    if type(number) is not int or not MIN_EXPIRY_S <= number <= MAX_EXPIRY_S:
        refuse(param, f"must be an integer between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}")
    return number


def file_object(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["num_bytes"],
        "created_at": int(row["created_s"]),
        "expires_at": None if row["expires_s"] is None else int(row["expires_s"]),
        "filename": row["name"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }
