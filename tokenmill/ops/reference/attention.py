"""Attention over a paged KV cache, in float32 torch.

A step is split into tasks, once for all layers of a cache group; each task computes scores, softmax and weighted
values. A task has B rows with Q queries each, over N blocks each. Decoding rows (one query) of similar context length
share a task; a prompt chunk becomes tasks of one row and at most MAX_QUERIES queries:

    keys of a task, N * block_size of them:   [ block first | block first+1 | ... | block first+N-1 ]
    visible to a query at position p:               p - window < key position <= p, or from its chunk's beginning on

For decoding rows N is rounded up by at most a quarter and the surplus is masked: rows of similar length share a task,
and yet the shape of a row's arithmetic does not depend on the other rows. A task gathers only blocks that at least one
of its queries can see.

Queries of the G heads that share a KV head are computed together. A slot that no query of a task sees may hold any
value, even NaN left by a failed request. Its score is masked and its weight is 0; if 0 * NaN made the result NaN, such
values are zeroed and the product is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.ops.batch import ForwardBatch, LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference.elementwise import softcap
from tokenmill.ops.reference.kv_rounding import rounded

MAX_QUERIES = 128  # per task: limits the size of the scores [heads, Q, keys]
MAX_GATHERED_KEYS = 16384  # per decoding task: limits the gathered copy; a longer row gets its own task


@dataclass(frozen=True)
class AttentionTask:
    tokens: torch.Tensor  # int64 [B * Q], the step's tokens that are the queries
    blocks: torch.Tensor  # int64 [B * N]
    visible: torch.Tensor  # bool [B, Q, N * block_size]; [B, kv_heads, Q, …] if each head sees other keys
    queries: torch.Tensor | None = None  # int64 [B or 1, Q], positions; None: scores do not depend on distances
    keys: torch.Tensor | None = None  # int64 [B or 1, N * block_size], positions

    @property
    def num_rows(self) -> int:
        return self.visible.shape[0]


AttentionPlan = list[AttentionTask]


@dataclass(frozen=True)
class Reach:
    """The keys that a query sees: the last `window`, itself included, or those since a multiple of `window`."""

    window: int | None
    is_chunked: bool = False

    def oldest(self, position: torch.Tensor) -> torch.Tensor:
        """Return the positions of the oldest keys that queries at these positions see."""
        if self.window is None:
            return torch.zeros_like(position)
        if self.is_chunked:
            return position // self.window * self.window
        return (position - self.window + 1).clamp(min=0)

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the block with the oldest key that a query at `position` sees."""
        if self.window is None:
            return 0
        oldest = position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)
        return oldest // block_size


