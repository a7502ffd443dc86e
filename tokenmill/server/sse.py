"""Server-sent events: the few bytes around a payload, and the headers that keep proxies from buffering."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: every client skips it
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def frame(payload: bytes) -> bytes:
    """One event; `payload` is JSON and so has no line break inside."""
    return b"data: " + payload + b"\n\n"
