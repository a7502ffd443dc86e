"""Cuts a step's attention into tasks of equal shape, once for all layers of a KV group.

A task is B rows with Q queries each, over N blocks each. Rows with one query (decoding) are gathered into tasks of
similar context length; a prompt chunk becomes tasks of one row and at most MAX_QUERIES queries:

    keys of a task, N * block_size of them:   [ block first | block first+1 | ... | block first+N-1 ]
    visible to a query at position p:               p - window < key position <= p

N is rounded up for decoding rows, by a quarter at most, so that rows of similar length share a task while a row's
arithmetic has the same shape whatever its neighbours are; the surplus is masked. A task gathers only blocks that one of
its queries can see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.ops.batch import ForwardBatch

MAX_QUERIES = 128  # of one task: bounds the scores [heads, Q, keys]
MAX_GATHERED_KEYS = 16384  # of one decoding task: bounds the gathered copy; a longer row makes a task of its own


@dataclass(frozen=True)
class AttentionTask:
    tokens: torch.Tensor  # int64 [B * Q], which of the step's tokens these queries are
    blocks: torch.Tensor  # int64 [B * N]
    visible: torch.Tensor  # bool [B, Q, N * block_size]

    @property
    def num_rows(self) -> int:
        return self.visible.shape[0]


AttentionPlan = list[AttentionTask]


def plan_attention(batch: ForwardBatch, group: int, window: int | None) -> AttentionPlan:
    starts: list[int] = batch.query_starts.tolist()
    contexts: list[int] = batch.context_lens.tolist()
    table = batch.groups[group].block_tables
    alike: dict[int, list[int]] = {}  # decoding rows by their number of blocks, rounded up
    tasks: AttentionPlan = []
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        if end - begin == 1:
            alike.setdefault(_rounded_blocks(context, window, batch.block_size), []).append(row)
            continue
        for first in range(begin, end, MAX_QUERIES):
            last = min(first + MAX_QUERIES, end)
            span = (context - (end - first), context - (end - last))  # positions of these queries
            tasks.append(_chunk_task(range(first, last), span, table[row], window, batch.block_size))
    for num_blocks, rows in alike.items():
        size = max(1, MAX_GATHERED_KEYS // (num_blocks * batch.block_size))
        for first in range(0, len(rows), size):
            tasks.append(_decoding_task(rows[first : first + size], num_blocks, batch, table, window))
    return tasks


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """The block that holds the oldest key a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _rounded_blocks(context: int, window: int | None, block_size: int) -> int:
    """1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32 40 ...: four sizes between powers of two"""
    needed = (context - 1) // block_size + 1 - _first_block(context - 1, window, block_size)
    step = max(1, 1 << (needed - 1).bit_length() >> 3)
    return -(-needed // step) * step


def _chunk_task(
    tokens: range, span: tuple[int, int], table: torch.Tensor, window: int | None, block_size: int
) -> AttentionTask:
    """Queries at positions [span[0], span[1]) of one row; `table` is the row's own, int32 [max_blocks]."""
    device = table.device
    first = _first_block(span[0], window, block_size)
    blocks = table[first : (span[1] - 1) // block_size + 1].long()
    keys = torch.arange(len(blocks) * block_size, device=device) + first * block_size
    queries = torch.arange(*span, device=device)
    visible = _visible(queries.view(1, -1, 1), keys.view(1, 1, -1), window)
    return AttentionTask(torch.arange(tokens.start, tokens.stop, device=device), blocks, visible)


def _decoding_task(
    rows: list[int], num_blocks: int, batch: ForwardBatch, table: torch.Tensor, window: int | None
) -> AttentionTask:
    chosen = torch.tensor(rows, device=table.device)
    queries = batch.context_lens[chosen].long() - 1  # [B] positions
    oldest = torch.zeros_like(queries) if window is None else (queries - window + 1).clamp_(min=0)
    numbers = (oldest // batch.block_size).unsqueeze(1) + torch.arange(num_blocks, device=table.device)  # [B, N]
    # Surplus columns may lie beyond the table: any existing block will do, none of its keys is visible.
    blocks = table[chosen].long().gather(1, numbers.clamp(max=table.shape[1] - 1))
    offsets = torch.arange(batch.block_size, device=table.device)
    keys = (numbers.unsqueeze(2) * batch.block_size + offsets).flatten(1)  # [B, N * block_size]
    visible = _visible(queries.view(-1, 1, 1), keys.unsqueeze(1), window)
    return AttentionTask(batch.query_starts[chosen].long(), blocks.flatten(), visible)


def _visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
