"""From a measurement of `bench offline` or `bench latency` to the speeds a plan uses.

Decode steps at several batch sizes are fitted by   seconds = fixed + bytes / bandwidth + FLOPs / rate   with no term
negative, in relative error, so that a step of 5 ms counts as much as one of 50. Prefill takes the median rate.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tokenmill.arch.read import read_json
from tokenmill.errors import InvalidConfig
from tokenmill.planner.roofline import Speeds

NEEDED = ("concurrency", "decode_step_ms", "decode_step_bytes", "decode_flops_s", "prefill_flops_s")


def read_calibration(path: Path) -> Speeds:
    report = read_json(path)
    rows = [row for row in report.get("results", []) if isinstance(row, dict) and row.get("decode_tok_s")]
    if not rows or any(key not in rows[0] for key in NEEDED):
        raise InvalidConfig(
            f"{path} holds no results of `bench offline` or `bench latency`",
            param="calibrate",
            hint="tokenmill bench offline MODEL --concurrency 1,2,4,8,16,32 --rounds 3 | tail -1 > result.json",
        )
    return fit_speeds(rows)


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
    """Least squares of terms · x = 1 with x >= 0: the best of all subsets of terms whose free solution is positive."""
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
