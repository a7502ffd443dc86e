"""What is remembered of one HTTP request while it runs: for its log line and its metrics. Never any text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tokenmill.errors import TokenmillError
from tokenmill.observe.log import Value
from tokenmill.observe.metrics import Outcome
from tokenmill.types import Event, Usage

CLIENT_LEFT = 499  # as nginx counts it; nobody is there to receive it


@dataclass
class RequestRecord:
    request_id: str
    method: str
    path: str
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    is_generation: bool = False  # counts in the request metrics
    model: str | None = None  # set once the engine has taken the request
    usage: Usage | None = None
    queue_s: float | None = None
    first_token_s: float | None = None  # since `started_s`
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str | None = None
    is_finished: bool = False

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def note_event(self, event: Event) -> None:
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s()
            self.queue_s = event.queue_s
        if event.finish_reason is not None:
            self.finish_reasons.append(event.finish_reason)

    def note_departure(self) -> None:
        self.status = CLIENT_LEFT

    def note_failure(self, error: TokenmillError) -> None:
        self.status = error.http_status
        self.error_code = error.code

    @property
    def outcome(self) -> Outcome:
        if self.status == CLIENT_LEFT:
            return "abort"
        if self.status >= 400:
            return "error"
        return "length" if "length" in self.finish_reasons else "stop"

    def log_fields(self) -> dict[str, Value]:
        """The request's log line: ids, counts and times; a field that does not apply is left out."""
        usage = self.usage
        fields: dict[str, Value] = {
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "model": self.model,
            "error": self.error_code,
            "finish": ",".join(dict.fromkeys(self.finish_reasons)) or None,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "completion_tokens": usage.completion_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "drafted_tokens": usage.drafted_tokens or None if usage else None,
            "accepted_tokens": usage.accepted_tokens or None if usage else None,
            "queue_ms": _milliseconds(self.queue_s),
            "ttft_ms": _milliseconds(self.first_token_s),
            "total_ms": _milliseconds(self.elapsed_s()),
        }
        return {name: value for name, value in fields.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
