"""Prefill attention: prompt chunks over the paged cache, and whole long prompts by torch's dense attention.

`prefill_attention` computes a tile of a row's queries for one head over its paged context. Keys before the diagonal are
seen by every query of the tile and need no mask:

    keys of a tile of queries   [ before its first: no mask | the diagonal: masked | after its last: skipped ]

`dense_prefill_attention` computes prompts that begin and end in this step: their keys are exactly this step's, so the
fastest dense attention (cuDNN's) can be used. Keys and values are gathered from the paged cache once per layer, which
costs a few per cent of the attention itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.kv_cache import as_factors, cache_tensors
from tokenmill.ops.triton.attention.softmax import (
    add_keys,
    attention_output,
    attention_scores,
    empty_state,
    load_kv_rows,
    load_scale,
    oldest_of_tile,
    oldest_seen,
    window_of,
)
from tokenmill.ops.triton.attention.tiles import row_of_tile
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2, precision_of

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PrefillConfig(NamedTuple):
    """The tile configuration of `prefill_attention`."""

    queries: int  # per program
    keys: int  # per iteration
    warps: int
    stages: int


def pick_prefill_config(dtype: torch.dtype, dim_padded: int, *, are_short: bool) -> PrefillConfig:
    """Return the tile configuration; short chunks use smaller tiles, since half-empty ones cost more than large ones
    save."""
    if dim_padded > 256:
        return PrefillConfig(16, 16, 4, 2) if dtype == torch.float32 else PrefillConfig(32, 16, 4, 2)
    if dtype == torch.float32 or dim_padded > 128:
        return PrefillConfig(32, 32, 4, 2)
    return PrefillConfig(64, 64, 4, 2) if are_short else PrefillConfig(128, 64, 8, 2)


@triton.jit
def attend_range(
    state, query, cache, table, kv_head, q_positions, low, high, context, scale, softcap, window, offs_d,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_MASKED: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the softmax state after keys [low, high)."""
    keys, values, key_scales, value_scales = cache
    m_i, l_i, acc = state
    oldest = oldest_seen(q_positions, window)
    first_seen = oldest_of_tile(q_positions, window)
    for start in range(low, high, TILE):
        offs_n = start + tl.arange(0, TILE)
        inside = offs_n < context
        if IS_MASKED:
            inside = inside & (offs_n >= first_seen)
        kv_rows = load_kv_rows(table, kv_head, offs_n, inside, KV_HEADS, BLOCK_SIZE)
        if IS_MASKED:
            kv_inside = inside[:, None] & (offs_d < DIM)[None, :]
            key = tl.load(keys + kv_rows[:, None] * DIM + offs_d[None, :], mask=kv_inside, other=0.0)
            value = tl.load(values + kv_rows[:, None] * DIM + offs_d[None, :], mask=kv_inside, other=0.0)
        else:
            key = tl.load(keys + kv_rows[:, None] * DIM + offs_d[None, :])
            value = tl.load(values + kv_rows[:, None] * DIM + offs_d[None, :])
        key, value = as_factors(key, query.dtype), as_factors(value, query.dtype)
        key_scale = load_scale(key_scales, kv_rows, inside, IS_SCALED)
        value_scale = load_scale(value_scales, kv_rows, inside, IS_SCALED)
        qk = attention_scores(query, key, key_scale, scale, softcap, HAS_SOFTCAP, IS_SCALED, PRECISION)
        if IS_MASKED:
            seen = (offs_n[None, :] <= q_positions[:, None]) & (offs_n[None, :] >= oldest[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        m_i, l_i, acc = add_keys((m_i, l_i, acc), qk, value, value_scale, IS_SCALED, PRECISION)
    return m_i, l_i, acc


@triton.jit
def attend_seen(
    state, query, cache, table, kv_head, low, high, scale, softcap, offs_d,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the softmax state after keys [low, high): whole tiles, of which every query sees every key.

    A tile's block numbers are loaded during the tile before it. Otherwise the compiler sees a load whose address is
    loaded in the same iteration, keeps only one tile of keys and values on its way however many stages it is given, and
    waits for it at once.
    """
    keys, values, key_scales, value_scales = cache
    offs_n = tl.arange(0, TILE)
    in_blocks = kv_head * BLOCK_SIZE + offs_n % BLOCK_SIZE
    offsets = in_blocks[:, None] * DIM + offs_d[None, :]
    next_blocks = tl.load(table + (low + offs_n) // BLOCK_SIZE, mask=low + offs_n < high, other=0)
    for start in range(low, high, TILE):
        first_rows = next_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE)
        key = as_factors(tl.load(keys + first_rows[:, None] * DIM + offsets), query.dtype)
        value = as_factors(tl.load(values + first_rows[:, None] * DIM + offsets), query.dtype)
        key_scale = load_scale(key_scales, first_rows + in_blocks, offs_n < TILE, IS_SCALED)
        value_scale = load_scale(value_scales, first_rows + in_blocks, offs_n < TILE, IS_SCALED)
        following = start + TILE + offs_n
        next_blocks = tl.load(table + following // BLOCK_SIZE, mask=following < high, other=0)
        qk = attention_scores(query, key, key_scale, scale, softcap, HAS_SOFTCAP, IS_SCALED, PRECISION)
        state = add_keys(state, qk, value, value_scale, IS_SCALED, PRECISION)
    return state


@kernel_unspecialized("first_row", "num_rows", "table_stride", is_large=True)
def _prefill(
    queries, keys, values, key_scales, value_scales, out, tables, query_starts, contexts, sinks,
    scale, softcap, window, table_stride, first_row, num_rows,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, IS_PLAIN: tl.constexpr,
    IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    # The last tiles of a row have the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (NUM_HEADS // KV_HEADS)
    row, begin, length, offset = row_of_tile(query_starts, tile, first_row, num_rows, QUERIES)
    if offset < length:
        context = tl.load(contexts + row)
        offs_d = tl.arange(0, DIM_PADDED)
        local = offset + tl.arange(0, QUERIES)
        q_positions = context - length + local
        q_rows = ((begin + local).to(tl.int64) * NUM_HEADS + head) * DIM
        q_inside = (local < length)[:, None] & (offs_d < DIM)[None, :]
        query = tl.load(queries + q_rows[:, None] + offs_d[None, :], mask=q_inside, other=0.0)
        state = empty_state(QUERIES, DIM_PADDED)
        earliest = context - length + offset
        last = tl.minimum(earliest + QUERIES, context)
        low = 0
        if HAS_WINDOW:
            low = oldest_seen(earliest, window) // TILE * TILE
        cache = (keys, values, key_scales, value_scales)
        table = tables + row.to(tl.int64) * table_stride
        diagonal = low
        if IS_PLAIN:
            diagonal = (earliest + 1) // TILE * TILE
            state = attend_range(
                state, query, cache, table, kv_head, q_positions, low, diagonal, context, scale, softcap, window,
                offs_d, KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, False, IS_SCALED, PRECISION,
            )  # fmt: skip
        state = attend_range(
            state, query, cache, table, kv_head, q_positions, diagonal, last, context, scale, softcap, window, offs_d,
            KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, True, IS_SCALED, PRECISION,
        )  # fmt: skip
        sink = scale
        if HAS_SINKS:
            sink = tl.load(sinks + head)
        result = attention_output(state, sink, HAS_SINKS)
        tl.store(out + q_rows[:, None] + offs_d[None, :], result.to(out.dtype.element_ty), mask=q_inside)


def prefill_attention(
    queries: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    rows: range,
    num_tokens: int,
    args: AttentionArgs,
    out: torch.Tensor,
    *,
    are_short: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Attend with some rows of a step, of at most `num_tokens` queries; queries, out [T, heads, D] of the whole
    step."""
    _, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    padded = max(16, next_power_of_2(dim))
    config = config or pick_prefill_config(queries.dtype, padded, are_short=are_short)
    tiles = num_tokens // config.queries + len(rows)
    _prefill[(tiles, num_heads)](
        queries, *cache_tensors(cache), out, tables, query_starts, contexts,
        args.sinks if args.sinks is not None else queries,
        args.scale, args.softcap or 1.0, window_of(args), tables.stride(0), rows.start, rows.stop,
        num_heads, kv_heads, dim, padded, block_size, config.queries, config.keys,
        args.softcap is not None, args.window is not None, args.sinks is not None,
        args.window is None and padded == dim, cache.key_scales is not None, precision_of(queries),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@kernel_unspecialized("length", "table_stride", "num_rows", "tables")
def _gather(
    keys, values, key_scales, value_scales, tables, out, length, table_stride, num_rows,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    row, part = tl.program_id(2) // 2, tl.program_id(2) % 2
    block = tl.load(tables + row * table_stride + number).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    offs_d = tl.arange(0, DIM_PADDED)
    offs_n = number * BLOCK_SIZE + offsets
    inside = (offs_n < length)[:, None] & (offs_d < DIM)[None, :]
    kv_rows = (block * KV_HEADS + head) * BLOCK_SIZE + offsets
    source = values if part else keys
    found = tl.load(source + kv_rows[:, None] * DIM + offs_d[None, :], mask=inside, other=0.0)
    if IS_SCALED:
        scales = value_scales if part else key_scales
        found = as_factors(found, tl.float32) * tl.load(scales + kv_rows, mask=offs_n < length, other=0.0)[:, None]
    out_row = ((part * num_rows + row) * KV_HEADS + head).to(tl.int64)
    target = out + (out_row * length + offs_n)[:, None] * DIM + offs_d[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=inside)


def dense_prefill_attention(
    queries: torch.Tensor, cache: LayerCache, tables: torch.Tensor, args: AttentionArgs
) -> torch.Tensor:
    """Attend with whole prompts of equal length: queries and result [R, L, heads, D]; tables int32 [R, max_blocks]."""
    num_rows, length, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    dense = queries.new_empty(2, num_rows, kv_heads, length, dim)
    grid = (cdiv(length, block_size), kv_heads, 2 * num_rows)
    padded = next_power_of_2(dim)
    _gather[grid](
        *cache_tensors(cache), tables, dense, length, tables.stride(0), num_rows,
        kv_heads, dim, padded, block_size, cache.key_scales is not None, num_warps=4,
    )  # fmt: skip
    with sdpa_kernel(BACKENDS, set_priority=True):
        result = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            dense[0],
            dense[1],
            is_causal=True,
            scale=args.scale,
            enable_gqa=num_heads != kv_heads,
        )
    return result.transpose(1, 2)
