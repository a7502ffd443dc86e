"""The two tables of steps, in the order they run. A new sampler step is one pure function and one row here.

    on logits    penalties -> DRY -> bias -> allowed -> banned -> no-repeat n-gram -> processors -> grammar
                 -> min_tokens -> top-n-sigma -> temperature -> watermark -> top-k -> typical -> thinking budget
    on probs     top-p -> min-p -> top-a -> epsilon -> eta -> XTC -> mirostat -> sample

Temperature comes before truncation, as in vLLM and the OpenAI API (top_p=0.9 means nine tenths of the distribution that
is sampled from); the order of the truncation steps is llama.cpp's. The watermark acts on the scaled logits, so its
strength does not depend on the temperature. The thinking budget comes last and overrides the others. Greedy rows take
the highest logit after the steps with `for_greedy`. The fixed-point softmax is computed once, and the steps after it
only set parts of it to 0. docs/SAMPLING.md documents the same tables for users; a test compares the two.

A step is called only with the rows that use it; one that no row uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.params import SamplingParams
from tokenmill.sampling import logit_processors, truncation
from tokenmill.sampling.rows import RowsInUse


@dataclass(frozen=True)
class SamplerStep:
    """One row of the tables: a name, whether a request uses the step, and its function."""

    name: str
    is_used: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, RowsInUse], Tensor]
    for_greedy: bool = True


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _holds_back_stops(p: SamplingParams) -> bool:
    return p.min_tokens > 0 or (p.ignore_eos and p.guided is not None)


def _scales_temperature(p: SamplingParams) -> bool:
    return p.temperature != 1.0 and p.dynatemp_range == 0.0


LOGITS_STEPS: tuple[SamplerStep, ...] = (
    SamplerStep("penalties", _has_penalty, logit_processors.penalise_repeats),
    SamplerStep(
        "dry",
        lambda p: p.dry_multiplier > 0.0 and p.dry_penalty_last_n != 0,
        logit_processors.penalise_repeated_passages,
    ),
    SamplerStep("bias", lambda p: bool(p.logit_bias), logit_processors.add_bias),
    SamplerStep("allowed", lambda p: p.allowed_token_ids is not None, logit_processors.keep_allowed),
    SamplerStep("banned", lambda p: bool(p.banned_token_ids), logit_processors.remove_banned),
    SamplerStep("no_repeat_ngram", lambda p: p.no_repeat_ngram_size > 0, logit_processors.remove_repeating),
    SamplerStep("processors", lambda p: bool(p.logits_processors), logit_processors.run_processors),
    SamplerStep("grammar", lambda p: p.guided is not None, logit_processors.keep_grammatical),
    SamplerStep("min_tokens", _holds_back_stops, logit_processors.hold_back_stops),
    SamplerStep("top_n_sigma", lambda p: p.top_n_sigma > 0.0, truncation.keep_top_n_sigma, for_greedy=False),
    SamplerStep("temperature", _scales_temperature, truncation.scale_temperature, for_greedy=False),
    SamplerStep("dynatemp", lambda p: p.dynatemp_range > 0.0, truncation.move_temperature, for_greedy=False),
    SamplerStep("watermark", lambda p: p.watermark is not None, logit_processors.favour_green),
    SamplerStep("top_k", lambda p: p.top_k > 0, truncation.keep_top_k, for_greedy=False),
    SamplerStep("typical", lambda p: p.typical_p < 1.0, truncation.keep_typical, for_greedy=False),
    SamplerStep("thinking", lambda p: p.thinking_budget is not None, logit_processors.end_thinking),
)

PROBS_STEPS: tuple[SamplerStep, ...] = (
    SamplerStep("top_p", lambda p: p.top_p < 1.0, truncation.keep_top_p, for_greedy=False),
    SamplerStep("min_p", lambda p: p.min_p > 0.0, truncation.keep_min_p, for_greedy=False),
    SamplerStep("top_a", lambda p: p.top_a > 0.0, truncation.keep_top_a, for_greedy=False),
    SamplerStep("epsilon", lambda p: p.epsilon_cutoff > 0.0, truncation.keep_epsilon, for_greedy=False),
    SamplerStep("eta", lambda p: p.eta_cutoff > 0.0, truncation.keep_eta, for_greedy=False),
    SamplerStep("xtc", lambda p: p.xtc_probability > 0.0, truncation.exclude_top_choices, for_greedy=False),
    SamplerStep("mirostat", lambda p: p.mirostat == 2, truncation.keep_unsurprising, for_greedy=False),
)


def steps_used(params: SamplingParams) -> frozenset[str]:
    """Return the names of the steps that a request's parameters use."""
    every = (*LOGITS_STEPS, *PROBS_STEPS)
    return frozenset(s.name for s in every if s.is_used(params) and (s.for_greedy or not params.is_greedy))


def run_steps(values: Tensor, rows: RowsInUse, steps: tuple[SamplerStep, ...]) -> Tensor:
    """Return values [S, V] after the steps that each row uses; the argument stays unchanged."""
    for step in steps:
        logits_rows = rows.using(step.name)
        if logits_rows:
            values = _run_step(step, values, rows, logits_rows)
    return values


def _run_step(step: SamplerStep, values: Tensor, rows: RowsInUse, logits_rows: list[int]) -> Tensor:
    if len(logits_rows) == len(rows.states):
        return step.apply(values, rows)
    index = torch.tensor(logits_rows, device=values.device)
    changed = step.apply(values.index_select(0, index), rows.select(logits_rows))
    return values.index_copy(0, index, changed)
