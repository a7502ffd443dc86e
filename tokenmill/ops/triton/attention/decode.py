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
from tokenmill.ops.triton.attention.kv_dtypes import as_factors, numbers_of
from tokenmill.ops.triton.attention.select import TILE
from tokenmill.ops.triton.elementwise.activation import tanh
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import (
    is_last_to_arrive,
    launch_dependents,
    launch_options,
    split_counters,
    wait_for_previous,
)
from tokenmill.ops.triton.launch.sizes import next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)  # softmax is computed with powers of two
NO_WINDOW = 1 << 30
LOWEST = tl.constexpr(-1e30)  # the highest score where no key was seen


@triton.jit
def share_of(context, window, split, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The oldest key that is seen; keys [low, high) of this split; how many splits have any, or have to say so."""
    oldest = tl.maximum(context - window, 0)
    first = oldest // TILE * TILE
    each = (tl.cdiv(context - first, TILE) + NUM_SPLITS - 1) // NUM_SPLITS * TILE
    low = first + split * each
    used = tl.maximum(tl.cdiv(context - first, tl.maximum(each, 1)), 1)
    return oldest, low, tl.minimum(low + each, context), used


@triton.jit
def tile_of(
    keys, values, key_scales, value_scales, table, kv_head, places, seen, d,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Keys and values [TILE, D] and their scales; where they have none, something in their place"""
    blocks = tl.load(table + places // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    lines = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
    inside = seen[:, None] & (d < DIM)[None, :]
    key = tl.load(keys + lines[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    value = tl.load(values + lines[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    key_scale, value_scale = seen, seen
    if IS_SCALED:
        key_scale = tl.load(key_scales + lines, mask=seen, other=0.0)
        value_scale = tl.load(value_scales + lines, mask=seen, other=0.0)
    return key, value, key_scale, value_scale


@triton.jit
def add_tile(
    highest, total, mixed, query, key, value, key_scale, value_scale, seen, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax state [16], [16], [16, D] of some keys and of those of a tile"""
    key, value = as_factors(key, query.dtype), as_factors(value, query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if IS_SCALED:
        scores *= key_scale[None, :]
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores = tl.where(seen[None, :], scores * LOG2E, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, axis=1)
    if IS_SCALED:
        weights *= value_scale[None, :]
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return new_highest, total, mixed


@triton.jit
def _store_result(
    highest, total, mixed, out, sinks, row, heads, is_head, d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + heads, mask=is_head, other=0.0) * LOG2E - highest)
    target = out + (row * NUM_HEADS + heads)[:, None] * DIM + d[None, :]
    mixed = mixed / tl.maximum(total, 1e-30)[:, None]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=is_head[:, None] & (d < DIM)[None, :])


@triton.jit
def _part_of(parts, lse, line, split, used, highest, is_head, d, DIM: tl.constexpr):
    """What a split left, and its share"""
    is_there = is_head & (line * 0 + split < used)
    share = tl.exp2(tl.load(lse + line + split, mask=is_there, other=float("-inf"), cache_modifier=".cg") - highest)
    inside = is_there[:, None] & (d < DIM)[None, :]
    part = tl.load(parts + (line + split)[:, None] * DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    return part, share[:, None]


@triton.jit
def finish(
    highest, total, mixed, out, parts, lse, arrived, sinks, row, kv_head, split, used, d,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """A split's state becomes the result where it is the only one; else it is left for the last, which joins all."""
    member = tl.arange(0, 16)
    heads, is_head = kv_head * GROUP + member, member < GROUP
    if NUM_SPLITS == 1 or used == 1:
        _store_result(highest, total, mixed, out, sinks, row, heads, is_head, d, NUM_HEADS, DIM, HAS_SINKS)
    else:
        line = (row * NUM_HEADS + heads) * NUM_SPLITS
        inside = is_head[:, None] & (d < DIM)[None, :]
        tl.store(parts + (line + split)[:, None] * DIM + d[None, :], mixed / total[:, None], mask=inside)
        tl.store(lse + line + split, highest + tl.log2(total), mask=is_head)
        if is_last_to_arrive(arrived + row * KV_HEADS + kv_head, used):
            splits = tl.arange(0, NUM_SPLITS)
            is_there = is_head[:, None] & (splits < used)[None, :]
            all_lse = lse + line[:, None] + splits[None, :]
            left = tl.load(all_lse, mask=is_there, other=float("-inf"), cache_modifier=".cg")
            highest = tl.maximum(tl.max(left, axis=1), LOWEST)
            total = tl.sum(tl.exp2(left - highest[:, None]), axis=1)
            mixed = tl.zeros(mixed.shape, tl.float32)
            for first in range(0, used, 4):  # together: each is a way to the memory and back
                a, a_share = _part_of(parts, lse, line, first, used, highest, is_head, d, DIM)
                b, b_share = _part_of(parts, lse, line, first + 1, used, highest, is_head, d, DIM)
                c, c_share = _part_of(parts, lse, line, first + 2, used, highest, is_head, d, DIM)
                e, e_share = _part_of(parts, lse, line, first + 3, used, highest, is_head, d, DIM)
                mixed += a * a_share + b * b_share + c * c_share + e * e_share
            _store_result(highest, total, mixed, out, sinks, row, heads, is_head, d, NUM_HEADS, DIM, HAS_SINKS)


@kernel_unspecialized("table_stride")
def _decode(
    queries, keys, values, key_scales, value_scales, out, parts, lse, arrived, tables, contexts, sinks,
    scale, softcap, window, table_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    kv_head = tl.program_id(0)  # first: the heads of a block lie side by side, and are read at the same time
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    wait_for_previous(OVERLAPS)
    oldest, low, high, used = share_of(tl.load(contexts + row), window, split, TILE, NUM_SPLITS)
    member, d = tl.arange(0, 16), tl.arange(0, DIM_PADDED)
    q_inside = (member < GROUP)[:, None] & (d < DIM)[None, :]
    lines = row * NUM_HEADS + kv_head * GROUP + member
    query = tl.load(queries + lines[:, None] * DIM + d[None, :], mask=q_inside, other=0.0)
    highest = tl.full((16,), LOWEST, tl.float32)
    total = tl.zeros((16,), tl.float32)
    mixed = tl.zeros((16, DIM_PADDED), tl.float32)
    table = tables + row * table_stride
    for start in range(low, high, TILE):
        places = start + tl.arange(0, TILE)
        seen = (places < high) & (places >= oldest)
        key, value, key_scale, value_scale = tile_of(
            keys, values, key_scales, value_scales, table, kv_head, places, seen, d,
            KV_HEADS, DIM, BLOCK_SIZE, IS_SCALED,
        )  # fmt: skip
        highest, total, mixed = add_tile(
            highest, total, mixed, query, key, value, key_scale, value_scale, seen, scale, softcap,
            HAS_SOFTCAP, IS_SCALED, PRECISION,
        )  # fmt: skip
    if split < used:
        finish(
            highest, total, mixed, out, parts, lse, arrived, sinks, row, kv_head, split, used, d,
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
    tile: int | None = None,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """queries, out [R, heads, D]; contexts [R], 0 for rows that only fill up a batch."""
    num_rows, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    group = num_heads // kv_heads
    assert group <= 16, "a key head serves at most 16 query heads"
    parts = parts_for(out, num_splits)
    sinks = args.sinks if args.sinks is not None else queries
    padded = max(16, next_power_of_2(dim))
    tile = tile or (TILE if padded * queries.element_size() <= 512 else TILE // 2)  # in a multiprocessor's own memory
    _decode[(kv_heads, num_rows, num_splits)](
        queries, *numbers_of(cache), out, *parts, tables, contexts, sinks,
        args.scale, args.softcap or 1.0, args.window or NO_WINDOW, tables.stride(0),
        num_heads, kv_heads, group, dim, padded, block_size, tile, num_splits,
        args.softcap is not None, args.sinks is not None, cache.key_scales is not None, precision_of(queries),
        num_warps=warps, num_stages=stages, **launch_options(),
    )  # fmt: skip


def parts_for(out: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where splits leave what they have, the logarithms of their sums, and that they are done; out [R, heads, D]"""
    if num_splits == 1:
        return out, out, out
    num_rows, num_heads, dim = out.shape
    parts = torch.empty(num_rows, num_heads, num_splits, dim, dtype=torch.float32, device=out.device)
    return parts, torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device), split_counters(out.device)


def precision_of(x: torch.Tensor) -> str:
    """float32 models are computed in float32, not in the matrix units' shortened form of it."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
