"""Every error a user can meet: one tree, each with its code, HTTP status and a hint.

    TokenmillError
    ├── InvalidRequest            the request is wrong (400); `param` names the field
    │   └── ContextLengthExceeded prompt (plus what was asked for) does not fit
    ├── UnknownModel              no model of that name (404)
    ├── Overloaded                the queue is full (429); try again after `retry_after_s`
    │   └── Draining              the server is about to end (503)
    ├── RequestFailed             this request could not be computed; the others go on (500)
    │   └── RequestAborted        someone ended it on purpose (499, which clients do not repeat)
    ├── EngineDead                the engine process is gone (503)
    │   └── PeerDied              one of the ranks that compute a model together is gone
    ├── InvalidConfig             a setting is wrong or settings contradict each other
    └── ModelError                the model's files can't be used
        ├── PullFailed            no source could deliver it, or the disk is full
        ├── UnsupportedModel      an architecture or variant that is not implemented, by name
        └── DamagedFile           a file is truncated or inconsistent; names file and tensor

An error says what happened in `message` and what to do in `hint`. Nothing here formats for a wire:
the server and the command line each show an error in their own way.
"""

from __future__ import annotations


class TokenmillError(Exception):
    code: str = "internal_error"
    http_status: int = 500
    exit_code: int = 1

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(TokenmillError):
    code = "invalid_value"
    http_status = 400
    exit_code = 2


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        num_tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        """`num_tokens`: the length of the prompt, where it is known; `limit`: the most that it may have."""
        super().__init__(message, param=param, hint=hint)
        self.num_tokens = num_tokens
        self.limit = limit


class UnknownModel(TokenmillError):
    code = "model_not_found"
    http_status = 404


class Overloaded(TokenmillError):
    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    code = "draining"
    http_status = 503


class RequestFailed(TokenmillError):
    code = "request_failed"
    http_status = 500


class RequestAborted(RequestFailed):
    code = "aborted"
    http_status = 499  # as nginx counts requests that ended early; not a 5xx, after which clients try again


class EngineDead(TokenmillError):
    code = "engine_dead"
    http_status = 503


class PeerDied(EngineDead):
    """A rank is gone or does not answer: its group can't go on."""


class InvalidConfig(TokenmillError):
    code = "invalid_config"
    exit_code = 2


class ModelError(TokenmillError):
    code = "model_error"


class PullFailed(ModelError):
    code = "pull_failed"
    http_status = 502  # a source's fault, not the server's


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class DamagedFile(ModelError):
    code = "damaged_file"


def error_with_code(code: str | None, message: str, param: str | None = None) -> TokenmillError:
    """The error that another process named by its code; RequestFailed for one that has no better name."""
    of_requests = (InvalidRequest, UnknownModel, Overloaded, RequestFailed)
    kinds: dict[str, type[TokenmillError]] = {
        kind.code: kind for kind in (*of_requests, ModelError, UnsupportedModel, DamagedFile)
    }
    error = kinds.get(code or "", RequestFailed)(message)
    error.param = param
    return error
