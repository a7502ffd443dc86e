"""Errors of the HTTP server, in addition to the tree in `tokenmill/errors.py`.

An error does not depend on a dialect: it has `message`, `http_status`, `code`, `param` and `hint`. The dialect of the
request's path (`dialect.py`) renders its body; its HTTP headers are the same in all dialects.
"""

from __future__ import annotations

import math

from tokenmill.errors import InvalidRequest, Overloaded, TokenmillError

RETRY_AFTER_S = 2.0  # for a 503 without a time of its own
MAX_RETRY_AFTER_S = 120.0  # OpenAI's clients do not retry if they are told to wait longer
HTTP_CODES = {404: "unknown_route", 405: "method_not_allowed"}


class RoutingError(InvalidRequest):
    """The path does not exist, or does not allow this method."""

    def __init__(self, status: int, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.http_status = status
        self.code = HTTP_CODES.get(status, "invalid_request")


class InternalError(TokenmillError):
    """A bug in the server. The client gets no details; the log has the traceback under the request's id."""

    def __init__(self) -> None:
        super().__init__(
            "internal error: the server failed on this request",
            hint="the server's log has the details under this x-request-id",
        )


class NotReady(TokenmillError):
    """The reply of /health while the server is loading, draining or dead; the state is the error code."""

    http_status = 503

    def __init__(self, state: str, detail: str) -> None:
        super().__init__(f"not ready: {detail or state}")
        self.code = state


class MissingKey(TokenmillError):
    code = "invalid_api_key"
    http_status = 401


class ModelNotAllowed(TokenmillError):
    """The request's API key may not use this model."""

    code = "model_not_allowed"
    http_status = 403


class UnknownHost(TokenmillError):
    """The Host header of a request to a server without keys does not name this machine."""

    code = "unknown_host"
    http_status = 403


class OtherOrigin(TokenmillError):
    """A web page of another origin sent a form, which browsers allow without CORS."""

    code = "other_origin"
    http_status = 403


class UnreadableRequest(InvalidRequest):
    """The bytes are not HTTP/1.1, so the rest of the connection can't be parsed either."""

    code = "unreadable_request"


class HeadTooLarge(InvalidRequest):
    code = "head_too_large"
    http_status = 431


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    http_status = 413


class MissingBody(InvalidRequest):
    """A request that needs a body has none."""


class ModelsAreFixed(TokenmillError):
    """Clients may not change the models of this server."""

    code = "models_are_fixed"
    http_status = 403


class OperatorsOnly(TokenmillError):
    """A tenant requested data about all tenants together."""

    code = "operators_only"
    http_status = 403


class WrongContentType(InvalidRequest):
    code = "unsupported_media_type"
    http_status = 415


class BodyTooSlow(InvalidRequest):
    code = "body_timeout"
    http_status = 408


class Loading(Overloaded):
    """The model is not in memory yet; the client should retry soon."""

    code = "loading"
    http_status = 503


class LoadFailed(Overloaded):
    """A model could not be loaded. Other models are unaffected, and a later request tries again."""

    code = "model_load_failed"
    http_status = 503

    def __init__(self, name: str, reason: TokenmillError) -> None:
        super().__init__(f"the model {name} could not be loaded: {reason.message}", retry_after_s=5.0, hint=reason.hint)


def error_headers(error: TokenmillError) -> dict[str, str]:
    """Return the HTTP headers of an error reply: how to authenticate, and whether and when to retry.

    Clients retry every 5xx unless `x-should-retry` is false. They prefer `retry-after-ms` to the whole seconds of
    `retry-after`, and give up if the wait is longer than two minutes.
    """
    if error.http_status == 401:
        return {"www-authenticate": 'Bearer realm="tokenmill"'}
    if isinstance(error, Overloaded):
        return _retry_headers(error.retry_after_s)
    if error.http_status == 503:
        return _retry_headers(RETRY_AFTER_S)
    return {"x-should-retry": "false"} if error.http_status >= 500 else {}


def _retry_headers(wait_s: float) -> dict[str, str]:
    wait_s = min(max(wait_s, 0.001), MAX_RETRY_AFTER_S)
    return {
        "retry-after": str(math.ceil(wait_s)),
        "retry-after-ms": str(math.ceil(wait_s * 1000)),
        "x-should-retry": "true",
    }
