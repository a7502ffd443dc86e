"""What attention over a window and compressed entries (`arch/compressed.py`) is computed from, the same for every
backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.arch.spec import WindowedMqa
from tokenmill.ops.batch import ForwardBatch, GroupTables


@dataclass(frozen=True)
class EntryWeights:
    """The weights that make compressed entries of tokens, float32"""

    bias: torch.Tensor  # [rate, series * dim], added to gates
    norm: torch.Tensor  # [dim]


@dataclass(frozen=True)
class WindowedWeights:
    """Weights of a mixer's own, float32; the matrices in front of it and behind it belong to the layer."""

    kv_norm: torch.Tensor  # [head_dim]
    sinks: torch.Tensor  # [heads]
    entries: EntryWeights | None
    index_entries: EntryWeights | None


class KeptField(NamedTuple):
    """A field of the cache, [rows, block_size, numbers of a token], and where tokens have theirs"""

    values: torch.Tensor
    tables: GroupTables


class WindowedInputs(NamedTuple):
    batch: ForwardBatch
    queries: torch.Tensor  # [T, heads * head_dim]
    keys: torch.Tensor  # [T, head_dim], neither normed nor rotated yet
    cos_sin: torch.Tensor  # float32 [2, max_context, rotary / 2]: of all positions
    window: KeptField
    entry_inputs: torch.Tensor | None  # [T, values and gates]
    entry_fields: tuple[KeptField, KeptField] | None  # inputs, and entries made of them
    index_inputs: torch.Tensor | None
    index_fields: tuple[KeptField, KeptField] | None
    index_queries: torch.Tensor | None  # [T, index heads * dim]
    index_weights: torch.Tensor | None  # [T, index heads]
    weights: WindowedWeights
    spec: WindowedMqa
