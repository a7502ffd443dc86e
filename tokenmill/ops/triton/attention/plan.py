"""The plan of a step's attention, made once for all layers of a cache group.

The rows of a step are ordered by kind, and each kind has its own kernel (`attention/select.py`):

    [ one query each: decode | chunks of prompts: prefill | whole long prompts: dense ]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.triton.attention.select import TILE, is_whole_prompt
from tokenmill.ops.triton.launch.capabilities import Capabilities, capabilities_of
from tokenmill.ops.triton.launch.pdl import overlaps, settle


@dataclass(frozen=True)
class AttentionPlan:
    tables: torch.Tensor  # int32 [R, max_blocks]
    query_starts: torch.Tensor  # int32 [R + 1]
    contexts: torch.Tensor  # int32 [R]
    num_single: int  # rows [0, num_single) have one query each
    prompts: tuple[int, ...]  # lengths of the last rows, which are whole long prompts
    max_queries: int
    max_context: int  # the most keys that a query sees
    max_position: int  # the longest context, regardless of windows

    def settle(self) -> None:
        """Let later kernels read contexts and tables before they wait for the previous kernel."""
        _ = self._is_settled

    @cached_property
    def _is_settled(self) -> bool:
        if self.contexts.is_cuda and overlaps():
            settle(self.contexts)
        return True


def plan_attention(batch: ForwardBatch, group: int, window: int | None, *, is_chunked: bool = False) -> AttentionPlan:
    num_rows = batch.context_lens.shape[0]
    visible = batch.max_context_len if window is None else min(batch.max_context_len, window + TILE)
    return AttentionPlan(
        tables=batch.groups[group].block_tables,
        query_starts=batch.query_starts,
        contexts=batch.context_lens,
        num_single=num_rows if batch.max_query_len == 1 else batch.num_single,
        prompts=_trailing_prompts(batch.lengths or (), capabilities_of(batch.context_lens.device)),
        max_queries=batch.max_query_len,
        max_context=visible,
        max_position=batch.max_context_len,
    )


def _trailing_prompts(lengths: tuple[tuple[int, int], ...], gpu: Capabilities) -> tuple[int, ...]:
    found: list[int] = []
    for queries, context in reversed(lengths):
        if not is_whole_prompt(queries, context, gpu):
            break
        found.insert(0, queries)
    return tuple(found)
