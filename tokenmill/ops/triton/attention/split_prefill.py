"""Attention of short chunks over long contexts, as in chunked prefill beside decoding rows.

A chunk of a few dozen tokens has too few tiles of queries to fill a GPU, and each would process the whole context
sequentially. So, as for single queries (`decode.py`), the heads that share a KV head are in one tile, and the context
is cut into splits that run in parallel:

    tile of queries     token 0: heads 0 1 2 3 | token 1: heads 0 1 2 3 | ...       all of one KV head
    keys of the tile    [ split 0 | split 1 | ... | the diagonal is in the last one, or the last two ]

A second kernel merges them, with one program per token and KV head: the results of a tile's splits are a megabyte,
which took a single program as long to merge as its keys.

If the step also has decoding rows, the splits overlap with their kernel: neither saturates the memory bandwidth alone.

    norm, rotate, write ─► decode ─ (waits, then lets the next begin) ─► splits ─ (wait at their end) ─► merge
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.kv_cache import cache_tensors
from tokenmill.ops.triton.attention.prefill import PrefillConfig, attend_range, attend_seen, pick_prefill_config
from tokenmill.ops.triton.attention.select import SMALL_CUT, ChunkCut, chunk_cut, padded_group
from tokenmill.ops.triton.attention.softmax import (
    LOWEST,
    attention_output,
    empty_state,
    oldest_seen,
    window_of,
)
from tokenmill.ops.triton.attention.tiles import row_of_tile
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

MERGED = 8  # splits per iteration of the merge


@triton.jit
def _store_tile(state, out, sinks, q_rows, heads, q_inside, is_query, offs_d, HAS_SINKS: tl.constexpr):
    sink = heads
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_query, other=0.0)
    result = attention_output(state, sink, HAS_SINKS)
    tl.store(out + q_rows[:, None] + offs_d[None, :], result.to(out.dtype.element_ty), mask=q_inside)


@triton.jit
def _split_size(
    context, length, offset, window, num_splits, TOKENS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Return a tile's first and last key positions, and the number of keys per split, a multiple of TILE."""
    earliest = context - length + offset
    last = tl.minimum(earliest + TOKENS, context)
    first = 0
    if HAS_WINDOW:
        first = oldest_seen(earliest, window) // TILE * TILE
    return first, last, tl.cdiv(tl.cdiv(last - first, TILE), num_splits) * TILE


