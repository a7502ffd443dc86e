"""The traffic of a benchmark: lengths of prompts and answers, arrival times, and recorded traces.

Traces say when real requests arrived, how long they were, and which of them share a prefix:

    Azure LLM inference (csv)     TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake (json lines)         {"timestamp": ms, "input_length", "output_length", "hash_ids": [one per 512 tokens]}
    a server's request log        the same without hash ids, with the "messages" or "prompts" themselves

Requests whose hash ids begin alike share a prefix of as many blocks.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tokenmill.bench.dialects import Message
from tokenmill.errors import InvalidConfig


@dataclass(frozen=True)
class Lengths:
    """Token lengths: one number, or uniformly distributed between two. Written `128` or `256:768`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> Lengths:
        low, _, high = text.partition(":")
        try:
            found = cls(int(low), int(high or low))
        except ValueError:
            raise InvalidConfig(f"--{param} must be a number or LOW:HIGH, not {text!r}", param=param) from None
        if not 1 <= found.low <= found.high:
            raise InvalidConfig(f"--{param} {text} is not a range of positive lengths", param=param)
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def draw_many(self, rng: random.Random, count: int) -> list[int]:
        return [self.draw(rng) for _ in range(count)]


Process = Literal["constant", "poisson", "gamma", "ramp"]


@dataclass(frozen=True)
class ArrivalProcess:
    """An open-loop arrival process: when requests are sent, independent of how fast the server answers.

    constant   a gap of 1/rate             poisson   exponential gaps with mean 1/rate
    gamma      the same mean in bursts: a shape below 1 gives clusters and pauses (1 is poisson, infinity is constant)
    ramp       poisson with a rate that grows from `rate` to `rate_end` over the duration
    """

    rate: float  # requests a second
    process: Process = "poisson"
    burstiness: float = 0.5  # shape of the gamma distribution
    rate_end: float | None = None  # of a ramp
    duration_s: float | None = None  # of a ramp

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.burstiness > 0:
            raise InvalidConfig("rate and burstiness must be positive", param="rate")
        if self.process == "ramp" and (not self.rate_end or not self.duration_s):
            raise InvalidConfig("a ramp needs --rate-end and --duration-s", param="rate_end")

    def times(self, seed: int) -> Iterator[float]:
        """Yield arrival times in seconds since the start, without end."""
        rng = random.Random(f"arrivals/{seed}")
        now = 0.0
        for number in itertools.count():
            if number or self.process != "constant":
                now += self._gap(rng, now)
            yield now

    def _gap(self, rng: random.Random, now: float) -> float:
        match self.process:
            case "constant":
                return 1 / self.rate
            case "poisson":
                return rng.expovariate(self.rate)
            case "gamma":
                return rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            case "ramp":
                return rng.expovariate(self._rate_at(now))

    def _rate_at(self, now: float) -> float:
        assert self.rate_end is not None and self.duration_s is not None
        return self.rate + (self.rate_end - self.rate) * min(1.0, now / self.duration_s)


MAX_ROWS = 1_000_000
HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRow:
    """One recorded request."""

    at_s: float  # since the first request
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()  # what was asked, where it was recorded


@dataclass(frozen=True)
class TraceScale:
    """The factors by which a trace is scaled to fit a smaller machine."""

    time: float = 1.0  # 2: twice as slow
    length: float = 1.0
    first_s: float = float("inf")  # use only this much of the recorded time
    max_input: int | None = None
    max_output: int | None = None
    share: float = 1.0  # share of the requests, selected at random
    seed: int = 0


def read_trace(path: Path, scale: TraceScale | None = None) -> list[TraceRow]:
    """Read a trace file, sorted by time and scaled."""
    scale = scale or TraceScale()
    if not 0 < scale.share <= 1:
        raise InvalidConfig(f"a share of {scale.share} of the requests can't be kept", param="trace_share")
    try:
        rows = _read_mooncake(path) if path.suffix == ".jsonl" else _read_azure(path)
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidConfig(f"{path} can't be read: {problem}", param="trace") from None
    except (KeyError, ValueError, TypeError) as problem:
        raise InvalidConfig(
            f"{path} is neither an Azure csv nor a Mooncake jsonl trace: {problem}", param="trace"
        ) from None
    if not rows:
        raise InvalidConfig(f"{path} holds no requests", param="trace")
    rows.sort(key=lambda row: row.at_s)
    start, rng = rows[0].at_s, random.Random(f"trace-share/{scale.seed}")
    kept = [row for row in rows if row.at_s - start <= scale.first_s and rng.random() < scale.share]
    return [_scaled(row, start, scale) for row in kept]


def _read_azure(path: Path) -> list[TraceRow]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = []
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            rows.append(TraceRow(at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            if len(rows) > MAX_ROWS:
                raise ValueError("too many rows")
    return rows


def _read_mooncake(path: Path) -> list[TraceRow]:
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in filter(str.strip, file):
            row = json.loads(line)
            lengths = int(row["input_length"]), int(row["output_length"])
            messages = _messages(row)
            hash_ids = tuple(row.get("hash_ids", ())) if messages else tuple(row["hash_ids"])
            rows.append(TraceRow(row["timestamp"] / 1e3, *lengths, hash_ids, messages))
            if len(rows) > MAX_ROWS:
                raise ValueError("too many rows")
    return rows


def _messages(row: dict[str, Any]) -> tuple[Message, ...]:
    """Return the messages of a line of a request log; none for a line of another trace, or where the prompt was token
    ids."""
    if "messages" in row:
        told = [(str(one["role"]), str(one["content"])) for one in row["messages"] if one.get("content")]
        return tuple({"role": role, "content": text} for role, text in told)
    prompts = [text for text in row.get("prompts", ()) if isinstance(text, str)]
    return tuple({"role": "user", "content": text} for text in prompts[:1])


def _scaled(row: TraceRow, start: float, scale: TraceScale) -> TraceRow:
    input_len = max(1, round(row.input_len * scale.length))
    output_len = max(1, round(row.output_len * scale.length))
    return TraceRow(
        (row.at_s - start) * scale.time,
        min(input_len, scale.max_input or input_len),
        min(output_len, scale.max_output or output_len),
        row.hash_ids,
        row.messages,
    )
