"""Attention of a whole step, by kinds of rows, in this order:

[ one query each: decoding kernel | chunks: chunk kernel | whole long prompts: dense attention ]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch

from tokenmill.ops.batch import ForwardBatch, LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.decode import decode_attention
from tokenmill.ops.triton.attention.dense_prefill import dense_prefill_attention
from tokenmill.ops.triton.attention.prefill import prefill_attention
from tokenmill.ops.triton.attention.select import TILE, can_be_dense, is_whole_prompt, num_splits_for
from tokenmill.ops.triton.launch.capabilities import Capabilities, capabilities_of

SPLITS_BESIDE = 8  # of few rows' contexts beside chunks, or none: fewer kernels to compile


@dataclass(frozen=True)
class AttentionPlan:
    tables: torch.Tensor  # int32 [R, max_blocks]
    query_starts: torch.Tensor  # int32 [R + 1]
    contexts: torch.Tensor  # int32 [R]
    num_single: int  # the first so many rows have one query each
    prompts: tuple[int, ...]  # lengths of the last rows, which are whole long prompts
    max_queries: int
    max_context: int  # as far as a query looks back
    max_position: int  # behind every key of the step


def plan_attention(batch: ForwardBatch, group: int, window: int | None) -> AttentionPlan:
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


def attention(queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, args: AttentionArgs) -> torch.Tensor:
    """queries [T, heads, D] → [T, heads * D]"""
    queries = queries.contiguous()
    single, num_rows = plan.num_single, plan.contexts.shape[0]
    has_extras = args.window is not None or args.softcap is not None or args.sinks is not None
    prompts = plan.prompts if can_be_dense(queries.dtype, queries.shape[2], has_extras=has_extras) else ()
    if len(prompts) == num_rows and len(set(prompts)) == 1:  # nothing to put together
        return (
            dense_prefill_attention(queries.unflatten(0, (num_rows, -1)), cache, plan.tables, args)
            .flatten(0, 1)
            .flatten(1)
        )
    out = torch.empty_like(queries)
    end = queries.shape[0]
    last_row = num_rows
    for length, alike in groupby(reversed(prompts)):
        count = len(list(alike))
        tokens, rows = slice(end - count * length, end), slice(last_row - count, last_row)
        shape = (count, length, *queries.shape[1:])
        out[tokens].view(shape).copy_(
            dense_prefill_attention(queries[tokens].view(shape), cache, plan.tables[rows], args)
        )
        end, last_row = tokens.start, rows.start
    if single:
        splits = num_splits_for(single, cache.keys.shape[1], plan.max_context, capabilities_of(queries.device))
        if single < num_rows:
            splits = SPLITS_BESIDE if splits >= SPLITS_BESIDE else 1
        decode_attention(queries[:single], cache, plan.tables, plan.contexts, args, out[:single], splits)
    chunks = range(single, num_rows - len(prompts))
    if chunks:
        prefill_attention(
            queries, cache, plan.tables, plan.query_starts, plan.contexts, chunks, end - single, args, out,
            are_short=plan.max_queries <= 1024,
        )  # fmt: skip
    return out.flatten(1)
