"""Recurrent mixers of a step: token by token for rows of one token, in chunks of 64 for prompts.

`deterministic_recurrent` also computes prompts token by token, so that a token's bits do not depend on how its sequence
is split into steps; chunks have another order of summation.
"""

from __future__ import annotations

import torch

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.recurrent.chunks import recur_chunks
from tokenmill.ops.triton.recurrent.convolution import convolve_segments
from tokenmill.ops.triton.recurrent.gate import gate_and_norm
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.tokens import recur_tokens


def recurrent(
    projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentBatch, args: RecurrentArgs
) -> torch.Tensor:
    """Stacked projections [T, q k v z (b) a] → normed and gated outputs [T, values]"""
    projected = projected.contiguous()
    mixed = torch.empty(len(projected), args.spec.values_size, dtype=torch.float32, device=projected.device)
    if plan.num_single:
        recur_tokens(projected, cache, plan, args, mixed, plan.num_single)
    if plan.num_single < len(plan.contexts):
        recur_chunks(projected, convolve_segments(projected, cache, plan, args), cache, plan, args, mixed)
    return gate_and_norm(mixed, projected, args)


def deterministic_recurrent(
    projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentBatch, args: RecurrentArgs
) -> torch.Tensor:
    projected = projected.contiguous()
    mixed = torch.empty(len(projected), args.spec.values_size, dtype=torch.float32, device=projected.device)
    recur_tokens(projected, cache, plan, args, mixed, len(plan.contexts))
    return gate_and_norm(mixed, projected, args)
