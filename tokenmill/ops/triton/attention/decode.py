"""Decode attention: rows with one query each over their paged contexts, which is bound by memory bandwidth.

The heads that share a KV head are one tile of queries, so every cached key is read once. A context is cut into splits
that run in parallel; each stores its result and the logarithm of its softmax sum, and the last one to end merges them:

    context of a row:   [ split 0 | split 1 | ... ]      out = Σ exp2(lse_s - max) * out_s / Σ exp2(lse_s - max)

There are two kernels. `decode_attention` reads prepared queries and a cache that holds all keys.
`fused_decode_attention` starts from the stacked projection, for few rows, where gaps between kernels dominate: it norms
and rotates q and k, writes k and v to the cache, and attends. It loads earlier steps' cache before this step's
projection is ready; the newest key is not read back: the split that owns it starts with it, from registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference.kv_rounding import LARGEST
from tokenmill.ops.triton.attention.kv_cache import as_factors, cache_tensors, norm_rope, store_kv
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.select import TILE, num_splits_for
from tokenmill.ops.triton.attention.softmax import (
    LOG2E,
    LOWEST,
    add_keys,
    attention_output,
    attention_scores,
    empty_state,
    load_kv_rows,
    load_scale,
    oldest_seen,
    window_of,
)
from tokenmill.ops.triton.elementwise.activation import tanh
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import (
    is_last_to_arrive,
    launch_dependents,
    launch_options,
    split_counters,
    wait_for_previous,
)

FUSED_WARPS = 8


@triton.jit
def _split_range(context, window, split, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return the oldest visible key, this split's keys [low, high), and the number of splits with keys, at least
    one."""
    oldest = oldest_seen(context - 1, window)
    first = oldest // TILE * TILE
    each = (tl.cdiv(context - first, TILE) + NUM_SPLITS - 1) // NUM_SPLITS * TILE
    low = first + split * each
    used = tl.maximum(tl.cdiv(context - first, tl.maximum(each, 1)), 1)
    return oldest, low, tl.minimum(low + each, context), used


