"""The plan of a step for all recurrent layers of a cache group.

Rows of one token each come first and are computed token by token. The others are cut at multiples of 64 positions into
segments, which the parallel kernels process independently:

    row of 150 tokens from position 40 on      segment 40 .. 63 | segment 64 .. 127 | segment 128 .. 189
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenmill.arch.cache_parts import CHUNK
from tokenmill.ops.batch import ForwardBatch


@dataclass(frozen=True)
class RecurrentBatch:
    cells: torch.Tensor  # int32 [R, max_blocks], block tables
    states: torch.Tensor  # int32 [R, max_blocks]: entry e is the state after 64 * (e + 1) tokens
    query_starts: torch.Tensor  # int32 [R + 1]
    contexts: torch.Tensor  # int32 [R]
    num_single: int  # rows [0, num_single) have one token each
    segments: torch.Tensor | None  # int32 [N, 4] of other rows: row, first position, tokens, first token in the step
    block_size: int
    owners: torch.Tensor | None = None  # int32 [T]: the row of each token, if all rows are computed token by token


def plan_recurrent(batch: ForwardBatch, cells: int, states: int) -> RecurrentBatch:
    return _plan(batch, cells, states, cuts_segments=True)


def plan_token_by_token(batch: ForwardBatch, cells: int, states: int) -> RecurrentBatch:
    """Return the plan for kernels that compute every row token by token."""
    plan = _plan(batch, cells, states, cuts_segments=False)
    if plan.num_single == len(plan.contexts):
        return plan
    numbers = [row for row, (count, _) in enumerate(_lengths(batch)) for _ in range(count)]
    return replace(plan, owners=_sent(numbers, batch.context_lens.device))


def _plan(batch: ForwardBatch, cells: int, states: int, *, cuts_segments: bool) -> RecurrentBatch:
    num_rows = batch.context_lens.shape[0]
    num_single = num_rows if batch.max_query_len == 1 else batch.num_single
    return RecurrentBatch(
        cells=batch.groups[cells].block_tables,
        states=batch.groups[states].block_tables,
        query_starts=batch.query_starts,
        contexts=batch.context_lens,
        num_single=num_single,
        segments=_segments(batch, num_single) if cuts_segments and num_single < num_rows else None,
        block_size=batch.block_size,
    )


def _segments(batch: ForwardBatch, num_single: int) -> torch.Tensor:
    found, token, device = [], num_single, batch.context_lens.device
    for row, (count, context) in enumerate(_lengths(batch)[num_single:], start=num_single):
        position = context - count
        while position < context:
            length = min(context, (position // CHUNK + 1) * CHUNK) - position
            found.append((row, position, length, token))
            position, token = position + length, token + length
    return _sent(found, device)


def _sent(values: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Copy values to the device as int32 without synchronising."""
    tensor = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def _lengths(batch: ForwardBatch) -> list[tuple[int, int]]:
    if batch.lengths is not None:
        return list(batch.lengths)
    counts = batch.query_starts.diff().tolist()
    return list(zip(counts, batch.context_lens.tolist(), strict=True))
