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
from tokenmill.ops.compose import BatchClasses
from tokenmill.ops.interface import BatchClass, Ops


@dataclass(frozen=True)
class ForwardContext:
    batch: ForwardBatch
    storage: KVStorage
    cos_sin: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]  # of this step's positions
    attention_plans: tuple[Any, ...]  # one per KV group
    batch_class: BatchClass  # of layers that compute all tokens
    gathering: tuple[BatchClass, BatchClass]  # of one that goes on with `batch.logit_rows`: before and behind its mixer


def plan_forward(
    ops: Ops, ropes: dict[RopeSpec, RopeTable], classes: BatchClasses, batch: ForwardBatch, storage: KVStorage
) -> ForwardContext:
    windows: Iterable[int | None] = storage.layout.windows
    num_tokens, num_outputs, mode = len(batch.token_ids), len(batch.logit_rows), batch.mode
    return ForwardContext(
        batch,
        storage,
        cos_sin={rope: table.at(batch.positions, ops) for rope, table in ropes.items()},
        attention_plans=tuple(ops.plan_attention(batch, group, window) for group, window in enumerate(windows)),
        batch_class=classes.of(num_tokens, mode),
        gathering=(classes.of(num_tokens, mode, gathers=True), classes.of(num_outputs, mode, gathers=True)),
    )
