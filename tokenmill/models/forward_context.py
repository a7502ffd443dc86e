"""What all layers of one forward pass share: planned once a step, read by every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.arch.spec import RopeSpec
from tokenmill.kv.storage import KVStorage
from tokenmill.models.rope import RopeTable
from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.interface import Ops


@dataclass(frozen=True)
class ForwardContext:
    batch: ForwardBatch
    storage: KVStorage
    angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]  # cos and sin of this step's tokens
    attention_plans: tuple[Any, ...]  # one per KV group


def plan_forward(
    ops: Ops, tables: dict[RopeSpec, RopeTable], batch: ForwardBatch, storage: KVStorage
) -> ForwardContext:
    angles = {rope: table.at(batch.positions, ops) for rope, table in tables.items()}
    windows: Iterable[int | None] = storage.layout.windows
    plans = tuple(ops.plan_attention(batch, group, window) for group, window in enumerate(windows))
    return ForwardContext(batch, storage, angles, plans)
