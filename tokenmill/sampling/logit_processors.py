"""Logits steps that change single tokens: penalties, DRY, bias, allowed and banned tokens, n-grams, grammars, markers.

Each is a pure function (logits float32 [U, V], rows) -> logits, called with the rows that use it only. Conventions:
repetition penalty divides positive and multiplies negative logits of every token seen in prompt or output
(CTRL, as transformers and vLLM); frequency and presence penalties count output tokens only (as OpenAI and vLLM).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.params import SamplingParams
from tokenmill.sampling.rows import RowsInUse, RowState
from tokenmill.sampling.watermark import green_tokens

_LARGEST, _LOG_OF_LARGEST = 3.4e38, 88.7228391  # of float32


def penalise_repeats(logits: Tensor, rows: RowsInUse) -> Tensor:
    counts = [state.past.counts for state in rows.states if state.past.counts is not None]
    lines, tokens = rows.pairs([c.ids for c in counts])
    times = torch.from_numpy(np.concatenate([c.output_counts for c in counts])).to(rows.device)
    repetition = rows.param("repetition_penalty")[lines, 0]
    frequency = rows.param("frequency_penalty")[lines, 0]
    presence = rows.param("presence_penalty")[lines, 0]
    value = logits[lines, tokens]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - frequency * times.float() - presence * (times > 0).float()
    return logits.index_put((lines, tokens), value)


def penalise_repeated_passages(logits: Tensor, rows: RowsInUse) -> Tensor:
    """DRY, as llama.cpp: a token that extends a repeat loses multiplier * base ** (its length - allowed length)."""
    vocab = logits.shape[-1]
    repeats = [_repeats(state, vocab) for state in rows.states]
    lines, tokens = rows.pairs([list(found) for found in repeats])
    losses = [
        _loss(state.params, length)
        for state, found in zip(rows.states, repeats, strict=True)
        for length in found.values()
    ]
    loss = torch.tensor(losses, dtype=torch.float32, device=rows.device)
    return logits.index_put((lines, tokens), logits[lines, tokens] - loss)


def _repeats(state: RowState, vocab: int) -> dict[int, int]:
    runs, params = state.past.repeats, state.params
    found = runs.repeating(params.dry_allowed_length, params.dry_penalty_last_n) if runs else {}
    return {token: length for token, length in found.items() if 0 <= token < vocab}


def _loss(params: SamplingParams, length: int) -> float:
    base, exponent = params.dry_base, length - params.dry_allowed_length
    if base > 1.000001:
        exponent = min(exponent, int(_LOG_OF_LARGEST / math.log(base)))  # beyond it the power is no float32 any more
    return min(params.dry_multiplier * float(base**exponent), _LARGEST)


def add_bias(logits: Tensor, rows: RowsInUse) -> Tensor:
    biases = [state.params.logit_bias or {} for state in rows.states]
    lines, tokens = rows.pairs([list(bias) for bias in biases])
    values = torch.tensor([v for bias in biases for v in bias.values()], dtype=torch.float32, device=rows.device)
    return logits.index_put((lines, tokens), logits[lines, tokens] + values)


def keep_allowed(logits: Tensor, rows: RowsInUse) -> Tensor:
    index = rows.pairs([state.params.allowed_token_ids or [] for state in rows.states])
    return torch.full_like(logits, -torch.inf).index_put(index, logits[index])


def remove_banned(logits: Tensor, rows: RowsInUse) -> Tensor:
    return _without(logits, rows, [state.params.banned_token_ids or [] for state in rows.states])


def hold_back_stops(logits: Tensor, rows: RowsInUse) -> Tensor:
    """No stop token before `min_tokens` output tokens exist; where a grammar allows nothing else, it has its way."""
    held = [_held_back(s, index) for s, index in zip(rows.states, rows.output_indices, strict=True)]
    if not any(held):
        return logits
    without = _without(logits, rows, held)
    if rows.masks is None:
        return without
    grammar_is_over = torch.tensor([s.params.guided is not None for s in rows.states], device=rows.device)
    grammar_is_over &= without.amax(dim=-1) == -torch.inf
    return torch.where(grammar_is_over.unsqueeze(1), logits, without)


def _held_back(state: RowState, output_index: int) -> list[int]:
    """Stop tokens that may not be drawn: all before `min_tokens`; later, where a grammar's end is ignored, those that
    the request did not name."""
    params = state.params
    if output_index < params.min_tokens:
        return state.stop_token_ids
    ignores_end = params.ignore_eos and params.guided is not None
    return [i for i in state.stop_token_ids if i not in params.stop_token_ids] if ignores_end else []


def remove_repeating(logits: Tensor, rows: RowsInUse) -> Tensor:
    """No token that would complete an n-gram already in prompt or output (as transformers)."""
    vocab = logits.shape[-1]
    repeating = [state.past.ngrams.repeating() if state.past.ngrams else [] for state in rows.states]
    return _without(logits, rows, [[token for token in ids if 0 <= token < vocab] for ids in repeating])


def keep_grammatical(logits: Tensor, rows: RowsInUse) -> Tensor:
    """What each row's grammar allows next: minus infinity is added to everything else."""
    assert rows.masks is not None, "a row with a grammar was run without masks"
    packed = rows.masks.bits(rows.rows, rows.num_drafts)
    if rows.device.type != "cpu":  # bits travel, and are spread out there
        spread = torch.from_numpy(_allowances()).to(rows.device)[torch.from_numpy(packed).to(rows.device).int()]
        return logits + spread.flatten(1)[:, : logits.shape[-1]]
    # numpy takes runs of eight floats from a table ten times faster than torch, and wakes no threads
    allowance = np.take(_allowances(), packed, axis=0).reshape(len(packed), -1)[:, : logits.shape[-1]]
    allowance += logits.numpy()
    return torch.from_numpy(allowance)


@cache
def _allowances() -> NDArray[np.float32]:
    """[256, 8]: for every byte its bits, lowest first, as what to add to a logit: 0 where set, else minus infinity"""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, 0.0, -np.inf).astype(np.float32)


def favour_green(logits: Tensor, rows: RowsInUse) -> Tensor:
    """The watermark: `delta` more for each token that the key and the last tokens make green."""
    added = np.zeros(logits.shape, dtype=np.float32)
    for line, state in enumerate(rows.states):
        mark, tokens = state.params.watermark, state.past.tokens
        assert mark is not None and tokens is not None
        added[line] = green_tokens(mark, tokens[-mark.context :], logits.shape[-1]) * np.float32(mark.delta)
    return logits + torch.from_numpy(added).to(rows.device)


def end_thinking(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Where the thinking budget is spent, only the closing marker's next token is left."""
    forced = [state.past.thinking.forced() if state.past.thinking else None for state in rows.states]
    lines = [line for line, token in enumerate(forced) if token is not None]
    if not lines:
        return logits
    index = torch.tensor(lines, device=rows.device)
    places = torch.tensor([token for token in forced if token is not None], device=rows.device)
    only = torch.full((len(lines), logits.shape[-1]), -torch.inf, device=rows.device)
    return logits.index_copy(0, index, only.scatter(1, places.unsqueeze(1), 0.0))


def _without(logits: Tensor, rows: RowsInUse, ids: list[list[int]]) -> Tensor:
    return logits.index_put(rows.pairs(ids), torch.tensor(-torch.inf, device=logits.device))
