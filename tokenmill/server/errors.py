"""Errors that only a server has, on top of the tree in `tokenmill/errors.py`; each dialect shows them its own way."""

from __future__ import annotations

from tokenmill.errors import InvalidRequest, Overloaded, TokenmillError

HTTP_CODES = {404: "unknown_route", 405: "method_not_allowed"}


class RefusedByRouting(InvalidRequest):
    """No such route, or not with this method."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = HTTP_CODES.get(status, "invalid_request")


class InternalError(TokenmillError):
    """A mistake of ours. The client gets no detail; the log has the traceback under the request's id."""

    def __init__(self) -> None:
        super().__init__("the server failed on this request", hint="its log has the details under this x-request-id")


class MissingKey(TokenmillError):
    code = "invalid_api_key"
    http_status = 401


class Unreadable(InvalidRequest):
    """What came is not HTTP; nothing that follows on this connection can be understood."""

    code = "unreadable_request"


class HeadTooLarge(InvalidRequest):
    code = "head_too_large"
    http_status = 431


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    http_status = 413


class WrongContentType(InvalidRequest):
    code = "unsupported_media_type"
    http_status = 415


class BodyTooSlow(InvalidRequest):
    code = "body_timeout"
    http_status = 408


class Loading(Overloaded):
    """The model is not in memory yet; worth another try soon."""

    code = "loading"
    http_status = 503
