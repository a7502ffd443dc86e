"""Attention of a whole step: each kind of rows is computed by its own kernel."""

from __future__ import annotations

from itertools import groupby

import torch

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.decode import decode_attention
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.prefill import dense_prefill_attention, prefill_attention
from tokenmill.ops.triton.attention.select import can_be_dense, num_chunk_splits, num_splits_for
from tokenmill.ops.triton.attention.split_prefill import room_for_parts, split_prefill_attention
from tokenmill.ops.triton.launch.capabilities import capabilities_of

SPLITS_BESIDE = (8, 2, 1)  # of decoding rows' contexts beside chunks: few numbers, each a variant to compile. With one
# split, 32 rows of 2,304 tokens keep a chunk behind them waiting for 0.7 ms a step of an 8B model (H200)
SHORT_CHUNK = 1024  # tokens


def attention(queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, args: AttentionArgs) -> torch.Tensor:
    """queries [T, heads, D] → [T, heads * D]"""
    queries = queries.contiguous()
    single, num_rows = plan.num_single, plan.contexts.shape[0]
    has_extras = args.window is not None or args.softcap is not None or args.sinks is not None
    prompts = plan.prompts if can_be_dense(queries.dtype, queries.shape[2], has_extras=has_extras) else ()
    if len(prompts) == num_rows and len(set(prompts)) == 1:  # the dense result is the whole result
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
    heads, kv_heads, gpu = queries.shape[1], cache.keys.shape[1], capabilities_of(queries.device)
    chunks = range(single, num_rows - len(prompts))
    chunk_splits = num_chunk_splits(end - single, heads, kv_heads, plan.max_context, gpu) if chunks else 1
    room = room_for_parts(queries, end - single, chunk_splits) if chunk_splits > 1 else None
    if single:
        splits = num_splits_for(single, kv_heads, plan.max_context, gpu)
        if single < num_rows:
            splits = next(number for number in SPLITS_BESIDE if number <= splits)
        single_args = (queries[:single], cache, plan.tables, plan.contexts, args, out[:single], splits)
        decode_attention(*single_args, lets_begin=room is not None)
    chunk_args = (queries, cache, plan.tables, plan.query_starts, plan.contexts, chunks, end - single, args, out)
    if room is not None:
        split_prefill_attention(*chunk_args, chunk_splits, room=room, is_beside=single > 0)
    elif chunks:
        prefill_attention(*chunk_args, are_short=plan.max_queries <= SHORT_CHUNK)
    return out.flatten(1)