@triton.jit
def _load_tile(
    cache, table, kv_head, offs_n, seen, offs_d,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Load keys and values [TILE, D] at positions offs_n, and their scales."""
    keys, values, key_scales, value_scales = cache
    kv_rows = load_kv_rows(table, kv_head, offs_n, seen, KV_HEADS, BLOCK_SIZE)
    inside = seen[:, None] & (offs_d < DIM)[None, :]
    key = tl.load(keys + kv_rows[:, None] * DIM + offs_d[None, :], mask=inside, other=0.0)
    value = tl.load(values + kv_rows[:, None] * DIM + offs_d[None, :], mask=inside, other=0.0)
    key_scale = load_scale(key_scales, kv_rows, seen, IS_SCALED)
    return key, value, key_scale, load_scale(value_scales, kv_rows, seen, IS_SCALED)


@triton.jit
def _add_tile(
    state, query, tile, seen, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the softmax state [16], [16], [16, D] after the keys of a tile."""
    key, value, key_scale, value_scale = tile
    key, value = as_factors(key, query.dtype), as_factors(value, query.dtype)
    qk = attention_scores(query, key, key_scale, scale, softcap, HAS_SOFTCAP, IS_SCALED, PRECISION)
    qk = tl.where(seen[None, :], qk, float("-inf"))
    return add_keys(state, qk, value, value_scale, IS_SCALED, PRECISION)


@triton.jit
def _store_output(
    state, out, sinks, row, heads, is_head, offs_d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    sink = is_head
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0)
    result = attention_output(state, sink, HAS_SINKS)
    target = out + (row * NUM_HEADS + heads)[:, None] * DIM + offs_d[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_head[:, None] & (offs_d < DIM)[None, :])


@triton.jit
def _load_split(parts, lse, index, split, used, m_i, is_head, offs_d, DIM: tl.constexpr):
    """Load the result of a split, and its weight."""
    is_there = is_head & (index * 0 + split < used)
    weight = tl.exp2(tl.load(lse + index + split, mask=is_there, other=float("-inf"), cache_modifier=".cg") - m_i)
    inside = is_there[:, None] & (offs_d < DIM)[None, :]
    part = parts + (index + split)[:, None] * DIM + offs_d[None, :]
    return tl.load(part, mask=inside, other=0.0, cache_modifier=".cg"), weight[:, None]


@triton.jit
def _finish_split(
    state, out, parts, lse, counters, sinks, row, kv_head, split, used, offs_d,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Store a split's state: as the result if it is the only split, else for the last split, which merges all."""
    member = tl.arange(0, 16)
    heads, is_head = kv_head * GROUP + member, member < GROUP
    if NUM_SPLITS == 1 or used == 1:
        _store_output(state, out, sinks, row, heads, is_head, offs_d, NUM_HEADS, DIM, HAS_SINKS)
    else:
        m_i, l_i, acc = state
        index = (row * NUM_HEADS + heads) * NUM_SPLITS
        inside = is_head[:, None] & (offs_d < DIM)[None, :]
        tl.store(parts + (index + split)[:, None] * DIM + offs_d[None, :], acc / l_i[:, None], mask=inside)
        tl.store(lse + index + split, m_i + tl.log2(l_i), mask=is_head)
        if is_last_to_arrive(counters + row * KV_HEADS + kv_head, used):
            splits = tl.arange(0, NUM_SPLITS)
            is_there = is_head[:, None] & (splits < used)[None, :]
            all_lse = lse + index[:, None] + splits[None, :]
            left = tl.load(all_lse, mask=is_there, other=float("-inf"), cache_modifier=".cg")
            m_i = tl.maximum(tl.max(left, axis=1), LOWEST)
            l_i = tl.sum(tl.exp2(left - m_i[:, None]), axis=1)
            acc = tl.zeros(acc.shape, tl.float32)
            for first in range(0, used, 4):  # four at a time, so that their loads overlap
                a, a_weight = _load_split(parts, lse, index, first, used, m_i, is_head, offs_d, DIM)
                b, b_weight = _load_split(parts, lse, index, first + 1, used, m_i, is_head, offs_d, DIM)
                c, c_weight = _load_split(parts, lse, index, first + 2, used, m_i, is_head, offs_d, DIM)
                e, e_weight = _load_split(parts, lse, index, first + 3, used, m_i, is_head, offs_d, DIM)
                acc += a * a_weight + b * b_weight + c * c_weight + e * e_weight
            _store_output((m_i, l_i, acc), out, sinks, row, heads, is_head, offs_d, NUM_HEADS, DIM, HAS_SINKS)


@kernel_unspecialized("table_stride", "lets_begin", is_large=True)
def _decode(
    queries, keys, values, key_scales, value_scales, out, parts, lse, counters, tables, contexts, sinks,
    scale, softcap, window, table_stride, lets_begin,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    if lets_begin == 0:
        launch_dependents(OVERLAPS)
    kv_head = tl.program_id(0)  # the fastest index: the heads of a block are neighbours in memory
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    wait_for_previous(OVERLAPS)
    if lets_begin != 0:  # the next kernel does not depend on this one's result
        launch_dependents(OVERLAPS)
    oldest, low, high, used = _split_range(tl.load(contexts + row), window, split, TILE, NUM_SPLITS)
    cache = (keys, values, key_scales, value_scales)
    member, offs_d = tl.arange(0, 16), tl.arange(0, DIM_PADDED)
    q_inside = (member < GROUP)[:, None] & (offs_d < DIM)[None, :]
    q_rows = row * NUM_HEADS + kv_head * GROUP + member
    query = tl.load(queries + q_rows[:, None] * DIM + offs_d[None, :], mask=q_inside, other=0.0)
    m_i, l_i, acc = empty_state(16, DIM_PADDED)
    table = tables + row * table_stride
    for start in range(low, high, TILE):
        offs_n = start + tl.arange(0, TILE)
        seen = (offs_n < high) & (offs_n >= oldest)
        tile = _load_tile(cache, table, kv_head, offs_n, seen, offs_d, KV_HEADS, DIM, BLOCK_SIZE, IS_SCALED)
        m_i, l_i, acc = _add_tile((m_i, l_i, acc), query, tile, seen, scale, softcap, HAS_SOFTCAP, IS_SCALED, PRECISION)
    if split < used:
        _finish_split(
            (m_i, l_i, acc), out, parts, lse, counters, sinks, row, kv_head, split, used, offs_d,
            NUM_HEADS, KV_HEADS, GROUP, DIM, NUM_SPLITS, HAS_SINKS,
        )  # fmt: skip


def decode_attention(
    queries: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    args: AttentionArgs,
    out: torch.Tensor,
    num_splits: int,
    *,
    lets_begin: bool = False,
    tile: int | None = None,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """queries, out [R, heads, D]; contexts [R], 0 for padding rows. `lets_begin`: launch the next kernel early, which
    reads the same queries and cache and does not depend on this kernel's result."""
    num_rows, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    group = num_heads // kv_heads
    assert group <= 16, "a KV head serves at most 16 query heads"
    sinks = args.sinks if args.sinks is not None else queries
    padded = max(16, next_power_of_2(dim))
    tile = tile or TILE * 512 // max(512, padded * queries.element_size())  # to fit shared memory
    _decode[(kv_heads, num_rows, num_splits)](
        queries, *cache_tensors(cache), out, *_split_buffers(out, num_splits), tables, contexts, sinks,
        args.scale, args.softcap or 1.0, window_of(args), tables.stride(0), int(lets_begin),
        num_heads, kv_heads, group, dim, padded, block_size, tile, num_splits,
        args.softcap is not None, args.sinks is not None, cache.key_scales is not None, precision_of(queries),
        num_warps=warps, num_stages=stages, **launch_options(),
    )  # fmt: skip


def _split_buffers(out: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return buffers for the splits' results, for the logarithms of their sums, and their counters; out [R, heads,
    D]."""
    if num_splits == 1:
        return out, out, out
    num_rows, num_heads, dim = out.shape
    parts = torch.empty(num_rows, num_heads, num_splits, dim, dtype=torch.float32, device=out.device)
    return parts, torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device), split_counters(out.device)


@kernel_unspecialized("table_stride", is_large=True)
def _fused_decode_attention(
    qkv, keys, values, key_scales, value_scales, out, parts, lse, counters, tables, contexts, sinks,
    q_norm, k_norm, cos, sin, half, eps, scale, softcap, window, table_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    LARGEST: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    oldest, low, high, used = _split_range(context, window, split, TILE, NUM_SPLITS)
    if split >= used:
        return
    newest = context - 1
    is_scaled: tl.constexpr = LARGEST > 0
    cache = (keys, values, key_scales, value_scales)
    offs_d = tl.arange(0, DIM_PADDED)
    table = tables + row * table_stride
    offs_n = low + tl.arange(0, TILE)
    seen = (offs_n < high) & (offs_n < newest) & (offs_n >= oldest)
    key, value, key_scale, value_scale = _load_tile(
        cache, table, kv_head, offs_n, seen, offs_d, KV_HEADS, DIM, BLOCK_SIZE, is_scaled
    )
    has_newest = newest < high  # then it is the last split
    newest_block = tl.load(table + tl.maximum(newest, 0) // BLOCK_SIZE).to(tl.int64)
    wait_for_previous(OVERLAPS)

    vectors = qkv + row * (NUM_HEADS + 2 * KV_HEADS) * DIM
    rope = (cos + row * half, sin + row * half, half)
    d_row = offs_d[None, :]
    member = tl.arange(0, 16)[:, None]
    q_inside = (member < GROUP) & (d_row < DIM)
    q_source = vectors + (kv_head * GROUP + member) * DIM
    query = norm_rope(q_source, d_row, q_inside, q_norm, rope, DIM, eps, HAS_NORM, HAS_ROPE)
    query = query.to(qkv.dtype.element_ty)
    one = tl.zeros((1, 1), tl.int64)
    k_source = vectors + (NUM_HEADS + kv_head + one) * DIM
    inside = (one == 0) & (d_row < DIM)
    new_key = norm_rope(k_source, d_row, inside, k_norm, rope, DIM, eps, HAS_NORM, HAS_ROPE)
    new_value = tl.load(k_source + KV_HEADS * DIM + d_row, mask=inside, other=0.0).to(tl.float32)
    if has_newest & (context > 0):
        kv_row = (newest_block * KV_HEADS + kv_head) * BLOCK_SIZE + newest % BLOCK_SIZE + one
        store_kv(new_key, keys, key_scales, kv_row, d_row, inside, DIM, LARGEST)
        store_kv(new_value, values, value_scales, kv_row, d_row, inside, DIM, LARGEST)
    if not is_scaled:  # round as the cache does, except for one-byte caches
        new_key = new_key.to(keys.dtype.element_ty).to(tl.float32)
    score = tl.sum(query.to(tl.float32) * new_key, axis=1) * scale
    if HAS_SOFTCAP:
        score = softcap * tanh(score / softcap)
    is_new = has_newest & (context > 0)
    m_i = tl.where(is_new, score * LOG2E, LOWEST)
    l_i = tl.where(is_new, score * 0 + 1.0, 0.0)
    acc = tl.zeros((16, DIM_PADDED), tl.float32) + tl.where(is_new, new_value, 0.0)
    for start in range(low, high, TILE):
        offs_n = start + TILE + tl.arange(0, TILE)
        is_next = (offs_n < high) & (offs_n < newest)
        next_key, next_value, next_key_scale, next_value_scale = _load_tile(
            cache, table, kv_head, offs_n, is_next, offs_d, KV_HEADS, DIM, BLOCK_SIZE, is_scaled
        )
        m_i, l_i, acc = _add_tile(
            (m_i, l_i, acc), query, (key, value, key_scale, value_scale), seen, scale, softcap,
            HAS_SOFTCAP, is_scaled, PRECISION,
        )  # fmt: skip
        key, value, key_scale, value_scale, seen = next_key, next_value, next_key_scale, next_value_scale, is_next
    _finish_split(
        (m_i, l_i, acc), out, parts, lse, counters, sinks, row, kv_head, split, used, offs_d,
        NUM_HEADS, KV_HEADS, GROUP, DIM, NUM_SPLITS, HAS_SINKS,
    )  # fmt: skip


def fused_decode_attention(
    qkv: torch.Tensor,
    cache: LayerCache,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    plan: AttentionPlan,
    args: AttentionArgs,
) -> torch.Tensor:
    """qkv [R, (heads + 2 kv_heads) * D] of rows with one query each → attention outputs [R, heads * D]"""
    _, kv_heads, block_size, dim = cache.keys.shape
    num_rows = len(qkv)
    num_splits = num_splits_for(num_rows, kv_heads, plan.max_context, capabilities_of(qkv.device))
    qkv = qkv.contiguous()
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    out = qkv.new_empty(num_rows, num_heads, dim)
    cos, sin = cos_sin or (qkv, qkv)
    _fused_decode_attention[(num_rows, kv_heads, num_splits)](
        qkv, *cache_tensors(cache), out, *_split_buffers(out, num_splits), plan.tables, plan.contexts,
        args.sinks if args.sinks is not None else qkv, *(norms or (qkv, qkv)), cos, sin,
        cos.shape[-1] if cos_sin else 0, eps, args.scale, args.softcap or 1.0, window_of(args),
        plan.tables.stride(0), num_heads, kv_heads, num_heads // kv_heads, dim, max(16, next_power_of_2(dim)),
        block_size, TILE, num_splits, norms is not None, cos_sin is not None, args.softcap is not None,
        args.sinks is not None, LARGEST.get(cache.keys.dtype, 0.0), precision_of(qkv),
        num_warps=FUSED_WARPS, **launch_options(),
    )  # fmt: skip
    return out.flatten(1)