@kernel_unspecialized("first_row", "num_rows", "table_stride", "num_splits", "is_beside", is_large=True)
def _split_prefill(
    queries, keys, values, key_scales, value_scales, out, parts, lse, tables, query_starts, contexts, sinks,
    scale, softcap, window, table_stride, first_row, num_rows, num_splits, is_beside,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_PLAIN: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    if is_beside == 0:
        wait_for_previous(OVERLAPS)
    # Tiles are the slowest: those without queries, which a captured step may have many of, come last.
    kv_head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, begin, length, offset = row_of_tile(query_starts, tile, first_row, num_rows, TOKENS)
    if offset < length:
        context = tl.load(contexts + row)
        first, last, each = _split_size(context, length, offset, window, num_splits, TOKENS, TILE, HAS_WINDOW)
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
                earliest = context - length + offset
                diagonal = tl.minimum(tl.maximum((earliest + 1) // TILE * TILE, low), high)
                state = attend_seen(
                    state, query, cache, table, kv_head, low, diagonal, scale, softcap, offs_d,
                    KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, IS_SCALED, PRECISION,
                )  # fmt: skip
            m_i, l_i, acc = attend_range(
                state, query, cache, table, kv_head, q_positions, diagonal, high, context, scale, softcap, window,
                offs_d, KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, True, IS_SCALED, PRECISION,
            )  # fmt: skip
            if used == 1:
                _store_tile((m_i, l_i, acc), out, sinks, q_rows, heads, q_inside, is_query, offs_d, HAS_SINKS)
            else:
                # The sum is 0 if all of a split's keys come after a query, or before its window.
                index = (q_heads - tl.load(query_starts + first_row).to(tl.int64) * NUM_HEADS) * num_splits
                mean = acc / tl.maximum(l_i, 1e-30)[:, None]
                tl.store(parts + (index + split)[:, None] * DIM + offs_d[None, :], mean, mask=q_inside)
                sum_log = tl.where(l_i > 0.0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), float("-inf"))
                tl.store(lse + index + split, sum_log, mask=is_query)
    if is_beside != 0 and (tile == 0 or offset < length):
        # A kernel that waits for this one then also waits for the one before. Programs without queries end at once, and
        # leave their place to others.
        wait_for_previous(OVERLAPS)


@kernel_unspecialized("first_row", "num_rows", "num_splits")
def _merge_splits(
    out, parts, lse, query_starts, contexts, sinks, window, first_row, num_rows, num_splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    kv_head, tile, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, begin, length, offset = row_of_tile(query_starts, tile, first_row, num_rows, TOKENS)
    if offset + token < length:
        context = tl.load(contexts + row)
        first, last, each = _split_size(context, length, offset, window, num_splits, TOKENS, TILE, HAS_WINDOW)
        used = tl.cdiv(last - first, each)
        if used > 1:
            member, offs_d, offs_s = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, MERGED)
            heads = kv_head * GROUP + member
            q_heads = (begin + offset + token).to(tl.int64) * NUM_HEADS + heads
            first_part = (q_heads - tl.load(query_starts + first_row).to(tl.int64) * NUM_HEADS) * num_splits
            is_head, inside = member < GROUP, (member < GROUP)[:, None] & (offs_d < DIM)[None, :]
            m_i = tl.full((GROUP_PADDED,), LOWEST, tl.float32)
            l_i = tl.zeros((GROUP_PADDED,), tl.float32)
            acc = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
            for some in range(0, used, MERGED):
                splits = some + offs_s
                index = first_part[None, :] + splits[:, None]
                is_there = is_head[None, :] & (splits < used)[:, None]
                found = tl.load(lse + index, mask=is_there, other=float("-inf"), cache_modifier=".cg")
                means = tl.load(
                    parts + index[:, :, None] * DIM + offs_d[None, None, :],
                    mask=is_there[:, :, None] & inside[None, :, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                m_new = tl.maximum(m_i, tl.max(found, axis=0))
                weights, alpha = tl.exp2(found - m_new[None, :]), tl.exp2(m_i - m_new)
                l_i = l_i * alpha + tl.sum(weights, axis=0)
                acc = acc * alpha[:, None] + tl.sum(means * weights[:, :, None], axis=0)
                m_i = m_new
            _store_tile((m_i, l_i, acc), out, sinks, q_heads * DIM, heads, inside, is_head, offs_d, HAS_SINKS)


def pick_split_config(dtype: torch.dtype, dim_padded: int, cut: ChunkCut) -> PrefillConfig:
    """Return the tile configuration for chunks. With three stages, keys and values of at least one more tile are on
    their way while one is computed."""
    if dtype == torch.float32 or dim_padded > 128:
        return pick_prefill_config(dtype, dim_padded, are_short=True)
    return PrefillConfig(64, 64, 4, 3) if cut == SMALL_CUT else PrefillConfig(128, 64, 8, 3)


def room_for_parts(queries: torch.Tensor, num_tokens: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate buffers for the splits' results and the logarithms of their sums. Must be called before a kernel that
    overlaps with the splits frees its own buffers: the allocator would hand out the same memory."""
    _, num_heads, dim = queries.shape
    parts = queries.new_empty((num_tokens, num_heads, num_splits, dim), dtype=torch.float32)
    return parts, queries.new_empty(parts.shape[:3], dtype=torch.float32)


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
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
    is_beside: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Attend with some rows of a step, of at most `num_tokens` queries; queries, out [T, heads, D] of the whole step.
    `is_beside`: launched right after a `decode_attention` with `lets_begin`; `room` was allocated before that."""
    _, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    group, group_padded = num_heads // kv_heads, padded_group(num_heads, kv_heads)
    padded = max(16, next_power_of_2(dim))
    config = config or pick_split_config(queries.dtype, padded, chunk_cut(num_tokens, num_heads, kv_heads))
    tokens = max(1, config.queries // group_padded)
    tiles = num_tokens // tokens + len(rows)
    parts, lse = room or room_for_parts(queries, num_tokens, num_splits)
    sinks = args.sinks if args.sinks is not None else queries
    window = window_of(args)
    has_window, has_sinks = args.window is not None, args.sinks is not None
    _split_prefill[(kv_heads, num_splits, tiles)](
        queries, *cache_tensors(cache), out, parts, lse, tables, query_starts, contexts, sinks,
        args.scale, args.softcap or 1.0, window, tables.stride(0), rows.start, rows.stop, num_splits, int(is_beside),
        num_heads, kv_heads, group, group_padded, dim, padded, block_size, tokens, config.keys,
        args.softcap is not None, has_window, has_sinks,
        args.window is None and padded == dim, cache.key_scales is not None, precision_of(queries),
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    _merge_splits[(kv_heads, tiles, tokens)](
        out, parts, lse, query_starts, contexts, sinks, window, rows.start, rows.stop, num_splits,
        num_heads, group, group_padded, dim, padded, tokens, config.keys, MERGED, has_window, has_sinks,
        num_warps=4, **launch_options(),
    )  # fmt: skip
