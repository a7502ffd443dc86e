"""One query a row over its paged context: the memory-bound half of attention.

The heads that share a key head are one tile of queries, so every cached key is read once. A context is cut into
splits that run side by side; each leaves its weighted values and the logarithm of its softmax sum, and the last joins
them:

    context of a row:   [ split 0 | split 1 | ... ]      out = Σ exp(lse_s - max) * out_s / Σ exp(lse_s - max)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.activation import tanh
from tokenmill.ops.triton.kernel import kernel_for_any
from tokenmill.ops.triton.overlap import arrivals, is_last_to_arrive, launch_options, let_next_begin, wait_for_previous

LOG2E = tl.constexpr(1.4426950408889634)  # softmax is computed with powers of two
TILE = 64  # keys looked at together
NO_WINDOW = 1 << 30
MAX_SPLITS = 32
PROGRAMS_WANTED = 512  # enough to keep every multiprocessor busy; more cost more to join than they save


@kernel_for_any("table_stride")
def _decode(
    queries, keys, values, key_scales, value_scales, out, part_out, part_lse, arrived, tables, contexts, sinks,
    scale, softcap, window, table_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + row)
    oldest = tl.maximum(context - window, 0)
    first = oldest // TILE * TILE
    per_split = (tl.cdiv(context - first, TILE) + NUM_SPLITS - 1) // NUM_SPLITS * TILE
    low = first + split * per_split
    high = tl.minimum(low + per_split, context)

    member = tl.arange(0, 16)
    heads = kv_head * GROUP + member
    d = tl.arange(0, DIM_PADDED)
    is_head = member < GROUP
    q_inside = is_head[:, None] & (d < DIM)[None, :]
    query = tl.load(queries + (row * NUM_HEADS + heads)[:, None] * DIM + d[None, :], mask=q_inside, other=0.0)
    highest = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    mixed = tl.zeros((16, DIM_PADDED), tl.float32)
    table = tables + row * table_stride
    for start in range(low, high, TILE):
        places = start + tl.arange(0, TILE)
        seen = (places < high) & (places >= oldest)
        blocks = tl.load(table + places // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        lines = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
        kv_inside = seen[:, None] & (d < DIM)[None, :]
        key = tl.load(keys + lines[:, None] * DIM + d[None, :], mask=kv_inside, other=0.0).to(query.dtype)
        value = tl.load(values + lines[:, None] * DIM + d[None, :], mask=kv_inside, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if IS_SCALED:
            scores *= tl.load(key_scales + lines, mask=seen, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        scores = tl.where(seen[None, :], scores * LOG2E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_SCALED:
            weights *= tl.load(value_scales + lines, mask=seen, other=0.0)[None, :]
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        highest = new_highest
    if NUM_SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2E
            total += tl.exp2(sink - highest)
        mixed = mixed / tl.maximum(total, 1e-30)[:, None]
        target = out + (row * NUM_HEADS + heads)[:, None] * DIM + d[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=q_inside)
    else:
        mixed = mixed / tl.maximum(total, 1e-30)[:, None]
        lse = highest + tl.log2(tl.maximum(total, 1e-30))
        line = (row * NUM_HEADS + heads) * NUM_SPLITS
        is_used = is_head & (member * 0 + low < high)
        target = part_out + (line + split)[:, None] * DIM + d[None, :]
        tl.store(target, mixed, mask=is_used[:, None] & (d < DIM)[None, :])
        tl.store(part_lse + line + split, lse, mask=is_used)
        if is_last_to_arrive(arrived + row * KV_HEADS + kv_head, NUM_SPLITS):
            used = tl.cdiv(context - first, tl.maximum(per_split, 1))  # the others had nothing to do
            joined = tl.full((16,), -1e30, tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2E
                joined = tl.maximum(joined, sink)
            for other in range(used):
                lse = tl.load(part_lse + line + other, mask=is_head, other=0.0, cache_modifier=".cg")
                joined = tl.maximum(joined, lse)
            total = tl.zeros((16,), tl.float32)
            if HAS_SINKS:
                total = tl.exp2(sink - joined)
            mixed = tl.zeros((16, DIM_PADDED), tl.float32)
            for other in range(used):
                lse = tl.load(part_lse + line + other, mask=is_head, other=0.0, cache_modifier=".cg")
                share = tl.exp2(lse - joined)
                total += share
                source = part_out + (line + other)[:, None] * DIM + d[None, :]
                mixed += share[:, None] * tl.load(source, mask=q_inside, other=0.0, cache_modifier=".cg")
            mixed = mixed / tl.maximum(total, 1e-30)[:, None]
            result = out + (row * NUM_HEADS + heads)[:, None] * DIM + d[None, :]
            tl.store(result, mixed.to(out.dtype.element_ty), mask=q_inside)


def num_splits_for(num_rows: int, kv_heads: int, max_context: int, tile: int) -> int:
    """So many that all programs together fill the device, but none without a tile of its own."""
    wanted = PROGRAMS_WANTED // max(1, num_rows * kv_heads)
    splits = max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_context, tile)))
    return 1 << (splits.bit_length() - 1)  # few variants to compile


def decode_attention(
    queries: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    args: AttentionArgs,
    out: torch.Tensor,
    num_splits: int,
    *,
    tile: int = TILE,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """queries, out [R, heads, D]; contexts [R], 0 for rows that only fill up a batch."""
    num_rows, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    group = num_heads // kv_heads
    assert group <= 16, "a key head serves at most 16 query heads"
    part_out = part_lse = arrived = out
    if num_splits > 1:
        part_out = torch.empty(num_rows, num_heads, num_splits, dim, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=out.device)
        arrived = arrivals(out.device)
    sinks = args.sinks if args.sinks is not None else queries
    padded = max(16, triton.next_power_of_2(dim))
    _decode[(num_rows, kv_heads, num_splits)](
        queries, cache.keys, cache.values, *scales_of(cache), out, part_out, part_lse, arrived, tables, contexts, sinks,
        args.scale, args.softcap or 1.0, args.window or NO_WINDOW, tables.stride(0),
        num_heads, kv_heads, group, dim, padded, block_size, tile, num_splits,
        args.softcap is not None, args.sinks is not None, cache.key_scales is not None, precision_of(queries),
        num_warps=warps, num_stages=stages, **launch_options(),
    )  # fmt: skip


def scales_of(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and values; where there are none, something to pass in their place."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys, cache.values
    return cache.key_scales, cache.value_scales


def precision_of(x: torch.Tensor) -> str:
    """float32 models are computed in float32, not in the matrix units' shortened form of it."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
