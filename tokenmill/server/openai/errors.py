"""Errors as OpenAI's clients read them: always message, type, param and code; `code` is a string.

Their SDKs retry 408, 409, 429 and 5xx, so a client's own mistake must never become one of those.
"""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response

from tokenmill.errors import Overloaded, TokenmillError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
RETRY_AFTER_ENGINE_S = 2.0


def error_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(error: TokenmillError) -> bytes:
    content = {
        "message": str(error),
        "type": error_type(error.http_status),
        "param": error.param,
        "code": error.code,
    }
    return orjson.dumps({"error": content})


def error_headers(error: TokenmillError) -> dict[str, str]:
    if error.http_status == 401:
        return {"www-authenticate": 'Bearer realm="tokenmill"'}
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if error.http_status == 503:
        return {"retry-after": str(math.ceil(RETRY_AFTER_ENGINE_S))}
    return {}


def error_response(error: TokenmillError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error_body(error),
        status_code=error.http_status,
        headers={**error_headers(error), **(headers or {})},
        media_type="application/json",
    )
