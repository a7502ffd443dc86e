"""Sampler steps on the logits of single tokens: penalties, DRY, bias, allowed and banned tokens, n-grams, grammars,
watermark, thinking budget, and the user's own logits processors.

Each is a pure function (logits float32 [U, V], rows) -> logits, called only with the rows that use it. The repetition
penalty divides positive and multiplies negative logits of every token seen in prompt or output
(CTRL, as transformers and vLLM); frequency and presence penalties count output tokens only (as OpenAI and vLLM).

A logits processor is called with one row at a time, by engines in the user's own process only:

    def processor(output_token_ids, logits): ...                       logits: float32 [vocab], the row's own copy
    def processor(prompt_token_ids, output_token_ids, logits): ...     returns logits of the same shape

It should depend on its arguments alone, because a preempted row calls it again with the same ones. If it raises, or
returns a wrong shape, its own request ends with an error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.params import SamplingParams
from tokenmill.sampling.rows import RowsInUse, RowState
from tokenmill.sampling.watermark import green_tokens

_LARGEST, _LOG_OF_LARGEST = 3.4e38, 88.7228391  # of float32


def penalise_repeats(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Apply repetition, frequency and presence penalties."""
    counts = [state.past.counts for state in rows.states if state.past.counts is not None]
    logits_rows, tokens = rows.pairs([c.ids for c in counts])
    times = torch.from_numpy(np.concatenate([c.output_counts for c in counts])).to(rows.device)
    repetition = rows.param("repetition_penalty")[logits_rows, 0]
    frequency = rows.param("frequency_penalty")[logits_rows, 0]
    presence = rows.param("presence_penalty")[logits_rows, 0]
    value = logits[logits_rows, tokens]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - frequency * times.float() - presence * (times > 0).float()
    return logits.index_put((logits_rows, tokens), value)


def penalise_repeated_passages(logits: Tensor, rows: RowsInUse) -> Tensor:
    """DRY, as llama.cpp: subtract multiplier * base ** (length - allowed length) from tokens that extend a repeat."""
    vocab = logits.shape[-1]
    repeats = [_repeats(state, vocab) for state in rows.states]
    logits_rows, tokens = rows.pairs([list(found) for found in repeats])
    losses = [
        _loss(state.params, length)
        for state, found in zip(rows.states, repeats, strict=True)
        for length in found.values()
    ]
    loss = torch.tensor(losses, dtype=torch.float32, device=rows.device)
    return logits.index_put((logits_rows, tokens), logits[logits_rows, tokens] - loss)


def _repeats(state: RowState, vocab: int) -> dict[int, int]:
    runs, params = state.past.repeats, state.params
    found = runs.repeating(params.dry_allowed_length, params.dry_penalty_last_n) if runs else {}
    return {token: length for token, length in found.items() if 0 <= token < vocab}


def _loss(params: SamplingParams, length: int) -> float:
    base, exponent = params.dry_base, length - params.dry_allowed_length
    if base > 1.000001:
        exponent = min(exponent, int(_LOG_OF_LARGEST / math.log(base)))  # a larger power does not fit into a float32
    return min(params.dry_multiplier * float(base**exponent), _LARGEST)


def add_bias(logits: Tensor, rows: RowsInUse) -> Tensor:
    biases = [state.params.logit_bias or {} for state in rows.states]
    logits_rows, tokens = rows.pairs([list(bias) for bias in biases])
    values = torch.tensor([v for bias in biases for v in bias.values()], dtype=torch.float32, device=rows.device)
    return logits.index_put((logits_rows, tokens), logits[logits_rows, tokens] + values)


def keep_allowed(logits: Tensor, rows: RowsInUse) -> Tensor:
    index = rows.pairs([state.params.allowed_token_ids or [] for state in rows.states])
    return torch.full_like(logits, -torch.inf).index_put(index, logits[index])


def remove_banned(logits: Tensor, rows: RowsInUse) -> Tensor:
    return _without(logits, rows, [state.params.banned_token_ids or [] for state in rows.states])


