"""Ids of HTTP calls, engine requests and replies.

request id of a call      the client's `x-request-id`, or `req-…`: in the log and in every reply's headers
request id in the engine  unique among running requests: each prompt of a call has a different one
id of a reply             in the format of the API: `chatcmpl-…`
"""

from __future__ import annotations

import re
import uuid

_ACCEPTED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_id(prefix: str = "") -> str:
    return prefix + uuid.uuid4().hex


def call_id(client_id: str) -> str:
    """Return the id that a client sent with its call, if it is short and plain; otherwise a new one."""
    return client_id if _ACCEPTED.fullmatch(client_id) else new_id("req-")


def engine_ids(call: str, count: int) -> list[str]:
    """Return ids for the engine requests of a call. A call's id is not unique: some proxies repeat it."""
    unique = f"{call}-{uuid.uuid4().hex[:12]}"
    return [f"{unique}-{number}" for number in range(count)]
