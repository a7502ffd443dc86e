"""What all layers of one forward pass share: planned once a step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.arch.spec import RopeSpec
from tokenmill.kv.layout import CacheGroup
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
    mixer_plans: tuple[Any, ...]  # one per cache group, as its layers' mixer reads it
    batch_class: BatchClass  # of layers that compute all tokens
    gathering: tuple[BatchClass, BatchClass]  # of one that goes on with `batch.logit_rows`: before and behind its mixer


def plan_forward(
    ops: Ops, ropes: dict[RopeSpec, RopeTable], classes: BatchClasses, batch: ForwardBatch, storage: KVStorage
) -> ForwardContext:
    num_tokens, num_outputs, mode = len(batch.token_ids), len(batch.logit_rows), batch.mode
    return ForwardContext(
        batch,
        storage,
        cos_sin={rope: table.at(batch.positions, ops) for rope, table in ropes.items()},
        mixer_plans=tuple(_plan(ops, batch, number, group) for number, group in enumerate(storage.layout.groups)),
        batch_class=classes.of(num_tokens, mode),
        gathering=(classes.of(num_tokens, mode, gathers=True), classes.of(num_outputs, mode, gathers=True)),
    )


def _plan(ops: Ops, batch: ForwardBatch, number: int, group: CacheGroup) -> Any:
    """What the mixers of a cache group read, worked out once a step."""
    if group.keeps("inputs"):
        assert group.window is not None, "a convolution has a window"
        return ops.plan_short_conv(batch, number, group.window)
    return ops.plan_attention(batch, number, group.window)
