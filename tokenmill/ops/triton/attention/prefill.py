"""Many queries a row over its paged context: the compute-bound half of attention.

A tile is QUERIES consecutive queries of one row and one head. Which row a tile belongs to is found on the device, so
that the host never waits for lengths: row r's tiles begin at query_starts[r] // QUERIES + r, which leaves each row
room for its last, partly filled one.

    keys of a tile:   [ window passed | every query sees these | the diagonal: masked | after the last query ]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.decode import LOG2E, NO_WINDOW, precision_of
from tokenmill.ops.triton.attention.kv_dtypes import as_factors, numbers_of
from tokenmill.ops.triton.elementwise.activation import tanh
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.sizes import next_power_of_2


@triton.jit
def _attend(
    query, highest, total, mixed, keys, values, key_scales, value_scales, table, kv_head, positions, low, high, context,
    scale, softcap, window, d,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_MASKED: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax state after keys [low, high)."""
    for start in range(low, high, TILE):
        places = start + tl.arange(0, TILE)
        inside = places < context
        blocks = tl.load(table + places // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        lines = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
        if IS_MASKED:
            kv_inside = inside[:, None] & (d < DIM)[None, :]
            key = tl.load(keys + lines[:, None] * DIM + d[None, :], mask=kv_inside, other=0.0)
            value = tl.load(values + lines[:, None] * DIM + d[None, :], mask=kv_inside, other=0.0)
        else:
            key = tl.load(keys + lines[:, None] * DIM + d[None, :])
            value = tl.load(values + lines[:, None] * DIM + d[None, :])
        key, value = as_factors(key, query.dtype), as_factors(value, query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = scores * scale
        if IS_SCALED:
            scores *= tl.load(key_scales + lines, mask=inside, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        scores = scores * LOG2E
        if IS_MASKED:
            seen = (places[None, :] <= positions[:, None]) & (places[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        if IS_MASKED:
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_SCALED:
            weights *= tl.load(value_scales + lines, mask=inside, other=0.0)[None, :]
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision=PRECISION)
        highest = new_highest
    return highest, total, mixed


@kernel_unspecialized("first_row", "num_rows", "table_stride")
def _chunk(
    queries, keys, values, key_scales, value_scales, out, tables, query_starts, contexts, sinks,
    scale, softcap, window, table_stride, first_row, num_rows,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, IS_PLAIN: tl.constexpr,
    IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    # The last tiles of a row have the most keys: they are started first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (NUM_HEADS // KV_HEADS)
    origin = tl.load(query_starts + first_row)
    low_row, high_row = first_row, num_rows
    while high_row - low_row > 1:  # the last row whose tiles begin at or before this one
        middle = (low_row + high_row) // 2
        begins = (tl.load(query_starts + middle) - origin) // QUERIES + (middle - first_row)
        if begins <= tile:
            low_row = middle
        else:
            high_row = middle
    row = low_row
    begin = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - begin
    offset = (tile - (begin - origin) // QUERIES - (row - first_row)) * QUERIES
    if offset < length:
        context = tl.load(contexts + row)
        d = tl.arange(0, DIM_PADDED)
        local = offset + tl.arange(0, QUERIES)
        positions = context - length + local
        lines = ((begin + local).to(tl.int64) * NUM_HEADS + head) * DIM
        q_inside = (local < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(queries + lines[:, None] + d[None, :], mask=q_inside, other=0.0)
        highest = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, DIM_PADDED), tl.float32)
        earliest = context - length + offset
        last = tl.minimum(earliest + QUERIES, context)
        low = 0
        if HAS_WINDOW:
            low = tl.maximum(earliest - window + 1, 0) // TILE * TILE
        table = tables + row.to(tl.int64) * table_stride
        diagonal = low
        if IS_PLAIN:
            diagonal = (earliest + 1) // TILE * TILE
            highest, total, mixed = _attend(
                query, highest, total, mixed, keys, values, key_scales, value_scales, table, kv_head, positions,
                low, diagonal, context, scale, softcap, window, d,
                KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, False, IS_SCALED, PRECISION,
            )  # fmt: skip
        highest, total, mixed = _attend(
            query, highest, total, mixed, keys, values, key_scales, value_scales, table, kv_head, positions,
            diagonal, last, context, scale, softcap, window, d,
            KV_HEADS, DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, True, IS_SCALED, PRECISION,
        )  # fmt: skip
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head) * LOG2E - highest)
        mixed = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + lines[:, None] + d[None, :], mixed.to(out.dtype.element_ty), mask=q_inside)


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
    queries_tile: int | None = None,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> None:
    """Some rows of a step, with `num_tokens` queries at most; queries, out [T, heads, D] of the whole step."""
    _, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    padded = max(16, next_power_of_2(dim))
    tall = queries.dtype != torch.float32 and padded <= 128
    # Where prompts are short, half-empty tiles would cost more than tall ones save.
    shape = ((64, 64, 4, 2) if are_short else (128, 64, 8, 2)) if tall else (32, 32, 4, 2)
    num_queries, tile, warps, stages = (
        given or own for given, own in zip((queries_tile, tile, warps, stages), shape, strict=True)
    )
    tiles = num_tokens // num_queries + len(rows)
    _chunk[(tiles, num_heads)](
        queries, *numbers_of(cache), out, tables, query_starts, contexts,
        args.sinks if args.sinks is not None else queries,
        args.scale, args.softcap or 1.0, args.window or NO_WINDOW, tables.stride(0), rows.start, rows.stop,
        num_heads, kv_heads, dim, padded, block_size, num_queries, tile,
        args.softcap is not None, args.window is not None, args.sinks is not None,
        args.window is None and padded == dim, cache.key_scales is not None, precision_of(queries),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
