"""A line stays a line, whatever a client sent."""

from __future__ import annotations

import io
import logging
import re

from tokenmill.observe.log import configure_logging, event, get_log, shown


def _lines(level: str = "info") -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    configure_logging(level, stream)
    return stream, get_log("test")


def test_one_line_with_time_level_event_and_fields() -> None:
    stream, log = _lines()
    event(log, "request", id="chatcmpl-1", prompt_tokens=12, total_s=0.84, cached=False, error=None)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info "
        r"request id=chatcmpl-1 prompt_tokens=12 total_s=0\.84 cached=no error=-\n",
        stream.getvalue(),
    )


def test_values_cannot_forge_lines_or_fields() -> None:
    stream, log = _lines()
    event(log, "request", id='x\n2026 info login user="root" \x1b[31m')
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert shown("a b") == '"a b"' and shown("") == '""' and shown("k=v") == '"k=v"'
    assert len(shown("x" * 10_000)) <= 402


def test_what_libraries_warn_of_is_a_line_like_others() -> None:
    stream, _ = _lines()
    server = logging.getLogger("uvicorn.error")
    server.info("Started server process")
    server.warning("Invalid HTTP request received.")
    assert re.fullmatch(r"\S+Z warning Invalid HTTP request received\.\n", stream.getvalue())


def test_level_and_repeated_configuration() -> None:
    stream, log = _lines("warning")
    event(log, "quiet")
    event(log, "loud", level=logging.WARNING)
    assert "quiet" not in stream.getvalue() and stream.getvalue().count("loud") == 1
