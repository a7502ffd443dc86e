"""What a forward pass is told about its batch. An argument, never a global.

T tokens of R rows lie one after another: row r owns tokens [query_starts[r], query_starts[r+1]). A row's context is
all its tokens in the KV cache once this step's keys are written; its queries are the last ones of that context.

    context of row r:   [0 ............ context - query | ...query tokens of this step... ] = context_lens[r]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GroupTables:
    """Where the layers of one KV group find their blocks. Entries outside a window may point to block 0."""

    block_tables: torch.Tensor  # int32 [R, max_blocks]
    slots: torch.Tensor  # int64 [T]: block * block_size + offset, where each token's k and v go


@dataclass(frozen=True)
class ForwardBatch:
    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    query_starts: torch.Tensor  # int32 [R + 1]
    context_lens: torch.Tensor  # int32 [R]
    groups: tuple[GroupTables, ...]
    logit_rows: torch.Tensor  # int64 [L]: which of the T tokens go through the head
    block_size: int
    max_query_len: int
    max_context_len: int
    num_single: int = 0  # rows [0, num_single) have one query each; the others may
    lengths: tuple[tuple[int, int], ...] | None = None  # (queries, context) of each row, where the host knows them


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: [num_blocks, num_kv_heads, block_size, head_dim] each.

    In one byte a number they have scales, float32 [num_blocks, num_kv_heads, block_size]: a key is keys * scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
