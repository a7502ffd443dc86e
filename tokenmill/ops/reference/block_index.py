"""The choice of blocks by an indexer, in plain torch (MiniMax-M3, see `arch/indexer.py`).

Attention gets a plan whose tasks mask the keys of blocks that were not chosen, for each key and value head. A query's
choice depends on its own context only: scores are computed in float32, and of equal blocks the earliest is chosen.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from tokenmill.arch.indexer import BlockIndexer
from tokenmill.ops.interface import BlockIndexInputs
from tokenmill.ops.reference.attention import AttentionPlan, AttentionTask
from tokenmill.ops.reference.elementwise import rms_norm, rotate


def choose_blocks(inputs: BlockIndexInputs, plan: AttentionPlan) -> AttentionPlan:
    """Return the plan of attention with `visible` per key and value head."""
    indexer, kept = inputs.indexer, inputs.kept
    queries = inputs.queries.reshape(len(inputs.queries), indexer.num_heads, indexer.head_dim)
    queries = rms_norm(queries, inputs.norms[0], inputs.eps)
    keys = rms_norm(inputs.keys, inputs.norms[1], inputs.eps).unsqueeze(1)
    if inputs.cos_sin is not None:
        queries, keys = rotate(queries, *inputs.cos_sin), rotate(keys, *inputs.cos_sin)
    kept.view(-1, indexer.head_dim)[inputs.slots] = keys[:, 0].to(kept.dtype)
    chosen = (_visible(queries[task.tokens].float(), kept, task, indexer) for task in inputs.plan)
    return [replace(task, visible=visible) for task, visible in zip(plan, chosen, strict=True)]


def _visible(queries: torch.Tensor, kept: torch.Tensor, task: AttentionTask, indexer: BlockIndexer) -> torch.Tensor:
    """queries [B * Q, heads, D] → bool [B, heads, Q, N * block_size]"""
    rows, (_, heads, dim) = task.num_rows, queries.shape
    keys = kept[task.blocks].float().view(rows, 1, -1, dim)
    scores = queries.view(rows, -1, heads, dim).transpose(1, 2) @ keys.transpose(2, 3)  # [B, heads, Q, S]
    scores = scores.masked_fill_(~task.visible.unsqueeze(1), float("-inf"))
    size, count = indexer.block_size, scores.shape[-1]
    scores = functional.pad(scores, (0, -count % size), value=float("-inf"))
    blocks = scores.view(*scores.shape[:3], -1, size).amax(-1)  # [B, heads, Q, blocks of the indexer]
    own = (task.visible.sum(-1) - 1) // size  # [B, Q]: a query sees all tokens up to its own
    local = (own.unsqueeze(-1) - torch.arange(indexer.num_local, device=own.device)).clamp_(min=0)
    local = local.unsqueeze(1).expand(-1, heads, -1, -1)
    blocks = blocks.scatter(-1, local, float("inf")) if indexer.num_local else blocks
    best = blocks.sort(dim=-1, descending=True, stable=True).indices[..., : indexer.top_k]
    chosen = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, best, True)
    return chosen.repeat_interleave(size, dim=-1)[..., :count] & task.visible.unsqueeze(1)
