"""Recorded traffic: when real requests came, how long they were, which of them began alike.

    Azure LLM inference (csv)     TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake (json lines)         {"timestamp": ms, "input_length", "output_length", "hash_ids": [one per 512 tokens]}

Requests with a common run of hash ids have a common prefix of as many blocks.
"""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenmill.errors import InvalidConfig

MAX_ROWS = 1_000_000
HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRow:
    at_s: float  # since the first request
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TraceScale:
    """How a trace is bent to fit a smaller machine."""

    time: float = 1.0  # 2: twice as slow
    length: float = 1.0
    first_s: float = float("inf")  # only so much of the recorded time
    max_input: int | None = None
    max_output: int | None = None
    share: float = 1.0  # of the requests, drawn at random
    seed: int = 0


def read_trace(path: Path, scale: TraceScale | None = None) -> list[TraceRow]:
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
    start, drawing = rows[0].at_s, random.Random(f"trace-share/{scale.seed}")
    kept = [row for row in rows if row.at_s - start <= scale.first_s and drawing.random() < scale.share]
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
            rows.append(TraceRow(row["timestamp"] / 1e3, *lengths, tuple(row["hash_ids"])))
            if len(rows) > MAX_ROWS:
                raise ValueError("too many rows")
    return rows


def _scaled(row: TraceRow, start: float, scale: TraceScale) -> TraceRow:
    input_len = max(1, round(row.input_len * scale.length))
    output_len = max(1, round(row.output_len * scale.length))
    return TraceRow(
        (row.at_s - start) * scale.time,
        min(input_len, scale.max_input or input_len),
        min(output_len, scale.max_output or output_len),
        row.hash_ids,
    )
