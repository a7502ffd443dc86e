"""Logits processors: the user's own functions, called with one row at a time. For engines in the user's own process.

    def processor(output_token_ids, logits): ...                       logits: float32 [vocab], the row's own copy
    def processor(prompt_token_ids, output_token_ids, logits): ...     returns logits of the same shape

A function should depend on its arguments alone: a preempted row calls it again with the same ones. What it raises, or
returns in a wrong shape, ends its own request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmill.sampling.rows import RowsInUse, RowState


def run_processors(logits: Tensor, rows: RowsInUse) -> Tensor:
    lines = [_processed(logits[line], state, rows.vocab_size) for line, state in enumerate(rows.states)]
    return torch.stack(lines)


def _processed(line: Tensor, state: RowState, vocab_size: int) -> Tensor:
    """A row's padded logits after all its processors; left alone where one fails, and the row refused."""
    tokens, prompt_len = state.past.tokens, state.past.prompt_len
    assert tokens is not None
    logits = line[:vocab_size].clone()
    for processor in state.params.logits_processors:
        try:
            logits = _called(processor, tokens[:prompt_len], tokens[prompt_len:], logits)
        except Exception as error:  # the user's code may raise anything; its request alone ends
            state.refusal = f"a logits processor failed: {type(error).__name__}: {error}"
            return line
    return torch.cat([logits, line[vocab_size:]])


def _called(processor: Callable[..., Any], prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    given = (prompt, output, logits) if num_arguments(processor) == 3 else (output, logits)
    changed = processor(*given)
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        raise ValueError(f"it must return logits of shape {list(logits.shape)}")
    return changed.to(logits)


def num_arguments(processor: Callable[..., Any]) -> int:
    parameters = inspect.signature(processor).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
