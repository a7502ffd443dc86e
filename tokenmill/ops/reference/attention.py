"""Attention over a paged KV cache, in float32: scores, softmax, weighted values, task by task of the step's plan.

Queries of G heads that share a key head are computed together. A slot that no query of a task sees may hold anything,
even NaN left by another request that failed. Its score is masked; its weight is then 0, and only if 0 * NaN has spread
are such values cleared and the product taken again.
"""

from __future__ import annotations

import torch

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference.activation import softcap
from tokenmill.ops.reference.attention_plan import AttentionPlan, AttentionTask
from tokenmill.ops.reference.kv_rounding import rounded


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
    """queries [T, heads, D] → [T, heads * D]"""
    out = torch.empty_like(queries)
    for task in plan:
        out[task.tokens] = _attend(queries[task.tokens].float(), cache, task, args).to(out.dtype)
    return out.flatten(1)


def _attend(queries: torch.Tensor, cache: LayerCache, task: AttentionTask, args: AttentionArgs) -> torch.Tensor:
    """queries [B * Q, heads, D] → the same shape"""
    rows, (_, kv_heads, _, dim), num_heads = task.num_rows, cache.keys.shape, queries.shape[1]
    lines = _head_blocks(task, kv_heads)
    keys = _gather(cache.keys, cache.key_scales, lines)
    # [B, Q, kv_heads, G, D] → [B, kv_heads, G, Q, D]
    grouped = queries.view(rows, -1, kv_heads, num_heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    scores = (grouped.flatten(2, 3) @ keys.transpose(2, 3)) * args.scale
    scores = scores.view(*grouped.shape[:4], -1)  # [B, kv_heads, G, Q, S]
    if args.softcap is not None:
        scores = softcap(scores, args.softcap)
    scores = scores.masked_fill_(~task.visible[:, None, None], float("-inf"))
    mixed = _mix(_softmax(scores, args.sinks).flatten(2, 3), _gather(cache.values, cache.value_scales, lines), task)
    return mixed.view_as(grouped).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, dim)


def _head_blocks(task: AttentionTask, kv_heads: int) -> torch.Tensor:
    """Where each head of each block lies when the cache is seen as lines [num_blocks * kv_heads]: [B, kv_heads, N]"""
    heads = torch.arange(kv_heads, device=task.blocks.device).view(1, -1, 1)
    return task.blocks.view(task.num_rows, 1, -1) * kv_heads + heads


def _gather(cache: torch.Tensor, scales: torch.Tensor | None, lines: torch.Tensor) -> torch.Tensor:
    """A float32 copy of the task's blocks, [B, kv_heads, N * block_size, D]."""
    found = torch.index_select(cache.view(-1, cache.shape[2] * cache.shape[3]), 0, lines.flatten())
    vectors = found.float().view(*lines.shape[:2], -1, cache.shape[3])
    if scales is None:
        return vectors
    return vectors * scales.view(-1, cache.shape[2])[lines.flatten()].view(*vectors.shape[:3], 1)


def _mix(weights: torch.Tensor, values: torch.Tensor, task: AttentionTask) -> torch.Tensor:
    """[B, kv_heads, G * Q, S] @ [B, kv_heads, S, D]"""
    mixed = weights @ values
    if bool(mixed.isfinite().all()):
        return mixed
    unseen = ~task.visible.any(1)  # [B, S]
    return weights @ values.masked_fill(unseen.view(len(unseen), 1, -1, 1), 0.0)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the keys; a sink is one more logit per head that takes its share and brings no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().view(1, scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:4], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
