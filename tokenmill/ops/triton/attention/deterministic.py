"""Deterministic attention: sums depend on the query and its context only, not on the batch or on how a prompt was cut
into chunks (`--deterministic`).

A tile is a few consecutive queries of one row, each with all heads that share a KV head. Keys are cut into segments at
fixed positions. Each segment's softmax state is computed separately and then merged, in order, with that of the earlier
segments:

    context   [ segment 0 | segment 1 | ... | the query's own ]      state = merge(merge(state 0, state 1), ...)

With many tiles one program loops over the segments; when a few rows decode, each segment has its own programs, and a
second kernel merges. A key that a query does not see changes no bit of its state, so it does not matter which other
queries share the tile. Multiply-adds are not fused, since the compiler might fuse them in one kernel and not in
another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.kv_cache import as_factors, cache_tensors
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.softmax import (
    add_keys,
    attention_output,
    attention_scores,
    empty_state,
    load_kv_rows,
    load_scale,
    merge_states,
    oldest_of_tile,
    oldest_seen,
    window_of,
)
from tokenmill.ops.triton.attention.tiles import row_of_tile
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

SEGMENT = 256  # keys
PROGRAMS_WANTED = 128


@triton.jit
def _segment_state(
    query, cache, table, kv_head, q_positions, low, high, context, scale, softcap, window, offs_d,
    BLOCK_M: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the softmax state of keys [low, high); each row of the tile sees those up to its position, in its
    window."""
    keys, values, key_scales, value_scales = cache
    m_i, l_i, acc = empty_state(BLOCK_M, DIM_PADDED)
    oldest = oldest_seen(q_positions, window)
    first_seen = oldest_of_tile(q_positions, window)
    for start in range(low, high, TILE):
        offs_n = start + tl.arange(0, TILE)
        inside = (offs_n < context) & (offs_n >= first_seen)
        kv_rows = load_kv_rows(table, kv_head, offs_n, inside, KV_HEADS, BLOCK_SIZE)
        kv_inside = inside[:, None] & (offs_d < DIM)[None, :]
        key = tl.load(keys + kv_rows[:, None] * DIM + offs_d[None, :], mask=kv_inside, other=0.0)
        value = tl.load(values + kv_rows[:, None] * DIM + offs_d[None, :], mask=kv_inside, other=0.0)
        key, value = as_factors(key, query.dtype), as_factors(value, query.dtype)
        key_scale = load_scale(key_scales, kv_rows, inside, IS_SCALED)
        value_scale = load_scale(value_scales, kv_rows, inside, IS_SCALED)
        qk = attention_scores(query, key, key_scale, scale, softcap, HAS_SOFTCAP, IS_SCALED, PRECISION)
        seen = (offs_n[None, :] <= q_positions[:, None]) & (offs_n[None, :] >= oldest[:, None])
        qk = tl.where(seen, qk, float("-inf"))
        m_i, l_i, acc = add_keys((m_i, l_i, acc), qk, value, value_scale, IS_SCALED, PRECISION)
    return m_i, l_i, acc


