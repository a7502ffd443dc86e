"""The state that all layers of one forward pass share: planned once per step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tokenmill.arch.spec import Gqa, ModelSpec, QueryGrowth, RopeSpec
from tokenmill.kv.layout import UNREAD_FIELD, CacheGroup
from tokenmill.kv.storage import KVStorage
from tokenmill.models.rope import RopeTable, make_rope_table, query_growth
from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.compose import BatchClasses
from tokenmill.ops.interface import BatchClass, Ops, Regions


@dataclass(frozen=True)
class PositionTables:
    """Tables that depend only on positions, computed once when the model is loaded."""

    ropes: dict[RopeSpec, RopeTable]
    growths: tuple[QueryGrowth, ...]
    chunked: frozenset[int]  # layers with chunked attention: the window starts at multiples of its size

    @classmethod
    def of(cls, spec: ModelSpec, max_context: int, device: torch.device) -> PositionTables:
        chunked = frozenset(
            number
            for number, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, Gqa) and layer.mixer.is_chunked
        )
        return cls({rope: make_rope_table(rope, max_context, device) for rope in spec.ropes}, spec.growths, chunked)


@dataclass(frozen=True)
class AdaptedStep:
    """The adapter plan and the regions of a step in which some tokens use adapters."""

    plan: Any  # see `LowRankOps.plan`
    regions: Regions
    gathered_regions: Regions  # after the last layer's mixer, where only `batch.logit_rows` continue


@dataclass(frozen=True)
class ForwardContext:
    batch: ForwardBatch
    storage: KVStorage
    cos_sin: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]  # of this step's positions
    ropes: dict[RopeSpec, RopeTable]  # of all positions
    growths: dict[QueryGrowth, torch.Tensor]  # float32 [T], factors of the queries
    mixer_plans: tuple[Any, ...]  # one per cache group, in the form that its mixer reads
    batch_class: BatchClass  # of layers that compute all tokens
    gathering: tuple[BatchClass, BatchClass]  # of the last layer: before its mixer, and after it (`batch.logit_rows`)
    adapted: AdaptedStep | None = None
    layer_inputs: torch.Tensor | None = None  # [T, layers, width], for models with per-layer embeddings
    choices: dict[int | None, Any] = field(default_factory=dict)  # entries that indexers chose in this step, by layer

    @property
    def adapters(self) -> Any:
        """The adapter plan of all tokens; None if no token uses an adapter."""
        return None if self.adapted is None else self.adapted.plan

    def layer_inputs_of(self, layer: int, rows: torch.Tensor | None) -> torch.Tensor:
        """Return one layer's embeddings of all tokens, or of some `rows`: [T, width]."""
        assert self.layer_inputs is not None
        inputs = self.layer_inputs[:, layer]
        return inputs if rows is None else inputs[rows]


def plan_forward(
    ops: Ops, positions: PositionTables, classes: BatchClasses, batch: ForwardBatch, storage: KVStorage
) -> ForwardContext:
    num_tokens, num_outputs, mode = len(batch.token_ids), len(batch.logit_rows), batch.mode
    return ForwardContext(
        batch,
        storage,
        cos_sin={rope: table.at(batch.positions, ops) for rope, table in positions.ropes.items()},
        ropes=positions.ropes,
        growths={growth: query_growth(growth, batch.positions) for growth in positions.growths},
        mixer_plans=tuple(
            _plan(ops, batch, number, storage.layout.groups, positions.chunked)
            for number in range(len(storage.layout.groups))
        ),
        batch_class=classes.of(num_tokens, mode),
        gathering=(classes.of(num_tokens, mode, gathers=True), classes.of(num_outputs, mode, gathers=True)),
        adapted=None if batch.adapters is None else _adapted(ops, batch, batch.adapters),
    )


def _adapted(ops: Ops, batch: ForwardBatch, slots: torch.Tensor) -> AdaptedStep:
    plan = ops.low_rank.plan(slots)
    regions = ops.adapted_regions(ops, batch.mode, plan)
    if len(batch.logit_rows) == len(slots):
        return AdaptedStep(plan, regions, regions)
    gathered = ops.low_rank.plan(slots[batch.logit_rows])
    return AdaptedStep(plan, regions, ops.adapted_regions(ops, batch.mode, gathered))


def _plan(ops: Ops, batch: ForwardBatch, number: int, groups: tuple[CacheGroup, ...], chunked: frozenset[int]) -> Any:
    """Make the plan that the mixers of one cache group read; recurrent mixers use the plan of the "state" group."""
    group = groups[number]
    if group.kind == "cells" or group.keeps(UNREAD_FIELD):
        return None
    if group.kind == "state":
        return ops.plan_recurrent(batch, next(at for at, one in enumerate(groups) if one.kind == "cells"), number)
    if group.keeps("inputs"):
        assert group.window is not None, "a convolution has a window"
        return ops.plan_short_conv(batch, number, group.window)
    return ops.plan_attention(batch, number, group.window, is_chunked=any(one in chunked for one in group.layers[:1]))
