"""Recurrent mixers of a step: tokens one by one where rows have one each, chunks of 64 for prompts.

`deterministic_recurrent` computes prompts token by token too, so that a token's bits do not depend on how steps cut its
sequence; chunks add up in another order.
"""

from __future__ import annotations

import torch

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.recurrent.chunks import recur_chunks
from tokenmill.ops.triton.recurrent.convolution import convolve_pieces
from tokenmill.ops.triton.recurrent.gate import gate_and_norm
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.sizes import Sizes
from tokenmill.ops.triton.recurrent.tokens import recur_tokens


def recurrent(
    projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentBatch, args: RecurrentArgs
) -> torch.Tensor:
    """Joint projections [T, q k v z (b) a] → normed and gated outputs [T, values]"""
    projected = projected.contiguous()
    num_rows, num_single, values = len(plan.contexts), plan.num_single, args.spec.values_size
    out = projected.new_empty(len(projected), values)
    by_head = Sizes.of(args).gates_by_head
    if num_single:
        single = out if by_head else torch.empty(num_single, values, dtype=torch.float32, device=out.device)
        recur_tokens(projected, cache, plan, args, single, num_single)
        if not by_head:
            gate_and_norm(single, projected, args, out)
    if num_single < num_rows:
        mixed = torch.empty(len(projected), values, dtype=torch.float32, device=out.device)
        recur_chunks(projected, convolve_pieces(projected, cache, plan, args), cache, plan, args, mixed)
        gate_and_norm(mixed[num_single:], projected[num_single:], args, out[num_single:])
    return out


def deterministic_recurrent(
    projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentBatch, args: RecurrentArgs
) -> torch.Tensor:
    projected = projected.contiguous()
    out = projected.new_empty(len(projected), args.spec.values_size)
    by_head = Sizes.of(args).gates_by_head
    mixed = out if by_head else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    recur_tokens(projected, cache, plan, args, mixed, len(plan.contexts))
    if not by_head:
        gate_and_norm(mixed, projected, args, out)
    return out