@kernel_unspecialized("num_rows")
def _attend(
    queries, keys, values, key_scales, value_scales, out, segment_sums, segment_accs,
    tables, query_starts, contexts, sinks, scale, softcap, window, table_stride, num_rows,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, NUM_SEGMENTS: tl.constexpr, IN_TURN: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_SCALED: tl.constexpr, ARE_SINGLE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    QUERIES: tl.constexpr = BLOCK_M // MEMBERS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a row have the most keys: they start first
    kv_head = tl.program_id(1)
    if ARE_SINGLE:  # one query per row
        row, begin, length, offset = tile, tile, 1, 0
    else:
        row, begin, length, offset = row_of_tile(query_starts, tile, 0, num_rows, QUERIES)
    context = tl.load(contexts + row)
    if offset < length:  # a padding row has context 0, sees no key and gets zeros
        offs_m = tl.arange(0, BLOCK_M)
        local, member = offset + offs_m // MEMBERS, offs_m % MEMBERS
        q_positions = context - length + local
        heads = kv_head * GROUP + member
        offs_d = tl.arange(0, DIM_PADDED)
        is_row = (local < length) & (member < GROUP)
        q_rows = (begin + local).to(tl.int64) * NUM_HEADS + heads
        q_inside = is_row[:, None] & (offs_d < DIM)[None, :]
        query = tl.load(queries + q_rows[:, None] * DIM + offs_d[None, :], mask=q_inside, other=0.0)
        cache = (keys, values, key_scales, value_scales)
        table = tables + tl.cast(row, tl.int64) * table_stride
        oldest = oldest_seen(context - length + offset, window)
        last = tl.minimum(context - length + offset + QUERIES, context)
        if IN_TURN:
            m_i, l_i, acc = empty_state(BLOCK_M, DIM_PADDED)
            for first in range(oldest // SEGMENT * SEGMENT, last, SEGMENT):
                segment = _segment_state(
                    query, cache, table, kv_head, q_positions,
                    tl.maximum(first, oldest // TILE * TILE), tl.minimum(first + SEGMENT, last), context,
                    scale, softcap, window, offs_d, BLOCK_M, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, TILE, HAS_SOFTCAP,
                    IS_SCALED, PRECISION,
                )  # fmt: skip
                m_i, l_i, acc = merge_states((m_i, l_i, acc), segment)
            sink = is_row
            if HAS_SINKS:
                sink = tl.load(sinks + heads, mask=is_row, other=0.0)
            result = attention_output((m_i, l_i, acc), sink, HAS_SINKS)
            tl.store(out + q_rows[:, None] * DIM + offs_d[None, :], result.to(out.dtype.element_ty), mask=q_inside)
        else:
            first = tl.program_id(2) * SEGMENT
            if (first < last) & (first + SEGMENT > oldest):
                m_i, l_i, acc = _segment_state(
                    query, cache, table, kv_head, q_positions,
                    tl.maximum(first, oldest // TILE * TILE), tl.minimum(first + SEGMENT, last), context,
                    scale, softcap, window, offs_d, BLOCK_M, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, TILE, HAS_SOFTCAP,
                    IS_SCALED, PRECISION,
                )  # fmt: skip
                index = q_rows * NUM_SEGMENTS + tl.program_id(2)
                tl.store(segment_sums + index * 2, m_i, mask=is_row)
                tl.store(segment_sums + index * 2 + 1, l_i, mask=is_row)
                tl.store(segment_accs + index[:, None] * DIM + offs_d[None, :], acc, mask=q_inside)


@kernel
def _merge_segments(
    segment_sums, segment_accs, contexts, sinks, out, window,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the segments of rows with one query each; one program per head and row."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    q_row = tl.program_id(0).to(tl.int64)  # row * heads + head
    context = tl.load(contexts + q_row // NUM_HEADS)
    offs_d = tl.arange(0, DIM_PADDED)
    one = tl.arange(0, 1)
    m_i, l_i, acc = empty_state(1, DIM_PADDED)
    for number in range(oldest_seen(context - 1, window) // SEGMENT, tl.cdiv(context, SEGMENT)):
        index = q_row * NUM_SEGMENTS + number
        sums = segment_sums + index * 2 + one
        segment_acc = tl.load(segment_accs + index * DIM + offs_d, mask=offs_d < DIM, other=0.0)[None, :]
        m_i, l_i, acc = merge_states((m_i, l_i, acc), (tl.load(sums), tl.load(sums + 1), segment_acc))
    sink = one
    if HAS_SINKS:
        sink = tl.load(sinks + q_row % NUM_HEADS + one)
    result = attention_output((m_i, l_i, acc), sink, HAS_SINKS)
    targets = out + q_row * DIM + offs_d[None, :] + one[:, None]
    tl.store(targets, result.to(out.dtype.element_ty), mask=(offs_d < DIM)[None, :])


def deterministic_attention(
    queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, args: AttentionArgs, *, in_turn: bool | None = None
) -> torch.Tensor:
    """queries [T, heads, D] → [T, heads * D]"""
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    (num_tokens, num_heads, dim), num_rows = queries.shape, plan.contexts.shape[0]
    _, kv_heads, block_size, _ = cache.keys.shape
    group = num_heads // kv_heads
    members = next_power_of_2(group)
    block_m, tile, warps, stages = (64, 64, 4, 2) if queries.dtype != torch.float32 else (16, 32, 4, 2)
    if dim > 256:
        block_m, tile = 16, 16
    are_single = plan.max_queries == 1
    tiles = num_rows if are_single else num_tokens // (block_m // members) + num_rows
    num_segments = next_power_of_2(cdiv(plan.max_position, SEGMENT))  # few variants to compile
    if in_turn is None:
        in_turn = not are_single or num_segments == 1 or tiles * kv_heads >= PROGRAMS_WANTED
    sums = accs = out
    if in_turn:
        num_segments = 1
    else:
        sums = torch.empty(num_tokens, num_heads, num_segments, 2, dtype=torch.float32, device=out.device)
        accs = torch.empty(num_tokens, num_heads, num_segments, dim, dtype=torch.float32, device=out.device)
    sinks = args.sinks if args.sinks is not None else queries
    window = window_of(args)
    padded = max(16, next_power_of_2(dim))
    _attend[(tiles, kv_heads, num_segments)](
        queries, *cache_tensors(cache), out, sums, accs,
        plan.tables, plan.query_starts, plan.contexts, sinks,
        args.scale, args.softcap or 1.0, window, plan.tables.stride(0), num_rows,
        num_heads, kv_heads, group, members, dim, padded, block_size, block_m, tile, SEGMENT, num_segments, in_turn,
        args.softcap is not None, args.sinks is not None, cache.key_scales is not None, are_single,
        precision_of(queries),
        num_warps=warps, num_stages=stages, enable_fp_fusion=False, **launch_options(),
    )  # fmt: skip
    if not in_turn:
        _merge_segments[(num_rows * num_heads,)](
            sums, accs, plan.contexts, sinks, out, window,
            num_heads, dim, padded, SEGMENT, num_segments, args.sinks is not None,
            num_warps=1, enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip
    return out.flatten(1)
