"""Latent attention (MLA) in plain torch, always in its absorbed form.

A token leaves one entry in the cache: its latent vector, normed, and a key that is rotated, shared by all heads. A
head's key is its own projection of the latent; instead of projecting every key, its query is projected the other way:

    q · (W_k c) = (W_k' q) · c          Σ p W_v c = W_v (Σ p c)

So all heads attend to the entries themselves, as if they were one key head, and the latent is the value. A query's
result then never depends on whether its prompt came whole or in chunks: there is only one way to compute it.
"""

from __future__ import annotations

import torch

from tokenmill.ops.interface import LatentInputs
from tokenmill.ops.reference.attention import AttentionPlan, AttentionTask, mix_values
from tokenmill.ops.reference.elementwise import rms_norm, rotate
from tokenmill.ops.reference.linear import multiply


def latent_attend(inputs: LatentInputs) -> torch.Tensor:
    """→ [T, heads * value_dim]"""
    _, rank, nope = inputs.absorb.shape
    queries = inputs.queries.reshape(len(inputs.queries), len(inputs.absorb), -1)
    plain, turned = queries[..., :nope], queries[..., nope:]
    latent, key = rms_norm(inputs.entries[:, :rank], *inputs.norm[:2]), inputs.entries[:, rank:].unsqueeze(1)
    if inputs.cos_sin is not None:
        turned, key = rotate(turned, *inputs.cos_sin), rotate(key, *inputs.cos_sin)
    kept = inputs.latents.view(-1, inputs.latents.shape[-1])
    kept[inputs.slots] = torch.cat((latent, key[:, 0]), dim=-1).to(kept.dtype)
    absorbed = torch.cat((per_head(plain, inputs.absorb), turned), dim=-1)
    mixed = attend_entries(absorbed, inputs.latents, inputs.plan, inputs.scale, rank)
    return per_head(mixed, inputs.expand).flatten(1)


def per_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x [T, heads, columns] times each head's own matrix, [heads, rows, columns] → [T, heads, rows]"""
    return torch.stack([multiply(x[:, head], matrix) for head, matrix in enumerate(matrices)], dim=1)


def attend_entries(
    queries: torch.Tensor, latents: torch.Tensor, plan: AttentionPlan, scale: float, rank: int
) -> torch.Tensor:
    """queries [T, heads, rank + rope] over entries of that width; the first `rank` values of each are what is mixed →
    [T, heads, rank]"""
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
