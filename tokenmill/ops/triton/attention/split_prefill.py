"""Attention of short chunks over long contexts: what a prompt computes beside running answers.

A chunk of some dozen tokens has too few tiles of queries to fill a GPU, and each would walk through the whole context
alone. So, as for single queries (`decode.py`), the heads that share a KV head are in one tile, and the context is cut
into splits that run side by side; the last to end merges them:

    tile of queries     token 0: heads 0 1 2 3 | token 1: heads 0 1 2 3 | ...       all of one KV head
    keys of the tile    [ split 0 | split 1 | ... | the diagonal is in the last one, or the last two ]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.kv_cache import cache_tensors
from tokenmill.ops.triton.attention.prefill import PrefillConfig, attend_range, pick_prefill_config
from tokenmill.ops.triton.attention.softmax import (
    attention_output,
    empty_state,
    merge_states,
    oldest_seen,
    window_of,
)
from tokenmill.ops.triton.attention.tiles import row_of_tile
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import is_last_to_arrive, split_counters


@triton.jit
def _store_tile(state, out, sinks, q_rows, heads, q_inside, is_query, offs_d, HAS_SINKS: tl.constexpr):
    sink = heads
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_query, other=0.0)
    result = attention_output(state, sink, HAS_SINKS)
    tl.store(out + q_rows[:, None] + offs_d[None, :], result.to(out.dtype.element_ty), mask=q_inside)


@kernel_unspecialized("first_row", "num_rows", "table_stride", "num_splits")
def _split_prefill(
    queries, keys, values, key_scales, value_scales, out, parts, lse, counters, tables, query_starts, contexts, sinks,
    scale, softcap, window, table_stride, first_row, num_rows, num_splits,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_PLAIN: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, begin, length, offset = row_of_tile(query_starts, tile, first_row, num_rows, TOKENS)
    if offset < length:
        context = tl.load(contexts + row)
        earliest = context - length + offset
        last = tl.minimum(earliest + TOKENS, context)
        first = 0
        if HAS_WINDOW:
            first = oldest_seen(earliest, window) // TILE * TILE
        each = tl.cdiv(tl.cdiv(last - first, TILE), num_splits) * TILE
        used = tl.cdiv(last - first, each)
        if split < used:
            place = tl.arange(0, TOKENS * GROUP_PADDED)
            local, member = offset + place // GROUP_PADDED, place % GROUP_PADDED
            heads = kv_head * GROUP + member
            is_query = (local < length) & (member < GROUP)
            offs_d = tl.arange(0, DIM_PADDED)
            q_heads = (begin + local).to(tl.int64) * NUM_HEADS + heads
            q_rows = q_heads * DIM
            q_inside = is_query[:, None] & (offs_d < DIM)[None, :]
            query = tl.load(queries + q_rows[:, None] + offs_d[None, :], mask=q_inside, other=0.0)
            q_positions = context - length + local
            cache = (keys, values, key_scales, value_scales)
            table = tables + row.to(tl.int64) * table_stride
            low = first + split * each
            high = tl.minimum(low + each, last)
            state = empty_state(TOKENS * GROUP_PADDED, DIM_PADDED)
            diagonal = low
            if IS_PLAIN:
                diagonal = tl.minimum(tl.maximum((earliest + 1) // TILE * TILE, low), high)
                state = attend_range(
                    state, query, cache, table, kv_head, q_positions, low, diagonal, context, scale, softcap, window,
                    offs_d, KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, False, IS_SCALED, PRECISION,
                )  # fmt: skip
            m_i, l_i, acc = attend_range(
                state, query, cache, table, kv_head, q_positions, diagonal, high, context, scale, softcap, window,
                offs_d, KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, True, IS_SCALED, PRECISION,
            )  # fmt: skip
            if used == 1:
                _store_tile((m_i, l_i, acc), out, sinks, q_rows, heads, q_inside, is_query, offs_d, HAS_SINKS)
            else:
                # The sum is 0 where all of a split's keys come after a query, or before its window.
                index = q_heads * num_splits
                mean = acc / tl.maximum(l_i, 1e-30)[:, None]
                tl.store(parts + (index + split)[:, None] * DIM + offs_d[None, :], mean, mask=q_inside)
                sum_log = tl.where(l_i > 0.0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), float("-inf"))
                tl.store(lse + index + split, sum_log, mask=is_query)
                if is_last_to_arrive(counters + tile * KV_HEADS + kv_head, used):
                    merged = empty_state(TOKENS * GROUP_PADDED, DIM_PADDED)
                    for one in range(used):
                        found = tl.load(lse + index + one, mask=is_query, other=float("-inf"), cache_modifier=".cg")
                        part = parts + (index + one)[:, None] * DIM + offs_d[None, :]
                        mean = tl.load(part, mask=q_inside, other=0.0, cache_modifier=".cg")
                        merged = merge_states(merged, (found, tl.zeros_like(found) + 1.0, mean))
                    _store_tile(merged, out, sinks, q_rows, heads, q_inside, is_query, offs_d, HAS_SINKS)


def split_prefill_attention(
    queries: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    rows: range,
    num_tokens: int,
    args: AttentionArgs,
    out: torch.Tensor,
    num_splits: int,
    *,
    config: PrefillConfig | None = None,
) -> None:
    """Some rows of a step, with `num_tokens` queries at most; queries, out [T, heads, D] of the whole step."""
    num_queries, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    group = num_heads // kv_heads
    padded, group_padded = max(16, next_power_of_2(dim)), next_power_of_2(group)
    config = config or pick_prefill_config(queries.dtype, padded, are_short=True)
    tokens = max(1, config.queries // group_padded)
    tiles = num_tokens // tokens + len(rows)
    parts = torch.empty(num_queries, num_heads, num_splits, dim, dtype=torch.float32, device=out.device)
    lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device)
    _split_prefill[(kv_heads, tiles, num_splits)](
        queries, *cache_tensors(cache), out, parts, lse, split_counters(out.device), tables, query_starts, contexts,
        args.sinks if args.sinks is not None else queries,
        args.scale, args.softcap or 1.0, window_of(args), tables.stride(0), rows.start, rows.stop, num_splits,
        num_heads, kv_heads, group, group_padded, dim, padded, block_size, tokens, config.keys,
        args.softcap is not None, args.window is not None, args.sinks is not None,
        args.window is None and padded == dim, cache.key_scales is not None, precision_of(queries),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