def hold_back_stops(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Remove stop tokens until there are `min_tokens` output tokens, unless a grammar allows nothing else."""
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
    """Return the stop tokens that must not be sampled.

    Before `min_tokens` these are all of them; later, with ignore_eos and a grammar, those that the request did not
    name.
    """
    params = state.params
    if output_index < params.min_tokens:
        return state.stop_token_ids
    ignores_end = params.ignore_eos and params.guided is not None
    return [i for i in state.stop_token_ids if i not in params.stop_token_ids] if ignores_end else []


def remove_repeating(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Remove tokens that would complete an n-gram of prompt and output (as transformers)."""
    vocab = logits.shape[-1]
    repeating = [state.past.ngrams.repeating() if state.past.ngrams else [] for state in rows.states]
    return _without(logits, rows, [[token for token in ids if 0 <= token < vocab] for ids in repeating])


def keep_grammatical(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Add minus infinity to every token that the row's grammar does not allow next."""
    assert rows.masks is not None, "a row with a grammar was run without masks"
    packed = rows.masks.bits(rows.rows, rows.num_drafts)
    if rows.device.type != "cpu":  # copy the packed bits, and unpack them on the device
        spread = torch.from_numpy(_mask_table()).to(rows.device)[torch.from_numpy(packed).to(rows.device).int()]
        return logits + spread.flatten(1)[:, : logits.shape[-1]]
    # numpy takes runs of eight floats from a table ten times faster than torch, and wakes no threads
    mask = np.take(_mask_table(), packed, axis=0).reshape(len(packed), -1)[:, : logits.shape[-1]]
    mask += logits.numpy()
    return torch.from_numpy(mask)


@cache
def _mask_table() -> NDArray[np.float32]:
    """Table [256, 8]: what each byte of a mask adds to eight logits, 0 where a bit is set, else minus infinity."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, 0.0, -np.inf).astype(np.float32)


def favour_green(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Watermark: add `delta` to the tokens that the key and the last tokens make green."""
    added = np.zeros(logits.shape, dtype=np.float32)
    for logits_row, state in enumerate(rows.states):
        mark, tokens = state.params.watermark, state.past.tokens
        assert mark is not None and tokens is not None
        added[logits_row] = green_tokens(mark, tokens[-mark.context :], logits.shape[-1]) * np.float32(mark.delta)
    return logits + torch.from_numpy(added).to(rows.device)


def end_thinking(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Keep only the next token of the closing marker where the thinking budget is spent."""
    forced = [state.past.thinking.forced() if state.past.thinking else None for state in rows.states]
    logits_rows = [logits_row for logits_row, token in enumerate(forced) if token is not None]
    if not logits_rows:
        return logits
    index = torch.tensor(logits_rows, device=rows.device)
    tokens = torch.tensor([token for token in forced if token is not None], device=rows.device)
    only = torch.full((len(logits_rows), logits.shape[-1]), -torch.inf, device=rows.device)
    return logits.index_copy(0, index, only.scatter(1, tokens.unsqueeze(1), 0.0))


def _without(logits: Tensor, rows: RowsInUse, ids: list[list[int]]) -> Tensor:
    """Set the logits of `ids`, one list per row, to minus infinity."""
    return logits.index_put(rows.pairs(ids), torch.tensor(-torch.inf, device=logits.device))


def run_processors(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Run the logits processors of each row."""
    return torch.stack(
        [_processed(row, state, rows.vocab_size) for row, state in zip(logits, rows.states, strict=True)]
    )


def _processed(row: Tensor, state: RowState, vocab_size: int) -> Tensor:
    """Return a row's padded logits after all its processors; unchanged where one fails, with the row's error set."""
    tokens, prompt_len = state.past.tokens, state.past.prompt_len
    assert tokens is not None
    logits = row[:vocab_size].clone()
    for processor in state.params.logits_processors:
        try:
            logits = _called(processor, tokens[:prompt_len], tokens[prompt_len:], logits)
        except Exception as error:  # the user's code may raise anything; only its own request ends
            state.refusal = f"a logits processor failed: {type(error).__name__}: {error}"
            return row
    return torch.cat([logits, row[vocab_size:]])


def _called(processor: Callable[..., Any], prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    args = (prompt, output, logits) if num_arguments(processor) == 3 else (output, logits)
    changed = processor(*args)
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        raise ValueError(f"it must return logits of shape {list(logits.shape)}")
    return changed.to(logits)


def num_arguments(processor: Callable[..., Any]) -> int:
    """Count the positional parameters of a logits processor that have no default."""
    parameters = inspect.signature(processor).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
