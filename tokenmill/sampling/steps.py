"""The table of logits steps, in the order they run. A new sampler is one pure function and one line here.

    penalties -> bias -> allowed -> banned -> min_tokens -> temperature -> top-k -> typical -> top-p -> min-p -> draw

Temperature comes before the cuts, as in vLLM and the OpenAI API (top_p=0.9 means nine tenths of the distribution one
samples from); among the cuts the order is llama.cpp's. Steps below the line do nothing for greedy rows, which take the
highest logit of what the steps above leave.

A step sees only the rows that use it; one that no row uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.params import SamplingParams
from tokenmill.sampling import edits, truncate
from tokenmill.sampling.rows import RowsInUse


@dataclass(frozen=True)
class LogitsStep:
    name: str
    is_used: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, RowsInUse], Tensor]
    for_greedy: bool = True


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


STEPS: tuple[LogitsStep, ...] = (
    LogitsStep("penalties", _has_penalty, edits.penalise_repeats),
    LogitsStep("bias", lambda p: bool(p.logit_bias), edits.add_bias),
    LogitsStep("allowed", lambda p: p.allowed_token_ids is not None, edits.keep_allowed),
    LogitsStep("banned", lambda p: bool(p.banned_token_ids), edits.remove_banned),
    LogitsStep("min_tokens", lambda p: p.min_tokens > 0, edits.hold_back_stops),
    # ── sampled rows only ──
    LogitsStep("temperature", lambda p: p.temperature != 1.0, truncate.scale_temperature, for_greedy=False),
    LogitsStep("top_k", lambda p: p.top_k > 0, truncate.keep_top_k, for_greedy=False),
    LogitsStep("typical", lambda p: p.typical_p < 1.0, truncate.keep_typical, for_greedy=False),
    LogitsStep("top_p", lambda p: p.top_p < 1.0, truncate.keep_top_p, for_greedy=False),
    LogitsStep("min_p", lambda p: p.min_p > 0.0, truncate.keep_min_p, for_greedy=False),
)


def steps_used(params: SamplingParams) -> frozenset[str]:
    return frozenset(s.name for s in STEPS if s.is_used(params) and (s.for_greedy or not params.is_greedy))


def run_steps(logits: Tensor, rows: RowsInUse) -> Tensor:
    """[S, V] logits after every step its row uses; the argument is left as it was."""
    for step in STEPS:
        lines = rows.lines_using(step.name)
        if lines:
            logits = _run_step(step, logits, rows, lines)
    return logits


def _run_step(step: LogitsStep, logits: Tensor, rows: RowsInUse, lines: list[int]) -> Tensor:
    if len(lines) == len(rows.states):
        return step.apply(logits, rows)
    index = torch.tensor(lines, device=logits.device)
    changed = step.apply(logits.index_select(0, index), rows.select(lines))
    return logits.index_copy(0, index, changed)
