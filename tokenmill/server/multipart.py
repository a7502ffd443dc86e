"""Bodies of type multipart/form-data, parsed while they arrive: short fields are kept, the file goes to a sink.

The file may be larger than memory, so its bytes are passed on piece by piece. A body that is too large is refused as
early as possible: by its announced length before a byte is read, or at the first byte beyond the limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.body import discard
from tokenmill.server.errors import BodyTooLarge, BodyTooSlow, OtherOrigin, WrongContentType

MAX_FIELDS = 32
MAX_FIELD_BYTES = 16 << 10
MAX_OVERHEAD_BYTES = 1 << 20  # fields, headers and boundaries: everything but the file
PIECE_BYTES = 1 << 20  # minimum size of a piece of the file that is passed on

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client's wrong form is reported to the client alone

Sink = Callable[[bytes], Awaitable[None]]


@dataclass
class Form:
    """The fields of a body, and the name of its file."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None  # None: the body had no file


async def read_form(
    request: Request, sink: Sink, *, max_file_bytes: int, stall_s: float, origins: Collection[str] = ()
) -> Form:
    """Parse a body and pass the bytes of its part `file` to the sink. `stall_s`: longest pause of the client.
    `origins`: web pages, besides our own, that may send forms."""
    require_allowed_origin(request, origins)
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise WrongContentType(
            "the body must be multipart/form-data", hint="with curl: -F file=@lines.jsonl -F purpose=batch"
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise WrongContentType("a compressed form is not supported", hint="send it without content-encoding")
    stream = request.stream()
    try:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > max_file_bytes + MAX_OVERHEAD_BYTES:
            raise too_large(max_file_bytes)
        reader = FormReader(options[b"boundary"], max_file_bytes)
        while True:
            async with asyncio.timeout(stall_s):
                chunk = await anext(stream, None)
            if chunk is None:
                break
            for piece in reader.push(chunk):
                await sink(piece)
        for piece in reader.finish():
            await sink(piece)
        return reader.form
    except TimeoutError:
        raise BodyTooSlow(f"nothing of the body arrived for {stall_s:g} s") from None
    except TokenmillError:
        await discard(stream)
        raise


def require_allowed_origin(request: Request, origins: Collection[str]) -> None:
    """Refuse forms of web pages that are neither ours nor allowed: browsers send forms to any server without CORS."""
    origin = request.headers.get("origin")
    is_ours = origin is None or urlsplit(origin).netloc == request.headers.get("host", "")
    if not is_ours and origin not in origins and "*" not in origins:
        raise OtherOrigin("web pages of other servers may not send files here", hint="--cors-origin allows an origin")


def too_large(max_file_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the file is larger than {max_file_bytes} bytes", hint="--max-file-bytes sets the limit")


class FormReader:
    """Collects the fields and the pieces of the file from the parser's callbacks."""

    def __init__(self, boundary: bytes, max_file_bytes: int) -> None:
        self.form = Form()
        self._max_file_bytes = max_file_bytes
        self._num_file_bytes = 0
        self._num_other_bytes = 0
        self._pieces: list[bytes] = []  # of the file, not passed on yet
        self._num_kept = 0
        self._header: list[bytes] = [b"", b""]
        self._name: str | None = None  # of the current part
        self._is_file = False
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._grow_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._grow_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._open_part,
                "on_part_data": lambda data, start, end: self._add(data[start:end]),
                "on_end": self._end,
            },
        )

    def push(self, chunk: bytes) -> list[bytes]:
        """Parse some bytes; return the file's bytes since the last call once they are PIECE_BYTES or more."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not valid multipart/form-data: {error}") from None
        return self._take() if self._num_kept >= PIECE_BYTES else []

    def finish(self) -> list[bytes]:
        if not self._has_ended:
            raise InvalidRequest("the body ends before its last boundary")
        return self._take()

    def _take(self) -> list[bytes]:
        whole, self._pieces, self._num_kept = b"".join(self._pieces), [], 0
        return [whole] if whole else []

    # ── callbacks of the parser ────────────────────────────────────────────────────────────────────────

    def _begin_part(self) -> None:
        self._name, self._is_file = None, False

    def _grow_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.strip().lower() == b"content-disposition":
            _, options = parse_options_header(value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            self._is_file = b"filename" in options
            if self._is_file:
                self._begin_file(options[b"filename"].decode("utf-8", "replace"))

    def _begin_file(self, file_name: str) -> None:
        if self._name != "file":
            raise InvalidRequest(f"the file must be in the field 'file', got {(self._name or '')[:60]!r}", param="file")
        if self.form.file_name is not None:
            raise InvalidRequest("the form must hold only one file", param="file")
        self.form.file_name = file_name

    def _open_part(self) -> None:
        if not self._name:
            raise InvalidRequest("a part of the body has no name")
        if not self._is_file:
            if self._name in self.form.fields:
                raise InvalidRequest(f"the field {self._name[:60]!r} is repeated", param=self._name[:60])
            if len(self.form.fields) >= MAX_FIELDS:
                raise InvalidRequest(f"the body has more than {MAX_FIELDS} fields")
            self.form.fields[self._name] = ""

    def _add(self, data: bytes) -> None:
        if self._is_file:
            self._num_file_bytes += len(data)
            if self._num_file_bytes > self._max_file_bytes:
                raise too_large(self._max_file_bytes)
            self._pieces.append(data)
            self._num_kept += len(data)
            return
        assert self._name is not None
        self._num_other_bytes += len(data)
        if self._num_other_bytes > MAX_FIELD_BYTES:
            raise InvalidRequest(f"the fields are longer than {MAX_FIELD_BYTES} bytes together", param=self._name[:60])
        self.form.fields[self._name] += data.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True
