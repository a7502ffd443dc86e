"""Inputs and weights of attention over a window and compressed entries (`arch/compressed.py`), for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.arch.spec import WindowedMqa
from tokenmill.ops.batch import ForwardBatch, GroupTables


@dataclass(frozen=True)
class EntryWeights:
    """The weights that compress several tokens into one entry, float32."""

    bias: torch.Tensor  # [rate, series * dim], added to the gates
    norm: torch.Tensor  # [dim]


@dataclass(frozen=True)
class WindowedWeights:
    """The mixer's own weights, float32; the input and output projections belong to the layer."""

    kv_norm: torch.Tensor  # [head_dim]
    sinks: torch.Tensor  # [heads]
    entries: EntryWeights | None
    index_entries: EntryWeights | None


class CachedField(NamedTuple):
    """A field of the cache, [blocks, block_size, values per token], and the block tables that address it."""

    values: torch.Tensor
    tables: GroupTables


class WindowedInputs(NamedTuple):
    batch: ForwardBatch
    queries: torch.Tensor  # [T, heads * head_dim]
    keys: torch.Tensor  # [T, head_dim], neither normed nor rotated yet
    cos_sin: torch.Tensor  # float32 [2, max_context, rotary / 2]: of all positions
    window: CachedField
    entry_inputs: torch.Tensor | None  # [T, values and gates]
    entry_fields: tuple[CachedField, CachedField] | None  # inputs, and entries made of them
    index_inputs: torch.Tensor | None
    index_fields: tuple[CachedField, CachedField] | None
    index_queries: torch.Tensor | None  # [T, index heads * dim]
    index_weights: torch.Tensor | None  # [T, index heads]
    weights: WindowedWeights
    spec: WindowedMqa
