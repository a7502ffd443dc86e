"""The lines of a batch: each is a request, in the form that OpenAI's Batch API has.

    {"custom_id": "row-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": …}}

A file is checked whole before any of it runs, and every fault names its line. What a body says is not looked at here:
it goes through the parser of its endpoint when its turn comes, and a fault there is that line's own error.
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
MAX_FAULTS = 100  # that are reported; a file may consist of faulty lines


class LineFault(InvalidRequest):
    """A fault of one line of a batch."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


@dataclass(frozen=True)
class BatchLine:
    """One request; `body` is JSON, to be parsed again by its endpoint."""

    number: int  # counted from 1
    custom_id: str
    url: str
    body: bytes
    model: str | None


def parse_line(number: int, data: bytes, urls: Collection[str]) -> BatchLine:
    """A line as a request to one of these paths; LineFault says what is wrong with it."""
    if len(data) > MAX_LINE_BYTES:
        raise LineFault("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    value = parse_json_line(data)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        problem = "is required: a string of 1 to 512 characters"
        raise LineFault("missing_required_parameter", f"custom_id {problem}", param="custom_id")
    if value.get("method", "POST") != "POST":
        raise LineFault("invalid_method", f"method must be POST, got {shown(value['method'])}", param="method")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in urls:
        raise LineFault("invalid_url", f"url must be {' or '.join(urls)}, got {shown(url)}", param="url")
    if not isinstance(body, dict):
        raise LineFault("missing_required_parameter", "body is required: a JSON object", param="body")
    if body.get("stream"):
        raise LineFault("invalid_value", "stream is not possible in a batch", param="body.stream")
    model = body.get("model")
    return BatchLine(number, custom_id, url, orjson.dumps(body), model if isinstance(model, str) else None)


def parse_json_line(data: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    if not data.strip():
        raise LineFault("invalid_json_line", "the line is blank")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LineFault("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineFault("invalid_json_line", f"the line must be a JSON object, got {kind_of(value)}")
    return value


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1, one at a time; without a byte order mark and line ends, and
    without blank lines at the end."""
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
    """Lines, one that is too long cut off: it is refused, and need not be in memory for that."""
    while line := file.readline(MAX_LINE_BYTES + 2):
        yield line
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            pass


@dataclass
class FileCheck:
    """The result of checking a whole file."""

    num_lines: int = 0
    model: str | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)  # as clients see them
    num_faults: int = 0

    def add(self, fault: LineFault, line: int | None) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            where = "" if line is None else f"line {line}: "
            message = f"{where}{fault.message}"
            self.faults.append({"code": fault.code, "message": message, "param": fault.param, "line": line})


def check_file(path: Path, url: str) -> FileCheck:
    """Check every line of a file. Blocks for seconds if the file is large."""
    check = FileCheck()
    seen: dict[str, int] = {}
    for number, data in raw_lines(path):
        check.num_lines += 1
        if check.num_lines > MAX_LINES:
            check.add(LineFault("too_many_lines", f"a batch has at most {MAX_LINES} lines"), None)
            return check
        try:
            line = parse_line(number, data, (url,))
            first = seen.setdefault(line.custom_id, number)
            if first != number:
                problem = f"custom_id {shown(line.custom_id)} is that of line {first} too"
                raise LineFault("duplicate_custom_id", problem, param="custom_id")
            check.model = check.model or line.model
            if line.model != check.model:
                problem = f"a batch has one model: {shown(check.model)}, not {shown(line.model)}"
                raise LineFault("mismatched_model", problem, param="body.model")
        except LineFault as fault:
            check.add(fault, number)
    if not check.num_lines:
        check.add(LineFault("empty_file", "the file has no lines"), None)
    return check
