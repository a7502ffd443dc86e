"""All errors that users can see: one tree, each with its code, HTTP status and a hint.

    TokenmillError
    ├── InvalidRequest            the request is invalid (400); `param` names the field
    │   └── ContextLengthExceeded the prompt (plus the requested tokens) exceeds the context
    ├── UnknownModel              no model of that name (404)
    ├── Overloaded                the queue is full (429); try again after `retry_after_s`
    │   └── Draining              the server is shutting down (503)
    ├── RequestFailed             this request could not be computed; others are not affected (500)
    │   └── RequestAborted        the request was aborted deliberately (499, which clients do not retry)
    ├── EngineDead                the engine process has died (503)
    │   └── PeerDied              one of the ranks that compute a model together has died
    ├── InvalidConfig             a setting is invalid, or settings contradict each other
    └── ModelError                the model's files can't be used
        ├── PullFailed            no source could provide the model, or the disk is full
        ├── UnsupportedModel      the architecture or a variant is not implemented; names it
        └── DamagedFile           a file is truncated or inconsistent; names file and tensor

`message` says what happened, `hint` what to do about it. Errors are not formatted here: the server and the command line
each render them in their own way.
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
        """`num_tokens`: the length of the prompt, if known; `limit`: its maximum."""
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
    http_status = 499  # nginx's "client closed request"; clients would retry a 5xx


class EngineDead(TokenmillError):
    code = "engine_dead"
    http_status = 503


class PeerDied(EngineDead):
    """A rank has died or does not respond, so its group can't continue."""


class InvalidConfig(TokenmillError):
    code = "invalid_config"
    exit_code = 2


class ModelError(TokenmillError):
    code = "model_error"


class PullFailed(ModelError):
    code = "pull_failed"
    http_status = 502  # the failure of an upstream source


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class DamagedFile(ModelError):
    code = "damaged_file"


def error_with_code(code: str | None, message: str, param: str | None = None) -> TokenmillError:
    """Recreate an error that another process reported by its code; RequestFailed for an unknown code."""
    of_requests = (InvalidRequest, UnknownModel, Overloaded, RequestFailed)
    kinds: dict[str, type[TokenmillError]] = {
        kind.code: kind for kind in (*of_requests, ModelError, UnsupportedModel, DamagedFile)
    }
    error = kinds.get(code or "", RequestFailed)(message)
    error.param = param
    return error
