"""The record of one request: when it was scheduled and sent, and when each piece of its answer came.

    scheduled ── sent ─────── first ── · ── · ── · ── last
        └ delay ┘ └─── TTFT ───┘ └ ITL ┘           │
                  └──────────── e2e ───────────────┘        TPOT = (last - first) / (tokens - 1)

Times are seconds since the run began, on one monotonic clock. Tokens are the server's own count (`usage`) where it
sends one; pieces of text otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenmill.bench.measures import Floats


@dataclass(slots=True)
class BenchRecord:
    number: int = 0
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)  # of each piece of text
    end_s: float = 0.0
    status: int = 0
    error: str | None = None  # its class: "timeout", "connect", "http_429", "cut", "stream_error" ...
    detail: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    asked_input: int = 0
    asked_output: int = 0
    finish_reason: str | None = None
    texts: list[str] | None = None  # kept only where the next turn needs them

    @property
    def is_ok(self) -> bool:
        return self.error is None and bool(self.times_s)

    @property
    def num_tokens(self) -> int:
        return self.output_tokens if self.output_tokens is not None else len(self.times_s)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per output token after the first; None for a single token."""
        return (self.times_s[-1] - self.times_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_s(self) -> Floats:
        return np.diff(np.asarray(self.times_s, dtype=np.float64))

    def as_dict(self) -> dict[str, Any]:
        """Return the record for the result file; piece times are in milliseconds after the first, to keep the file
        small."""
        first = self.times_s[0] if self.times_s else 0.0
        return {
            "scheduled_s": round(self.scheduled_s, 6),
            "sent_s": round(self.sent_s, 6),
            "first_s": round(first, 6),
            "end_s": round(self.end_s, 6),
            "pieces_ms": [round((t - first) * 1e3, 2) for t in self.times_s],
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "asked_input": self.asked_input,
            "asked_output": self.asked_output,
            "status": self.status,
            "error": self.error,
            "detail": self.detail[:200],
        }

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> BenchRecord:
        first = kept["first_s"]
        times = [first + ms / 1e3 for ms in kept["pieces_ms"]]
        names = ("scheduled_s", "sent_s", "end_s", "input_tokens", "output_tokens", "cached_tokens", "asked_input",
                 "asked_output", "status", "error", "detail")  # fmt: skip
        return cls(times_s=times, **{name: kept[name] for name in names})
