"""The description of a forward pass's batch: an argument, never a global.

T tokens of R rows lie one after another: row r owns tokens [query_starts[r], query_starts[r+1]). A row's context is
all its tokens in the KV cache once this step's keys are written; its queries are the last ones of that context.

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
"""Whether a step's kernels are launched one by one, or recorded into a graph that is replayed. A kernel whose launch
costs the host much is worth it only where it is launched once and replayed often."""


@dataclass(frozen=True)
class GroupTables:
    """The block tables of one cache group. Entries outside a window may point to block 0."""

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
    mode: Mode = "eager"  # "captured" also where kernels of a graph are compiled or tried out
    adapters: torch.Tensor | None = None  # int32 [T]: the slot of each token's adapter, 0 for none; None: all have none
    owners: torch.Tensor | None = None  # int32 [R]: the ranks that keep the rows' contexts; None: each keeps all


class DrawingRows(NamedTuple):
    """The rows of a step as lists, for models that lay out their inputs themselves. One entry a row."""

    rows: list[int]  # their numbers: where their block tables lie
    starts: list[int]  # positions of their first tokens
    token_ids: list[list[int]]
    num_wanted: list[int]  # how many of their last tokens go through the head
    tables: NDArray[np.int32]  # of all rows there are: [groups, max_rows, max_blocks]
    block_size: int
    adapters: Sequence[int] = ()  # the slot of each row's adapter, 0 for none; empty: all have none
    owners: Sequence[int] = ()  # the rank that keeps each row's context; empty: each keeps all


class DrawParams(NamedTuple):
    """Sampling parameters, one entry a row of logits."""

    temperatures: list[float]  # 0: the logits stay as they are
    top_ks: list[int]  # 0: all
    top_ps: list[float]
    min_ps: list[float]
    uniforms: list[float]  # in [0, 1): which token of what is left
    takes_best: list[bool]  # the highest logit, whatever else is said


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: [num_blocks, num_kv_heads, block_size, head_dim] each.

    In one byte a number they have scales, float32 [num_blocks, num_kv_heads, block_size]: a key is keys * scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
