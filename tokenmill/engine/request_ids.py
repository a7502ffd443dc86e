"""Ids of calls, engine requests and replies, all made here.

request id of a call      the client's `x-request-id`, or `req-…`: in the log, in every reply's headers
request id in the engine  unique among running requests: of a call with several prompts each has its own
id of a reply             as its dialect wants it: `chatcmpl-…`
"""

from __future__ import annotations

import re
import uuid

_ACCEPTED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_id(prefix: str = "") -> str:
    return prefix + uuid.uuid4().hex


def call_id(given: str) -> str:
    """The id a client gave its call, if it is short and plain; else a new one."""
    return given if _ACCEPTED.fullmatch(given) else new_id("req-")


def engine_ids(call: str, count: int) -> list[str]:
    """Ids for the engine requests of a call. Proxies give several calls the same id, so it alone is not unique."""
    unique = f"{call}-{uuid.uuid4().hex[:12]}"
    return [f"{unique}-{number}" for number in range(count)]
