"""The batch of a forward pass, passed as an argument and never as a global.

The T tokens of R rows are concatenated: row r has tokens [query_starts[r], query_starts[r+1]). A row's context is all
its tokens in the KV cache including those of this step; its queries are the last ones of that context.

    context of row r:   [0 ............ context - query | ...query tokens of this step... ] = context_lens[r]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Mode = Literal["eager", "captured"]
"""Whether a step's kernels are launched one by one, or captured into a CUDA graph that is replayed. A kernel that is
expensive to launch pays only in a graph, where it is launched once and replayed often."""


@dataclass(frozen=True)
class GroupTables:
    """The block tables of one cache group. Entries outside a window may point to block 0."""

    block_tables: torch.Tensor  # int32 [R, max_blocks]
    slots: torch.Tensor  # int64 [T]: block * block_size + offset, where each token's k and v are written


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
    num_single: int = 0  # rows [0, num_single) have one query each; later rows may have more
    lengths: tuple[tuple[int, int], ...] | None = None  # (queries, context) of each row, if known to the host
    mode: Mode = "eager"  # also "captured" while a graph's kernels are compiled or tuned
    adapters: torch.Tensor | None = None  # int32 [T]: each token's adapter slot, 0 for none; None: no token has one
    owners: torch.Tensor | None = None  # int32 [R]: the rank that caches each row's context; None: all ranks do


class StepRows(NamedTuple):
    """The rows of a step as plain lists, for models that build their inputs themselves. One entry per row."""

    rows: list[int]  # row numbers, which index `tables`
    starts: list[int]  # positions of the first tokens
    token_ids: list[list[int]]
    num_outputs: list[int]  # how many of a row's last tokens go through the head
    tables: NDArray[np.int32]  # block tables of all permanent rows: [groups, max_rows, max_blocks]
    block_size: int
    adapters: Sequence[int] = ()  # each row's adapter slot, 0 for none; empty: no row has one
    owners: Sequence[int] = ()  # the rank that caches each row's context; empty: all ranks do


class DrawParams(NamedTuple):
    """Sampling parameters, one entry per row of logits."""

    temperatures: list[float]  # 0: the logits are not scaled
    top_ks: list[int]  # 0: no limit
    top_ps: list[float]
    min_ps: list[float]
    uniforms: list[float]  # random numbers in [0, 1), by which tokens are sampled
    is_greedy: list[bool]  # take the highest logit; the other parameters are ignored


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: [num_blocks, num_kv_heads, block_size, head_dim] each.

    A one-byte cache has scales, float32 [num_blocks, num_kv_heads, block_size]: a key is keys * scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