def plan_attention(batch: ForwardBatch, group: int, window: int | None, *, is_chunked: bool = False) -> AttentionPlan:
    reach = Reach(window, is_chunked)
    starts: list[int] = batch.query_starts.tolist()
    contexts: list[int] = batch.context_lens.tolist()
    table = batch.groups[group].block_tables
    by_blocks: dict[int, list[int]] = {}  # decoding rows by their rounded number of blocks
    tasks: AttentionPlan = []
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        if end - begin == 1:
            by_blocks.setdefault(_rounded_blocks(context, reach, batch.block_size), []).append(row)
            continue
        for first in range(begin, end, MAX_QUERIES):
            last = min(first + MAX_QUERIES, end)
            span = (context - (end - first), context - (end - last))  # positions of these queries
            tasks.append(_chunk_task(range(first, last), span, table[row], reach, batch.block_size))
    for num_blocks, rows in by_blocks.items():
        size = max(1, MAX_GATHERED_KEYS // (num_blocks * batch.block_size))
        for first in range(0, len(rows), size):
            tasks.append(_decoding_task(rows[first : first + size], num_blocks, batch, table, reach))
    return tasks


def _rounded_blocks(context: int, reach: Reach, block_size: int) -> int:
    """Round the number of visible blocks up to 1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32 40 …: four sizes per octave."""
    needed = (context - 1) // block_size + 1 - reach.first_block(context - 1, block_size)
    step = max(1, 1 << (needed - 1).bit_length() >> 3)
    return -(-needed // step) * step


def _chunk_task(
    tokens: range, span: tuple[int, int], table: torch.Tensor, reach: Reach, block_size: int
) -> AttentionTask:
    """Make the task of queries at positions [span[0], span[1]) of one row with this block table, int32 [max_blocks]."""
    device = table.device
    first = reach.first_block(span[0], block_size)
    blocks = table[first : (span[1] - 1) // block_size + 1].long()
    keys = torch.arange(len(blocks) * block_size, device=device) + first * block_size
    queries = torch.arange(*span, device=device)
    visible = _visible(queries.view(1, -1, 1), keys.view(1, 1, -1), reach)
    numbers = torch.arange(tokens.start, tokens.stop, device=device)
    return AttentionTask(numbers, blocks, visible, queries.view(1, -1), keys.view(1, -1))


def _decoding_task(
    rows: list[int], num_blocks: int, batch: ForwardBatch, table: torch.Tensor, reach: Reach
) -> AttentionTask:
    chosen = torch.tensor(rows, device=table.device)
    queries = batch.context_lens[chosen].long() - 1  # [B] positions
    numbers = (reach.oldest(queries) // batch.block_size).unsqueeze(1) + torch.arange(
        num_blocks, device=table.device
    )  # [B, N]
    # Surplus columns may exceed the table: any existing block will do, since its keys are masked.
    blocks = table[chosen].long().gather(1, numbers.clamp(max=table.shape[1] - 1))
    offsets = torch.arange(batch.block_size, device=table.device)
    keys = (numbers.unsqueeze(2) * batch.block_size + offsets).flatten(1)  # [B, N * block_size]
    visible = _visible(queries.view(-1, 1, 1), keys.unsqueeze(1), reach)
    return AttentionTask(batch.query_starts[chosen].long(), blocks.flatten(), visible, queries.view(-1, 1), keys)


def _visible(queries: torch.Tensor, keys: torch.Tensor, reach: Reach) -> torch.Tensor:
    seen = keys <= queries
    return seen if reach.window is None else seen & (keys >= reach.oldest(queries))


def write_kv(cache: LayerCache, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    block_size = cache.keys.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for vectors, kept, scales in ((keys, cache.keys, cache.key_scales), (values, cache.values, cache.value_scales)):
        if scales is None:
            kept[blocks, :, offsets] = vectors.to(kept.dtype)
            continue
        numbers, scales[blocks, :, offsets] = rounded(vectors, kept.dtype)
        kept.view(torch.uint8)[blocks, :, offsets] = numbers.view(torch.uint8)


def attention(queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, args: AttentionArgs) -> torch.Tensor:
    """queries [T, heads, D] → [T, heads * D of the values]"""
    out = queries.new_empty(*queries.shape[:2], cache.values.shape[-1])
    for task in plan:
        out[task.tokens] = _attend(queries[task.tokens].float(), cache, task, args).to(out.dtype)
    return out.flatten(1)


def _attend(queries: torch.Tensor, cache: LayerCache, task: AttentionTask, args: AttentionArgs) -> torch.Tensor:
    """queries [B * Q, heads, D] → [B * Q, heads, D of the values]"""
    rows, (_, kv_heads, _, dim), num_heads = task.num_rows, cache.keys.shape, queries.shape[1]
    keys = _gather(cache.keys, cache.key_scales, task)
    # [B, Q, kv_heads, G, D] → [B, kv_heads, G, Q, D]
    grouped = queries.view(rows, -1, kv_heads, num_heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    scores = (grouped.flatten(2, 3) @ keys.transpose(2, 3)) * args.scale
    scores = scores.view(*grouped.shape[:4], -1)  # [B, kv_heads, G, Q, S]
    if args.slopes is not None:
        assert task.keys is not None and task.queries is not None, "planned without positions"
        distances = (task.keys.unsqueeze(1) - task.queries.unsqueeze(2)).float()  # [B or 1, Q, S]
        scores = scores + args.slopes.view(kv_heads, -1, 1, 1) * distances[:, None, None]
    if args.softcap is not None:
        scores = softcap(scores, args.softcap)
    by_head = task.visible if task.visible.dim() == 4 else task.visible.unsqueeze(1)
    scores = scores.masked_fill_(~by_head.unsqueeze(2), float("-inf"))
    values = _gather(cache.values, cache.value_scales, task)
    mixed = mix_values(_softmax(scores, args.sinks).flatten(2, 3), values, task)
    width = mixed.shape[-1]
    return mixed.view(*grouped.shape[:4], width).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, width)


def _head_blocks(task: AttentionTask, kv_heads: int) -> torch.Tensor:
    """Return the index of each head of each block in a cache viewed as [num_blocks * kv_heads, …]: [B, kv_heads, N]."""
    heads = torch.arange(kv_heads, device=task.blocks.device).view(1, -1, 1)
    return task.blocks.view(task.num_rows, 1, -1) * kv_heads + heads


def _gather(cache: torch.Tensor, scales: torch.Tensor | None, task: AttentionTask) -> torch.Tensor:
    """Copy the task's blocks as float32, [B, kv_heads, N * block_size, D]."""
    if not cache.is_contiguous():  # blocks of keys and values alternate, see `KVStorage`
        vectors = _per_head(cache[task.blocks].float(), task)
        return vectors if scales is None else vectors * _per_head(scales[task.blocks].unsqueeze(-1), task)
    head_blocks = _head_blocks(task, cache.shape[1])
    found = torch.index_select(cache.view(-1, cache.shape[2] * cache.shape[3]), 0, head_blocks.flatten())
    vectors = found.float().view(*head_blocks.shape[:2], -1, cache.shape[3])
    if scales is None:
        return vectors
    return vectors * scales.view(-1, cache.shape[2])[head_blocks.flatten()].view(*vectors.shape[:3], 1)


def _per_head(blocks: torch.Tensor, task: AttentionTask) -> torch.Tensor:
    """[B * N, kv_heads, block_size, D] → [B, kv_heads, N * block_size, D]"""
    return blocks.view(task.num_rows, -1, *blocks.shape[1:]).transpose(1, 2).flatten(2, 3)


def mix_values(weights: torch.Tensor, values: torch.Tensor, task: AttentionTask) -> torch.Tensor:
    """Multiply softmax weights and values, [B, kv_heads, G * Q, S] @ [B, kv_heads, S, D], ignoring unseen values."""
    mixed = weights @ values
    if bool(mixed.isfinite().all()):
        return mixed
    unseen = ~task.visible.flatten(1, -2).any(1)  # [B, S]
    return weights @ values.masked_fill(unseen.view(len(unseen), 1, -1, 1), 0.0)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys; a sink is one more logit per head, which takes weight but has no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().view(1, scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:4], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
