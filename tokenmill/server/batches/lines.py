"""The lines of a batch: each is a request, in the form of OpenAI's Batch API.

    {"custom_id": "row-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": …}}

A whole file is checked before any of its lines run, and every error names its line. The bodies are not checked here:
the parser of the endpoint checks each when the line is run, and an invalid body fails only that line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tokenmill.errors import InvalidRequest
from tokenmill.server.body import kind_of, shown

BOM = b"\xef\xbb\xbf"
MAX_LINES = 50_000
MAX_LINE_BYTES = 16 << 20
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100  # errors reported for a file


class LineError(InvalidRequest):
    """A line of a batch is invalid."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch. `body`: JSON, which its endpoint parses."""

    number: int  # counted from 1
    custom_id: str
    url: str
    body: bytes
    model: str | None


def parse_line(number: int, data: bytes, urls: Collection[str]) -> BatchLine:
    """Parse a line; LineError if it is not a request to one of these paths."""
    if len(data) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    value = parse_json_line(data)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        problem = "is required: a string of 1 to 512 characters"
        raise LineError("missing_required_parameter", f"custom_id {problem}", param="custom_id")
    if value.get("method", "POST") != "POST":
        raise LineError("invalid_method", f"method must be POST, got {shown(value['method'])}", param="method")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in urls:
        raise LineError("invalid_url", f"url must be {' or '.join(urls)}, got {shown(url)}", param="url")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "body is required: a JSON object", param="body")
    if body.get("stream"):
        raise LineError("invalid_value", "stream is not possible in a batch", param="body.stream")
    model = body.get("model")
    return BatchLine(number, custom_id, url, orjson.dumps(body), model if isinstance(model, str) else None)


def parse_json_line(data: bytes) -> dict[str, Any]:
    """Parse a line that must be a JSON object."""
    if not data.strip():
        raise LineError("invalid_json_line", "the line is blank")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", f"the line must be a JSON object, got {kind_of(value)}")
    return value


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1, without a byte order mark and line ends. Blank lines at the
    end of the file are skipped."""
    num_blank = 0
    with path.open("rb") as file:
        for number, data in enumerate(_bounded(file), 1):
            line = (data.removeprefix(BOM) if number == 1 else data).rstrip(b"\r\n")
            if not line.strip():
                num_blank += 1
                continue
            for blank in range(num_blank, 0, -1):
                yield number - blank, b""
            num_blank = 0
            yield number, line


def _bounded(file: Any) -> Iterator[bytes]:
    """Yield the lines of a file. A line that is too long is cut, since it is refused and need not be in memory."""
    while line := file.readline(MAX_LINE_BYTES + 2):
        yield line
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            pass


@dataclass
class FileCheck:
    """The result of checking a whole file."""

    num_lines: int = 0
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)  # in the form that clients see

    def add(self, error: LineError, line: int | None) -> None:
        if len(self.errors) < MAX_ERRORS:
            message = error.message if line is None else f"line {line}: {error.message}"
            self.errors.append({"code": error.code, "message": message, "param": error.param, "line": line})


def check_file(path: Path, url: str) -> FileCheck:
    """Check every line of a file. This blocks for seconds if the file is large."""
    check = FileCheck()
    seen: dict[str, int] = {}
    for number, data in raw_lines(path):
        check.num_lines += 1
        if check.num_lines > MAX_LINES:
            check.add(LineError("too_many_lines", f"a batch has at most {MAX_LINES} lines"), None)
            return check
        try:
            line = parse_line(number, data, (url,))
            first = seen.setdefault(line.custom_id, number)
            if first != number:
                problem = f"custom_id {shown(line.custom_id)} is repeated: line {first} has it too"
                raise LineError("duplicate_custom_id", problem, param="custom_id")
            check.model = check.model or line.model
            if line.model != check.model:
                problem = f"all lines must have the same model: {shown(check.model)}, not {shown(line.model)}"
                raise LineError("mismatched_model", problem, param="body.model")
        except LineError as error:
            check.add(error, number)
    if not check.num_lines:
        check.add(LineError("empty_file", "the file has no lines"), None)
    return check
