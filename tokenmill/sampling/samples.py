"""Sampled tokens as they travel between model, sampler and runner, and the kernels that sample plain rows on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmill.ops.batch import DrawParams
from tokenmill.ops.cpu.availability import is_available, native
from tokenmill.sampling.rng import DRAW, uniform
from tokenmill.sampling.rows import RowsInUse, RowState
from tokenmill.types import TokenLogprobs

BROKEN = -1  # in place of a token id: the row's highest logit is not finite


class Sample(NamedTuple):
    """One sampled token of a row; `token_id` is meaningless where `error` is set."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    mirostat_mu: float | None = None  # mirostat's limit for the next token, if this one is accepted
    error: str | None = None


@dataclass(frozen=True)
class ModelSampled:
    """One token for each of L logits rows, sampled by the model itself.

    A model that can do this samples while it computes the logits, and never stores or returns them. Only rows of which
    no request needs the logits are sampled so: greedy ones, or those with temperature, top-k, top-p and min-p only.
    """

    tokens: list[int]

    def __getitem__(self, part: slice) -> ModelSampled:
        return ModelSampled(self.tokens[part])


HeadOutput = Tensor | ModelSampled
"""Logits, float32 [L, vocab], or only the sampled tokens where no request needs the logits"""


def greedy_from_argmax(tokens: Tensor, values: Tensor) -> ModelSampled:
    """Make greedy tokens from the argmax of each logits row, int64 [L], and the logits there, float32 [L]."""
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return ModelSampled([token if isfinite(value) else BROKEN for token, value in pairs])


def greedy_tokens(logits: Tensor) -> ModelSampled:
    """Return the token with the highest logit of each row of float32 [L, vocab]."""
    tokens = argmax_rows(logits)
    return greedy_from_argmax(tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1))


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the argmax of each row, int64 [S]: the first of equal values, or the first NaN."""
    if logits.device.type == "cpu":  # numpy is ten times faster than torch here
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


class NativeDraws:
    """Native CPU sampling of rows that use no parameter but temperature, top-k, top-p and min-p.

    The kernels give the token that the steps of `steps.py` give, in a twentieth of the time: each row is sampled from
    start to end while its logits are in the cache, nothing is sorted, and with top-k only the logits that pass are read
    again.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_available = device.type == "cpu" and is_available()[0]

    def can_draw(self, state: RowState) -> bool:
        return self._is_available and state.is_plain

    def draw(self, logits: Tensor, rows: RowsInUse, logits_rows: list[int]) -> list[int]:
        """Sample a token for each of `rows`, with logits at `logits_rows`; BROKEN where the highest is not finite."""
        params = draw_params(rows.states, rows.output_indices)
        tokens: list[int] = native().draw_rows(logits.float().contiguous(), logits_rows, *params)
        return tokens


def draw_params(states: Sequence[RowState], output_indices: Sequence[int]) -> DrawParams:
    """Return the parameters and random numbers that a kernel needs to sample for these rows."""
    params = [state.params for state in states]
    return DrawParams(
        temperatures=[state.params.temperature if "temperature" in state.steps else 0.0 for state in states],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        uniforms=[uniform(state.seed, index, DRAW) for state, index in zip(states, output_indices, strict=True)],
        is_greedy=[state.takes_highest for state in states],
    )
