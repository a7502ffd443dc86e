"""Attention whose sums depend on a query and its context alone, never on the batch or on how a prompt was cut.

A tile is a few consecutive queries of one row, each with all the heads that share a key head. Keys are cut into
segments at fixed positions. A segment's softmax state (highest score, sum, weighted values) is worked out by itself and
then joined with that of the segments before it, in their order:

    context   [ segment 0 | segment 1 | ... | the query's own ]      state = join(join(state 0, state 1), ...)

Where there are many tiles a program takes the segments in turn; where a few rows decode, each segment has programs of
its own, and a second kernel joins. A key that a query does not see changes no bit of its state, so it does not matter
which other queries share the tile. Multiplications and additions are not fused: a compiler would do it here and not
there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.decode import LOG2E, NO_WINDOW, precision_of
from tokenmill.ops.triton.attention.kv_dtypes import as_factors, numbers_of
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.elementwise.activation import tanh
from tokenmill.ops.triton.launch.kernel import kernel, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.launch.sizes import cdiv, next_power_of_2

SEGMENT = 256  # keys
PROGRAMS_WANTED = 128
LOWEST = tl.constexpr(-1e30)  # the highest score of a query that has seen no key


@triton.jit
def _joined(highest, total, mixed, next_highest, next_total, next_mixed):
    """One state after another: [LINES], [LINES], [LINES, D]"""
    both = tl.maximum(highest, next_highest)
    old, new = tl.exp2(highest - both), tl.exp2(next_highest - both)
    return both, total * old + next_total * new, mixed * old[:, None] + next_mixed * new[:, None]


@triton.jit
def _segment_state(
    query, keys, values, key_scales, value_scales, table, kv_head, positions, low, high, context,
    scale, softcap, window, d,
    LINES: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax state of keys [low, high), of which each line sees those up to its position and within its window."""
    highest = tl.full((LINES,), LOWEST, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    mixed = tl.zeros((LINES, DIM_PADDED), tl.float32)
    for start in range(low, high, TILE):
        places = start + tl.arange(0, TILE)
        inside = places < context
        blocks = tl.load(table + places // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        lines = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
        kv_inside = inside[:, None] & (d < DIM)[None, :]
        key = tl.load(keys + lines[:, None] * DIM + d[None, :], mask=kv_inside, other=0.0)
        value = tl.load(values + lines[:, None] * DIM + d[None, :], mask=kv_inside, other=0.0)
        key, value = as_factors(key, query.dtype), as_factors(value, query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if IS_SCALED:
            scores = scores * tl.load(key_scales + lines, mask=inside, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        seen = (places[None, :] <= positions[:, None]) & (places[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores * LOG2E, LOWEST)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp2(scores - new_highest[:, None]), 0.0)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_SCALED:
            weights = weights * tl.load(value_scales + lines, mask=inside, other=0.0)[None, :]
        mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    return highest, total, mixed


@kernel_unspecialized("num_rows")
def _attend(
    queries, keys, values, key_scales, value_scales, out, part_states, part_mixed,
    tables, query_starts, contexts, sinks, scale, softcap, window, table_stride, num_rows,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, NUM_SEGMENTS: tl.constexpr, IN_TURN: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_SCALED: tl.constexpr, ARE_SINGLE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    QUERIES: tl.constexpr = LINES // MEMBERS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a row have the most keys: they begin first
    kv_head = tl.program_id(1)
    if ARE_SINGLE:  # one query a row
        row, begin, length, offset = tile, tile, 1, 0
    else:
        low_row, high_row = 0, num_rows
        while high_row - low_row > 1:  # the last row whose tiles begin at or before this one
            middle = (low_row + high_row) // 2
            if tl.load(query_starts + middle) // QUERIES + middle <= tile:
                low_row = middle
            else:
                high_row = middle
        row = low_row
        begin = tl.load(query_starts + row)
        length = tl.load(query_starts + row + 1) - begin
        offset = (tile - begin // QUERIES - row) * QUERIES
    context = tl.load(contexts + row)
    if offset < length:  # a row that only fills up has context 0, sees nothing and gets zeros
        lines = tl.arange(0, LINES)
        local, member = offset + lines // MEMBERS, lines % MEMBERS
        positions = context - length + local
        heads = kv_head * GROUP + member
        d = tl.arange(0, DIM_PADDED)
        is_line = (local < length) & (member < GROUP)
        places = (begin + local).to(tl.int64) * NUM_HEADS + heads
        q_inside = is_line[:, None] & (d < DIM)[None, :]
        query = tl.load(queries + places[:, None] * DIM + d[None, :], mask=q_inside, other=0.0)
        table = tables + tl.cast(row, tl.int64) * table_stride
        oldest = tl.maximum(context - length + offset - window + 1, 0)
        last = tl.minimum(context - length + offset + QUERIES, context)
        if IN_TURN:
            highest = tl.full((LINES,), LOWEST, tl.float32)
            total = tl.zeros((LINES,), tl.float32)
            mixed = tl.zeros((LINES, DIM_PADDED), tl.float32)
            for first in range(oldest // SEGMENT * SEGMENT, last, SEGMENT):
                next_highest, next_total, next_mixed = _segment_state(
                    query, keys, values, key_scales, value_scales, table, kv_head, positions,
                    tl.maximum(first, oldest // TILE * TILE), tl.minimum(first + SEGMENT, last), context,
                    scale, softcap, window, d, LINES, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, TILE, HAS_SOFTCAP,
                    IS_SCALED, PRECISION,
                )  # fmt: skip
                highest, total, mixed = _joined(highest, total, mixed, next_highest, next_total, next_mixed)
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks + heads, mask=is_line, other=0.0) * LOG2E - highest)
            mixed = mixed / tl.maximum(total, 1e-30)[:, None]
            tl.store(out + places[:, None] * DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=q_inside)
        else:
            first = tl.program_id(2) * SEGMENT
            if (first < last) & (first + SEGMENT > oldest):
                highest, total, mixed = _segment_state(
                    query, keys, values, key_scales, value_scales, table, kv_head, positions,
                    tl.maximum(first, oldest // TILE * TILE), tl.minimum(first + SEGMENT, last), context,
                    scale, softcap, window, d, LINES, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, TILE, HAS_SOFTCAP,
                    IS_SCALED, PRECISION,
                )  # fmt: skip
                part = places * NUM_SEGMENTS + tl.program_id(2)
                tl.store(part_states + part * 2, highest, mask=is_line)
                tl.store(part_states + part * 2 + 1, total, mask=is_line)
                tl.store(part_mixed + part[:, None] * DIM + d[None, :], mixed, mask=q_inside)


@kernel
def _join_segments(
    part_states, part_mixed, contexts, sinks, out, window,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Join the segments of rows with one query each; one program for each head."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    place = tl.program_id(0).to(tl.int64)  # row * heads + head
    context = tl.load(contexts + place // NUM_HEADS)
    d = tl.arange(0, DIM_PADDED)
    one = tl.arange(0, 1)
    highest = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((1, DIM_PADDED), tl.float32)
    for number in range(tl.maximum(context - window, 0) // SEGMENT, tl.cdiv(context, SEGMENT)):
        part = place * NUM_SEGMENTS + number
        states = part_states + part * 2 + one
        parts = tl.load(part_mixed + part * DIM + d, mask=d < DIM, other=0.0)[None, :]
        highest, total, mixed = _joined(highest, total, mixed, tl.load(states), tl.load(states + 1), parts)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + place % NUM_HEADS + one) * LOG2E - highest)
    mixed = mixed / tl.maximum(total, 1e-30)[:, None]
    targets = out + place * DIM + d[None, :] + one[:, None]
    tl.store(targets, mixed.to(out.dtype.element_ty), mask=(d < DIM)[None, :])


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
    lines, tile, warps, stages = (64, 64, 4, 2) if queries.dtype != torch.float32 else (16, 32, 4, 2)
    are_single = plan.max_queries == 1
    tiles = num_rows if are_single else num_tokens // (lines // members) + num_rows
    num_segments = next_power_of_2(cdiv(plan.max_position, SEGMENT))  # few variants to compile
    if in_turn is None:
        in_turn = not are_single or num_segments == 1 or tiles * kv_heads >= PROGRAMS_WANTED
    states = mixed = out
    if in_turn:
        num_segments = 1
    else:
        states = torch.empty(num_tokens, num_heads, num_segments, 2, dtype=torch.float32, device=out.device)
        mixed = torch.empty(num_tokens, num_heads, num_segments, dim, dtype=torch.float32, device=out.device)
    sinks = args.sinks if args.sinks is not None else queries
    window = args.window or NO_WINDOW
    padded = max(16, next_power_of_2(dim))
    _attend[(tiles, kv_heads, num_segments)](
        queries, *numbers_of(cache), out, states, mixed,
        plan.tables, plan.query_starts, plan.contexts, sinks,
        args.scale, args.softcap or 1.0, window, plan.tables.stride(0), num_rows,
        num_heads, kv_heads, group, members, dim, padded, block_size, lines, tile, SEGMENT, num_segments, in_turn,
        args.softcap is not None, args.sinks is not None, cache.key_scales is not None, are_single,
        precision_of(queries),
        num_warps=warps, num_stages=stages, enable_fp_fusion=False, **launch_options(),
    )  # fmt: skip
    if not in_turn:
        _join_segments[(num_rows * num_heads,)](
            states, mixed, plan.contexts, sinks, out, window,
            num_heads, dim, padded, SEGMENT, num_segments, args.sinks is not None,
            num_warps=1, enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip
    return out.flatten(1)
