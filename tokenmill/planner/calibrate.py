"""Calibration: speeds of a plan from a measurement of the engine (`bench offline`, `latency`) or of a server under load
(`bench serve --output`).

Decode steps at several batch sizes are fitted by   seconds = fixed + bytes / bandwidth + FLOPs / rate   with no term
negative, in relative error, so that a step of 5 ms counts as much as one of 50. Prefill takes the median rate.

For served requests, TPOT is the time of a step at the mean number of requests running meanwhile. The prefill speed is
the prompt over the TTFT, where the best tenth counts: the others also waited in a queue.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tokenmill.arch.cost import decode_step_bytes, decode_step_flops, prefill_flops
from tokenmill.arch.read import read_json
from tokenmill.errors import InvalidConfig
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.roofline import Speeds

NEEDED = ("concurrency", "decode_tok_s", "decode_step_ms", "decode_step_bytes", "decode_flops_s", "prefill_flops_s")

HINT = "tokenmill bench offline MODEL --concurrency 1,2,4,8,16,32 --rounds 3 | tail -1 > result.json"


@dataclass(frozen=True)
class Served:
    """One answered request; times are seconds since the run began."""

    input_len: int
    output_len: int
    sent_s: float
    first_s: float
    last_s: float

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.output_len - 1)


def read_calibration(path: Path) -> Speeds:
    """Read the speeds from a result file of the engine alone."""
    results = read_json(path).get("results")
    rows = [row for row in results if _is_measured(row)] if isinstance(results, list) else []
    if not rows:
        raise InvalidConfig(
            f"{path} holds no results of `bench offline`, `bench latency` or `bench serve`",
            param="calibrate",
            hint=HINT,
        )
    return fit_speeds(rows)


def _is_measured(row: Any) -> bool:
    values = [row.get(key) for key in NEEDED] if isinstance(row, dict) else [None]
    return all(isinstance(value, int | float) and 0 < value <= sys.float_info.max for value in values)


def served_speeds(served: Sequence[Served], model: PlannedModel, kv_dtype: str) -> Speeds:
    """Fit the speeds to requests that a server of `model` answered."""
    usable = [r for r in served if r.output_len > 1 and r.last_s > r.first_s > r.sent_s]
    if not usable:
        raise InvalidConfig("no request of that run was answered with several tokens", param="calibrate", hint=HINT)
    running = _running(usable)
    rows = [_served_row(request, batch, model, kv_dtype) for request, batch in zip(usable, running, strict=True)]
    best = float(np.quantile([row["prefill_flops_s"] for row in rows], 0.9))
    return fit_speeds([{**row, "prefill_flops_s": best} for row in rows])


def _running(served: Sequence[Served]) -> list[float]:
    """Return, for each request, the mean number of requests that ran at the same time."""
    begins = np.array([request.first_s for request in served])
    ends = np.array([request.last_s for request in served])
    shared = [np.clip(np.minimum(ends, r.last_s) - np.maximum(begins, r.first_s), 0, None).sum() for r in served]
    return [float(s / (r.last_s - r.first_s)) for s, r in zip(shared, served, strict=True)]


def _served_row(request: Served, batch: float, model: PlannedModel, kv_dtype: str) -> dict[str, float]:
    """Return a request in the form of a step of `bench offline`."""
    context, whole = request.input_len + request.output_len // 2, max(1, round(batch))
    moved = decode_step_bytes(model.spec, model.weights("auto"), kv_dtype, whole, context)
    return {
        "decode_step_ms": request.tpot_s * 1e3,
        "decode_step_bytes": moved,
        "decode_flops_s": decode_step_flops(model.spec, whole, context) / request.tpot_s,
        "prefill_flops_s": prefill_flops(model.spec, request.input_len) / (request.first_s - request.sent_s),
    }


def fit_speeds(rows: list[dict[str, Any]]) -> Speeds:
    seconds = np.array([row["decode_step_ms"] / 1e3 for row in rows])
    moved = np.array([float(row["decode_step_bytes"]) for row in rows])
    flops = np.array([row["decode_flops_s"] for row in rows]) * seconds
    terms = np.stack([np.ones_like(seconds), moved, flops], axis=1)
    fixed, per_byte, per_flop = _nonnegative(terms / seconds[:, None])
    prefill = median(row["prefill_flops_s"] for row in rows)
    return Speeds(
        prefill_flops_s=float(prefill),
        decode_flops_s=1 / per_flop if per_flop > 0 else float("inf"),
        bandwidth_bytes_s=1 / per_byte if per_byte > 0 else float("inf"),
        step_s=fixed,
        overlap=False,
    )


def _nonnegative(terms: Any) -> tuple[float, float, float]:
    """Solve least squares of terms · x = 1 with x >= 0: the best subset of terms with a positive free solution."""
    best, best_error = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            columns = terms[:, chosen]
            found = np.linalg.lstsq(columns, np.ones(len(terms)), rcond=None)[0]
            error = float(np.sum((columns @ found - 1) ** 2))
            if (found > 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[list(chosen)] = found
    return float(best[0]), float(best[1]), float(best[2])
