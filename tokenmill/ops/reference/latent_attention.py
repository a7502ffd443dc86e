"""Multi-head latent attention (MLA) in plain torch, always in its absorbed form.

The cache has one entry per token: its normed latent vector and a rotated key, shared by all heads. A head's key is a
projection of the latent; instead of projecting every key, the query is multiplied by the transposed matrix:

    q · (W_k c) = (W_k' q) · c          Σ p W_v c = W_v (Σ p c)

So all heads attend to the entries directly, as if there were one KV head whose values are the latents. As this is the
only form, a query's result does not depend on how its prompt is chunked.

Sparse attention masks the entries that an indexer did not choose.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.ops.interface import IndexInputs, LatentInputs
from tokenmill.ops.reference.attention import AttentionPlan, AttentionTask, mix_values
from tokenmill.ops.reference.elementwise import layer_norm, rms_norm, rotate
from tokenmill.ops.reference.linear import multiply


def latent_attend(inputs: LatentInputs) -> torch.Tensor:
    """→ [T, heads * value_dim]"""
    _, rank, nope = inputs.absorb.shape
    queries = inputs.queries.reshape(len(inputs.queries), len(inputs.absorb), -1)
    unrotated, rotary = queries[..., :nope], queries[..., nope:]
    latent, key = rms_norm(inputs.entries[:, :rank], *inputs.norm[:2]), inputs.entries[:, rank:].unsqueeze(1)
    if inputs.cos_sin is not None:
        rotary, key = rotate(rotary, *inputs.cos_sin), rotate(key, *inputs.cos_sin)
    kept = inputs.latents.view(-1, inputs.latents.shape[-1])
    kept[inputs.slots] = torch.cat((latent, key[:, 0]), dim=-1).to(kept.dtype)
    absorbed = torch.cat((per_head(unrotated, inputs.absorb), rotary), dim=-1)
    plan = inputs.plan
    if inputs.choice is not None:
        plan = [replace(task, visible=chosen) for task, chosen in zip(plan, inputs.choice, strict=True)]
    mixed = attend_entries(absorbed, inputs.latents, plan, inputs.scale, rank)
    return per_head(mixed, inputs.expand).flatten(1)


def choose_entries(inputs: IndexInputs) -> list[torch.Tensor]:
    """Return which entries the queries of each task attend to, bool [B, Q, N * block_size].

    The result also fits the plans of other cache groups with the same window: their tasks differ in the blocks only.
    """
    indexer, kept = inputs.indexer, inputs.kept
    queries = inputs.queries.view(len(inputs.queries), indexer.num_heads, indexer.head_dim)
    keys = layer_norm(inputs.keys, inputs.norm.weight, inputs.norm.bias, inputs.norm.eps).unsqueeze(1)
    if inputs.cos_sin is not None:
        queries, keys = rotate(queries, *inputs.cos_sin), rotate(keys, *inputs.cos_sin)
    kept.view(-1, indexer.head_dim)[inputs.slots] = keys[:, 0].to(kept.dtype)
    weights = inputs.weights.float() * indexer.scale
    return [_chosen(queries[task.tokens], weights[task.tokens], kept, task, indexer.top_k) for task in inputs.plan]


def _chosen(
    queries: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, task: AttentionTask, top_k: int
) -> torch.Tensor:
    """queries [B * Q, heads, D], weights [B * Q, heads] → [B, Q, N * block_size]"""
    if task.visible.shape[-1] <= top_k:
        return task.visible
    rows, (_, heads, dim) = task.num_rows, queries.shape
    keys = kept[task.blocks].float().view(rows, -1, dim)
    products = queries.float().view(rows, -1, dim) @ keys.transpose(1, 2)
    scores = products.relu_().view(rows, -1, heads, keys.shape[1])  # [B, Q, heads, S]
    totals = (weights.view(rows, -1, 1, heads) @ scores).squeeze(2).masked_fill_(~task.visible, float("-inf"))
    best = totals.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(task.visible).scatter_(-1, best, True) & task.visible


def per_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, heads, columns] by each head's matrix, [heads, rows, columns] → [T, heads, rows]."""
    return torch.stack([multiply(x[:, head], matrix) for head, matrix in enumerate(matrices)], dim=1)


def attend_entries(
    queries: torch.Tensor, latents: torch.Tensor, plan: AttentionPlan, scale: float, rank: int
) -> torch.Tensor:
    """queries [T, heads, rank + rope] over entries of that width, whose first `rank` values are the values → [T, heads,
    rank]"""
    out = queries.new_empty(*queries.shape[:2], rank)
    for task in plan:
        out[task.tokens] = _attend(queries[task.tokens].float(), latents, task, scale, rank).to(out.dtype)
    return out


def _attend(queries: torch.Tensor, latents: torch.Tensor, task: AttentionTask, scale: float, rank: int) -> torch.Tensor:
    """queries [B * Q, heads, W] → [B * Q, heads, rank]"""
    rows, (_, heads, width) = task.num_rows, queries.shape
    entries = latents[task.blocks].float().view(rows, 1, -1, width)
    grouped = queries.view(rows, 1, -1, heads, width).transpose(2, 3)  # [B, 1, heads, Q, W]
    scores = (grouped.flatten(2, 3) @ entries.transpose(2, 3)) * scale
    scores = scores.view(*grouped.shape[:4], -1).masked_fill_(~task.visible[:, None, None], float("-inf"))
    mixed = mix_values(torch.softmax(scores, dim=-1).flatten(2, 3), entries[..., :rank], task)
    return mixed.view(rows, heads, -1, rank).transpose(1, 2).reshape(-1, heads, rank)
