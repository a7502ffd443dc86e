"""Logits steps that change single tokens: penalties, bias, allowed and banned tokens, min_tokens, n-grams, grammars.

Each is a pure function (logits float32 [U, V], rows) -> logits, called with the rows that use it only. Conventions:
repetition penalty divides positive and multiplies negative logits of every token seen in prompt or output
(CTRL, as transformers and vLLM); frequency and presence penalties count output tokens only (as OpenAI and vLLM).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.sampling.rows import RowsInUse


def penalise_repeats(logits: Tensor, rows: RowsInUse) -> Tensor:
    counts = [state.counts for state in rows.states if state.counts is not None]
    lines, tokens = rows.pairs([c.ids for c in counts])
    times = torch.from_numpy(np.concatenate([c.output_counts for c in counts])).to(rows.device)
    repetition = rows.knob("repetition_penalty")[lines, 0]
    frequency = rows.knob("frequency_penalty")[lines, 0]
    presence = rows.knob("presence_penalty")[lines, 0]
    value = logits[lines, tokens]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - frequency * times.float() - presence * (times > 0).float()
    return logits.index_put((lines, tokens), value)


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
    """No stop token before `min_tokens` output tokens exist."""
    early = [i < s.params.min_tokens for s, i in zip(rows.states, rows.output_indices, strict=True)]
    if not any(early):
        return logits
    held = [s.stop_token_ids if is_early else [] for s, is_early in zip(rows.states, early, strict=True)]
    return _without(logits, rows, held)


def remove_repeating(logits: Tensor, rows: RowsInUse) -> Tensor:
    """No token that would complete an n-gram already in prompt or output (as transformers)."""
    vocab = logits.shape[-1]
    repeating = [state.ngrams.repeating() if state.ngrams else [] for state in rows.states]
    return _without(logits, rows, [[token for token in ids if 0 <= token < vocab] for ids in repeating])


def keep_grammatical(logits: Tensor, rows: RowsInUse) -> Tensor:
    """What each row's grammar allows next: minus infinity is added to everything else."""
    assert rows.masks is not None, "a row with a grammar was run without masks"
    packed = rows.masks.bits(rows.rows)
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


def _without(logits: Tensor, rows: RowsInUse, ids: list[list[int]]) -> Tensor:
    return logits.index_put(rows.pairs(ids), torch.tensor(-torch.inf, device=logits.device))
