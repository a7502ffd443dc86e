"""Short constructors of rows and logits for the sampler's tests."""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.params import SamplingParams
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.samples import Sample
from tokenmill.types import RowInit, RowPlan, TokenizedParams

SPELLED = set(TokenizedParams.__struct_fields__)


def new_row(
    row: int = 0,
    seed: int = 0,
    prompt: Any = (),
    output: Any = (),
    stops: Any = (),
    mirostat_mu: float | None = None,
    **params: Any,
) -> RowInit:
    """Build a row from parameters of `SamplingParams` and of `TokenizedParams`, by name."""
    return RowInit(
        row=row,
        params=SamplingParams(**{name: value for name, value in params.items() if name not in SPELLED}),
        tokenized=TokenizedParams(**{name: value for name, value in params.items() if name in SPELLED}),
        mirostat_mu=mirostat_mu,
        seed=seed,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        stop_token_ids=list(stops),
    )


def plan(row: int = 0, output_index: int = 0, num_logprobs: int | None = None) -> RowPlan:
    return RowPlan(row=row, start=0, token_ids=[0], sample=True, output_index=output_index, num_logprobs=num_logprobs)


def draw_alone(logits: torch.Tensor, row: RowInit, output_index: int = 0, num_logprobs: int | None = None) -> Sample:
    """Sample one row in its own sampler; logits [vocab]."""
    sampler = Sampler(logits.shape[-1], row.row + 1, "cpu")
    sampler.add_row(row)
    return sampler.sample(logits.unsqueeze(0), [plan(row.row, output_index, num_logprobs)])[0]
