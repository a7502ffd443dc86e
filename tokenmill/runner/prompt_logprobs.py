"""Logprobs of a prompt's own tokens. Position p predicts token p + 1, so a chunk scores the tokens after its own:

prompt          t0 t1 t2 t3 t4 t5            chunk [t2 t3 t4] scores t3 t4 t5; chunk [t5] scores nothing
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.runner.memory import MAX_HOST_LOGITS
from tokenmill.sampling.logprobs import prompt_logprobs
from tokenmill.types import RowPlan, TokenLogprobs


def scored_tokens(plan: RowPlan, prompt: list[int]) -> list[int]:
    """The prompt tokens that this step's positions predict; the k-th fed token predicts the k-th of them.

    Of a shifted context's first tokens it is not true, but their successors have long been scored: nobody looks.
    """
    return prompt[plan.sequence_position + 1 : plan.sequence_position + 1 + len(plan.token_ids)]


def score_prompt(
    hidden: torch.Tensor, targets: list[int], num: int, logits: Callable[[torch.Tensor], torch.Tensor], vocab: int
) -> list[TokenLogprobs] | None:
    """hidden [n, H] at the positions before the n targets; None where the logits are not finite."""
    size = max(1, MAX_HOST_LOGITS // vocab)  # 64 MiB of logits, however long the prompt
    scores: list[TokenLogprobs] = []
    for first in range(0, len(targets), size):
        part = logits(hidden[first : first + size])
        if not bool(part.amax(-1).isfinite().all()):
            return None
        scores += prompt_logprobs(part, targets[first : first + size], num)
    return scores
