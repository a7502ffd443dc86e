"""Latent attention (MLA) over the paged cache, in its absorbed form (see `ops/reference/latent_attention.py`).

All heads attend to the same entries, so an entry is read once per tile of heads. Decoding is bound by reading the
entries. The kernels of a layer:

    _absorb     queries × each head's matrix → queries over latents; norms, rotates and writes the entries to the cache
    _attend     tiles of (query, head) pairs over entries; a context is cut into splits that run in parallel
    _expand     merges the splits of a pair × each head's matrix → values; `_expand_token` for a few tokens

A tile has 16 pairs for decoding rows, and 64 for prompts: 64 / heads queries with all their heads. Whole long prompts
are computed in the expanded form (`latent_prompts.py`), except by deterministic kernels. `_absorb` and `_expand` load
their matrices before the previous kernel has ended; for a few rows `_attend` also prefetches its entries, all of which
but the newest are already in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.interface import LatentInputs
from tokenmill.ops.triton.attention.latent_prompts import can_be_expanded, expanded_prompt
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.select import TILE
from tokenmill.ops.triton.attention.softmax import LOG2E, LOWEST, add_keys, attention_output, empty_state
from tokenmill.ops.triton.attention.tiles import row_of_tile
from tokenmill.ops.triton.launch.capabilities import Capabilities, capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import fetch_early, launch_dependents, launch_options, wait_for_previous

RANK_BLOCK = 64  # rows of a head's matrix per program of `_absorb`
VALUE_BLOCK = 32  # rows per program of `_expand`
TOKEN_BLOCK = 16  # rows per program of `_expand_token`
MAX_SPLITS = 64  # per context
VERY_FEW_TOKENS = 4  # up to this many tokens are multiplied one by one, and their entries prefetched
FEW_TOKENS = 16  # tokens per tile of `_absorb` and `_expand`, unless a step has hundreds


class LatentTiles(NamedTuple):
    """The tile configuration of `_attend`."""

    pairs: int  # (query, head) pairs per program
    keys: int  # entries per iteration
    warps: int
    stages: int


def tiles_for(dtype: torch.dtype, num_heads: int, *, are_single: bool, keys_each: int = 0) -> LatentTiles:
    """Return the tile configuration. `keys_each`: the number of entries per program."""
    if dtype == torch.float32:
        return LatentTiles(16, 16, 4, 1)
    if are_single and num_heads <= 16:
        return LatentTiles(16, 2 * TILE, 4, 2) if keys_each >= 4 * TILE else LatentTiles(16, TILE // 2, 4, 2)
    return LatentTiles(64, TILE, 8, 2)


@triton.jit
def _rotated(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@kernel_unspecialized("num_tokens", "num_absorbed", "query_stride", "entry_stride")
def _absorb(
    queries, entries, latents, slots, norm, cos, sin, absorb, out, num_tokens, num_absorbed, query_stride, entry_stride,
    eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PADDED: tl.constexpr, ROPE: tl.constexpr, HALF_PADDED: tl.constexpr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    IS_ROTATED: tl.constexpr, PRECISION: tl.constexpr, IS_ROW: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, HEADS, RANK + ROPE]; the last block of programs rotates and writes entries instead of multiplying. Only
    the first num_absorbed queries are multiplied; for the others only the rotated part is written. IS_ROW: a single
    token, multiplied without tensor cores."""
    launch_dependents(OVERLAPS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    wide = tokens.to(tl.int64)
    head, block = tl.program_id(1), tl.program_id(2)
    WIDTH: tl.constexpr = RANK + ROPE
    target = out + (wide * HEADS + head) * WIDTH
    if block * BLOCK < RANK:
        ranks = block * BLOCK + tl.arange(0, BLOCK)
        offs_k = tl.arange(0, NOPE_PADDED)
        is_there = (ranks < RANK)[:, None] & (offs_k < NOPE)[None, :]
        matrix = tl.load(absorb + (head * RANK + ranks)[:, None] * NOPE + offs_k[None, :], mask=is_there, other=0.0)
        wait_for_previous(OVERLAPS)
        if IS_ROW:
            query = tl.load(queries + head * (NOPE + ROPE) + offs_k, mask=offs_k < NOPE, other=0.0)
            product = tl.sum(matrix.to(tl.float32) * query.to(tl.float32)[None, :], axis=1)
            tl.store(out + head * WIDTH + ranks, product.to(out.dtype.element_ty), mask=ranks < RANK)
        elif tl.program_id(0) * TOKENS < num_absorbed:
            plain = queries + wide[:, None] * query_stride + head * (NOPE + ROPE) + offs_k[None, :]
            query = tl.load(plain, mask=is_token[:, None] & (offs_k < NOPE)[None, :], other=0.0)
            product = tl.dot(query, tl.trans(matrix), input_precision=PRECISION)
            is_result = is_token[:, None] & (ranks < RANK)[None, :]
            tl.store(target[:, None] + ranks[None, :], product.to(out.dtype.element_ty), mask=is_result)
    else:
        wait_for_previous(OVERLAPS)
        half = tl.arange(0, HALF_PADDED)
        is_pair = is_token[:, None] & (half < ROPE // 2)[None, :]
        turn, bend = tl.full((TOKENS, HALF_PADDED), 1.0, tl.float32), tl.zeros((TOKENS, HALF_PADDED), tl.float32)
        if IS_ROTATED:
            turn = tl.load(cos + wide[:, None] * (ROPE // 2) + half[None, :], mask=is_pair, other=0.0)
            bend = tl.load(sin + wide[:, None] * (ROPE // 2) + half[None, :], mask=is_pair, other=0.0)
        source = queries + wide[:, None] * query_stride + head * (NOPE + ROPE) + NOPE + half[None, :]
        first = tl.load(source, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(source + ROPE // 2, mask=is_pair, other=0.0).to(tl.float32)
        first, second = _rotated(first, second, turn, bend)
        rope_at = target[:, None] + RANK + half[None, :]
        tl.store(rope_at, first.to(out.dtype.element_ty), mask=is_pair)
        tl.store(rope_at + ROPE // 2, second.to(out.dtype.element_ty), mask=is_pair)
        # Entries are distributed over the heads' programs.
        ours = head * EACH + tl.arange(0, EACH)
        numbers = (tl.program_id(0) * TOKENS + ours).to(tl.int64)
        is_ours = (ours < TOKENS) & (numbers < num_tokens)
        kept = latents + tl.load(slots + numbers, mask=is_ours, other=0) * WIDTH
        entry = entries + numbers * entry_stride
        is_key = is_ours[:, None] & (half < ROPE // 2)[None, :]
        key_turn = tl.full((EACH, HALF_PADDED), 1.0, tl.float32)
        key_bend = tl.zeros((EACH, HALF_PADDED), tl.float32)
        if IS_ROTATED:
            key_turn = tl.load(cos + numbers[:, None] * (ROPE // 2) + half[None, :], mask=is_key, other=0.0)
            key_bend = tl.load(sin + numbers[:, None] * (ROPE // 2) + half[None, :], mask=is_key, other=0.0)
        key = entry[:, None] + RANK + half[None, :]
        low = tl.load(key, mask=is_key, other=0.0).to(tl.float32)
        high = tl.load(key + ROPE // 2, mask=is_key, other=0.0).to(tl.float32)
        low, high = _rotated(low, high, key_turn, key_bend)
        kept_key = kept[:, None] + RANK + half[None, :]
        tl.store(kept_key, low.to(entries.dtype.element_ty).to(latents.dtype.element_ty), mask=is_key)
        tl.store(kept_key + ROPE // 2, high.to(entries.dtype.element_ty).to(latents.dtype.element_ty), mask=is_key)
        columns = tl.arange(0, RANK_PADDED)
        is_value = is_ours[:, None] & (columns < RANK)[None, :]
        latent = tl.load(entry[:, None] + columns[None, :], mask=is_value, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(latent * latent, axis=1) / RANK + eps)
        weight = tl.load(norm + columns, mask=columns < RANK, other=0.0)
        normed = (latent * inverse[:, None] * weight[None, :]).to(entries.dtype.element_ty)
        tl.store(kept[:, None] + columns[None, :], normed.to(latents.dtype.element_ty), mask=is_value)


@triton.jit
def split_size(context, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return the number of entries per split, a multiple of the tile; the last splits of a short context have none."""
    return (tl.cdiv(context, TILE) + NUM_SPLITS - 1) // NUM_SPLITS * TILE


@triton.jit
def _entries_at(latents, table, positions, inside, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return latents + (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * WIDTH


@triton.jit
def _ask_for_entries(
    latents, table, context, split, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first entries of a split, one per thread, if their size is a multiple of 16 bytes."""
    BYTES: tl.constexpr = WIDTH * latents.dtype.element_ty.primitive_bitwidth // 8
    if BYTES % 16 == 0:
        each = split_size(context, TILE, NUM_SPLITS)
        positions = split * each + tl.arange(0, THREADS)
        inside = positions < tl.minimum(split * each + each, context)
        places = _entries_at(latents, table, positions, inside, WIDTH, BLOCK_SIZE)
        fetch_early(places.to(tl.int64, bitcast=True), tl.where(inside, BYTES, 0))


@triton.jit
def add_entries(
    state, query, turned, latents, table, offs_n, inside, is_seen, scale,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the softmax state of (query, head) pairs after the visible ones of the entries at positions offs_n."""
    offs_r, offs_p = tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
    is_rank, is_rope = (offs_r < RANK)[None, :], (offs_p < ROPE)[None, :]
    entry = _entries_at(latents, table, offs_n, inside, RANK + ROPE, BLOCK_SIZE)[:, None]
    latent = tl.load(entry + offs_r[None, :], mask=inside[:, None] & is_rank, other=0.0).to(query.dtype)
    key = tl.load(entry + RANK + offs_p[None, :], mask=inside[:, None] & is_rope, other=0.0).to(query.dtype)
    qk = tl.dot(turned, tl.trans(key), input_precision=PRECISION)
    qk = tl.dot(query, tl.trans(latent), qk, input_precision=PRECISION) * (scale * LOG2E)
    qk = tl.where(is_seen, qk, float("-inf"))
    return add_keys(state, qk, latent, inside, False, PRECISION)


@triton.jit
def store_mixtures(
    state, out, parts, lse, q_rows, is_pair, split, is_used,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the result if there is one split; else this split's part, if it has entries."""
    offs_r = tl.arange(0, RANK_PADDED)
    is_result = is_pair[:, None] & (offs_r < RANK)[None, :]
    if NUM_SPLITS == 1:
        result = attention_output(state, is_pair, False)
        tl.store(out + q_rows[:, None] * RANK + offs_r[None, :], result.to(out.dtype.element_ty), mask=is_result)
    elif is_used:
        m_i, l_i, acc = state
        index = q_rows * NUM_SPLITS + split
        tl.store(parts + index[:, None] * RANK + offs_r[None, :], acc, mask=is_result)
        tl.store(lse + index * 2, m_i, mask=is_pair)
        tl.store(lse + index * 2 + 1, l_i, mask=is_pair)


@kernel_unspecialized("num_rows", "table_stride", "first_row")
def _attend(
    queries, latents, out, parts, lse, tables, query_starts, contexts, scale, table_stride, first_row, num_rows,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, ARE_SINGLE: tl.constexpr, PRECISION: tl.constexpr, THREADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, HEADS, RANK] if there is one split; else each split's part, for `_expand`. THREADS: how many threads
    prefetch entries, for rows of one query; 0: none."""
    launch_dependents(OVERLAPS)
    if OVERLAPS and THREADS > 0:
        early_row = first_row + tl.num_programs(0) - 1 - tl.program_id(0)
        early_table = tables + tl.cast(early_row, tl.int64) * table_stride
        _ask_for_entries(
            latents, early_table, tl.load(contexts + early_row), tl.program_id(2), RANK + ROPE, BLOCK_SIZE, TILE,
            NUM_SPLITS, THREADS,
        )  # fmt: skip
    wait_for_previous(OVERLAPS)
    QUERIES: tl.constexpr = PAIRS // MEMBERS  # per tile
    WIDTH: tl.constexpr = RANK + ROPE
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a row have the most keys: they start first
    first_head, split = tl.program_id(1) * MEMBERS, tl.program_id(2)
    if ARE_SINGLE:  # one query per row
        row, begin, length, offset = first_row + tile, first_row + tile, 1, 0
    else:
        row, begin, length, offset = row_of_tile(query_starts, tile, first_row, num_rows, QUERIES)
    if offset < length:
        context = tl.load(contexts + row)
        pairs = tl.arange(0, PAIRS)
        local, heads = offset + pairs // MEMBERS, first_head + pairs % MEMBERS
        is_pair = (local < length) & (heads < HEADS)
        q_positions = context - length + local
        q_rows = (begin + local).to(tl.int64) * HEADS + heads
        offs_r, offs_p = tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
        source = queries + q_rows[:, None] * WIDTH
        is_rank, is_rope = (offs_r < RANK)[None, :], (offs_p < ROPE)[None, :]
        query = tl.load(source + offs_r[None, :], mask=is_pair[:, None] & is_rank, other=0.0)
        turned = tl.load(source + RANK + offs_p[None, :], mask=is_pair[:, None] & is_rope, other=0.0)
        state = empty_state(PAIRS, RANK_PADDED)
        last = tl.minimum(context - length + offset + QUERIES, context)
        each = split_size(last, TILE, NUM_SPLITS)
        low = split * each
        table = tables + tl.cast(row, tl.int64) * table_stride
        for start in range(low, tl.minimum(low + each, last), TILE):
            offs_n = start + tl.arange(0, TILE)
            inside = offs_n < last
            is_seen = offs_n[None, :] <= q_positions[:, None]
            state = add_entries(
                state, query, turned, latents, table, offs_n, inside, is_seen, scale,
                RANK, RANK_PADDED, ROPE, ROPE_PADDED, BLOCK_SIZE, PRECISION,
            )  # fmt: skip
        store_mixtures(state, out, parts, lse, q_rows, is_pair, split, low < last, RANK, RANK_PADDED, NUM_SPLITS)


@triton.jit
def _merged(
    parts, lse, q_rows, used, columns, inside, RANK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Merge some columns of the attention outputs of TOKENS pairs, float32 [TOKENS, columns], over their first splits,
    `used` [TOKENS] of each."""
    numbers = tl.arange(0, NUM_SPLITS)[None, :]
    splits, is_used = q_rows[:, None] * NUM_SPLITS + numbers, numbers < used[:, None]
    m_i = tl.load(lse + splits * 2, mask=is_used, other=LOWEST)
    l_i = tl.load(lse + splits * 2 + 1, mask=is_used, other=0.0)
    m_new = tl.max(m_i, axis=1)
    total = tl.maximum(tl.sum(tl.exp2(m_i - m_new[:, None]) * l_i, axis=1), 1e-30)
    acc = tl.zeros((TOKENS, columns.shape[0]), tl.float32)
    for split in range(tl.max(used, axis=0)):
        index = q_rows * NUM_SPLITS + split
        weight = tl.exp2(tl.load(lse + index * 2, mask=split < used, other=LOWEST) - m_new) / total
        source = parts + index[:, None] * RANK + columns[None, :]
        acc += tl.load(source, mask=(split < used)[:, None] & inside[None, :], other=0.0) * weight[:, None]
    return acc


@triton.jit
def _used_splits(contexts, tokens, is_token, KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return how many splits of a token's context, cut into tiles of KEYS, have entries."""
    context = tl.load(contexts + tokens, mask=is_token, other=0)
    return tl.cdiv(context, tl.maximum(split_size(context, KEYS, NUM_SPLITS), 1))


@kernel_unspecialized("num_tokens")
def _expand(
    mixed, lse, contexts, expand, out, num_tokens,
    HEADS: tl.constexpr, RANK: tl.constexpr, VALUE: tl.constexpr, NUM_SPLITS: tl.constexpr, KEYS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, HEADS * VALUE]; loops over latents in CHUNKs. `mixed` [T, HEADS, RANK], or with several splits
    [T, HEADS, NUM_SPLITS, RANK]"""
    launch_dependents(OVERLAPS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    head = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    offs_r = tl.arange(0, CHUNK)
    source = expand + (head * VALUE + rows)[:, None] * RANK + offs_r[None, :]
    matrix = tl.load(source, mask=(rows < VALUE)[:, None] & (offs_r < RANK)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    q_rows = tokens.to(tl.int64) * HEADS + head
    used = tokens
    if NUM_SPLITS > 1:
        used = _used_splits(contexts, tokens, is_token, KEYS, NUM_SPLITS)
    product = tl.zeros((TOKENS, BLOCK), tl.float32)
    for first in tl.static_range(0, RANK, CHUNK):
        inside = first + offs_r < RANK
        if first:
            matrix = tl.load(source + first, mask=(rows < VALUE)[:, None] & inside[None, :], other=0.0)
        if NUM_SPLITS > 1:
            found = _merged(mixed, lse, q_rows, used, first + offs_r, inside, RANK, NUM_SPLITS, TOKENS)
            latent = found.to(matrix.dtype)
        else:
            latents = mixed + q_rows[:, None] * RANK + first + offs_r[None, :]
            latent = tl.load(latents, mask=is_token[:, None] & inside[None, :], other=0.0)
        product = tl.dot(latent, tl.trans(matrix), product, input_precision=PRECISION)
    target = out + (q_rows * VALUE)[:, None] + rows[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=is_token[:, None] & (rows < VALUE)[None, :])


@kernel
def _expand_token(
    mixed, lse, contexts, expand, out,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, VALUE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, IS_SETTLED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The same for one token and BLOCK of a head's values: everything else is loaded before the attention outputs are
    ready, which are then read TOGETHER splits at a time. IS_SETTLED: contexts may be read before the wait."""
    launch_dependents(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, RANK_PADDED)
    inside = columns < RANK
    source = expand + (head * VALUE + rows)[:, None] * RANK + columns[None, :]
    matrix = tl.load(source, mask=(rows < VALUE)[:, None] & inside[None, :], other=0.0)
    used = 0
    if NUM_SPLITS > 1 and IS_SETTLED:
        used = _used_splits(contexts, token, token >= 0, KEYS, NUM_SPLITS)
    wait_for_previous(OVERLAPS)
    q_row = token.to(tl.int64) * HEADS + head
    if NUM_SPLITS == 1:
        latent = tl.load(mixed + q_row * RANK + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        if not IS_SETTLED:
            used = _used_splits(contexts, token, token >= 0, KEYS, NUM_SPLITS)
        # One split after the other: each thread adds up its own columns. In one tile splits would be distributed over
        # warps, and their sums would go through shared memory, where threads wait for each other's banks.
        m_new = tl.max(tl.full((TOGETHER,), LOWEST, tl.float32), axis=0)
        total, latent = m_new * 0.0, tl.zeros((RANK_PADDED,), tl.float32)
        for first in range(0, used, TOGETHER):
            index = q_row * NUM_SPLITS + first
            found, states = (), ()
            for i in tl.static_range(TOGETHER):
                # Of splits that have no entries, the last one's part is read again, with a weight of zero.
                own = index + tl.minimum(i, used - first - 1)
                part = tl.load(mixed + own * RANK + columns, mask=inside, other=0.0)
                m_i = tl.where(first + i < used, tl.load(lse + own * 2), LOWEST)
                l_i = tl.load(lse + own * 2 + 1)
                found, states = found + (part,), states + ((m_i, l_i),)  # type: ignore[assignment]
            highest = m_new
            for i in tl.static_range(TOGETHER):
                highest = tl.maximum(highest, states[i][0])
            alpha = tl.exp2(m_new - highest)
            total, latent = total * alpha, latent * alpha
            for i in tl.static_range(TOGETHER):
                weight = tl.exp2(states[i][0] - highest)
                total += weight * states[i][1]
                latent += weight * found[i]
            m_new = highest
        latent = (latent / tl.maximum(total, 1e-30)).to(expand.dtype.element_ty).to(tl.float32)
    product = tl.sum(matrix.to(tl.float32) * latent[None, :], axis=1)
    target = out + q_row * VALUE + rows
    tl.store(target, product.to(out.dtype.element_ty), mask=rows < VALUE)


def num_latent_splits(num_programs: int, max_context: int, gpu: Capabilities) -> int:
    """Return the number of splits: two programs per multiprocessor, each with at least a tile. A split writes 2 KB per
    head, so there are fewer splits than in attention over keys and values."""
    wanted = 2 * gpu.tuning.multiprocessors // max(1, num_programs)
    splits = max(1, min(wanted, MAX_SPLITS, cdiv(max_context, TILE)))
    return 1 << (splits.bit_length() - 1)


def dense_latent_attend(inputs: LatentInputs) -> torch.Tensor:
    """→ [T, heads * value_dim]"""
    plan: AttentionPlan = inputs.plan
    prompts = plan.prompts if can_be_expanded(inputs) else ()
    first_prompt = len(inputs.queries) - sum(prompts)  # whole long prompts come last
    absorbed = absorb_queries(inputs, first_prompt)
    num_heads, num_rows, single = absorbed.shape[1], plan.contexts.shape[0] - len(prompts), plan.num_single
    num_programs = single * cdiv(num_heads, tiles_for(absorbed.dtype, num_heads, are_single=True).pairs)
    splits = num_latent_splits(num_programs, plan.max_context, capabilities_of(absorbed.device))
    out = absorbed.new_empty(len(absorbed), inputs.expand.shape[0] * inputs.expand.shape[1])
    if single:  # rows with one query each come first
        expand_mixtures(_attend_rows(inputs, absorbed, range(single), splits), slice(single), inputs.expand, out)
    if single < num_rows:
        found = _attend_rows(inputs, absorbed, range(single, num_rows), 1)
        expand_mixtures(found, slice(single, first_prompt), inputs.expand, out)
    for length in prompts:
        expanded_prompt(inputs, absorbed, slice(first_prompt, first_prompt + length), out)
        first_prompt += length
    return out


def deterministic_latent_attend(inputs: LatentInputs) -> torch.Tensor:
    """Deterministic latent attention: one program of a fixed form computes each pair and adds its entries in order."""
    absorbed = absorb_queries(inputs, len(inputs.queries), are_alike=True)
    found = _attend_rows(inputs, absorbed, range(inputs.plan.contexts.shape[0]), 1, are_alike=True)
    out = absorbed.new_empty(len(absorbed), inputs.expand.shape[0] * inputs.expand.shape[1])
    expand_mixtures(found, slice(None), inputs.expand, out, are_alike=True)
    return out


def absorb_queries(inputs: LatentInputs, num_absorbed: int, *, are_alike: bool = False) -> torch.Tensor:
    """Write the entries; → queries over entries [T, heads, rank + rope], with the rotated part only after the first
    `num_absorbed`"""
    num_heads, rank, nope = inputs.absorb.shape
    num_tokens, width = inputs.entries.shape
    queries, entries, rope = inputs.queries, inputs.entries, width - rank
    out = queries.new_empty(num_tokens, num_heads, width)
    if num_tokens <= VERY_FEW_TOKENS and not are_alike:
        inputs.plan.settle()
    tokens = _tokens_of_tile(queries, are_alike=are_alike)
    cos, sin = inputs.cos_sin or (inputs.norm.weight, inputs.norm.weight)
    _absorb[(cdiv(num_tokens, tokens), num_heads, cdiv(rank, RANK_BLOCK) + 1)](
        queries, entries, inputs.latents, inputs.slots, inputs.norm.weight, cos, sin, inputs.absorb, out,
        num_tokens, num_absorbed, queries.stride(0), entries.stride(0), inputs.norm.eps,
        num_heads, nope, max(16, next_power_of_2(nope)), rope, next_power_of_2(rope // 2), rank,
        max(16, next_power_of_2(rank)), tokens, max(1, tokens // (1 << num_heads.bit_length() - 1)), RANK_BLOCK,
        inputs.cos_sin is not None, precision_of(queries), num_tokens == num_absorbed == 1 and not are_alike,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return out


class Mixtures(NamedTuple):
    """Attention outputs in the latent space, for all heads of some tokens."""

    values: torch.Tensor  # [T, heads, rank]; with several splits, of each, float32 [T, heads, splits, rank]
    lse: torch.Tensor  # [T, heads, splits, 2]: m_i and l_i of each split, if there are several
    contexts: torch.Tensor  # int32 [R]; per token if there are several splits
    splits: int
    keys: int  # per tile; a split has whole tiles
    is_settled: bool = False  # whether contexts may be read before the previous kernel has ended


def _attend_rows(
    inputs: LatentInputs, absorbed: torch.Tensor, rows: range, splits: int, *, are_alike: bool = False
) -> Mixtures:
    """Attend with some rows of a step; outputs are at their tokens' indices. There are several splits only for the
    first rows, which have one query each. `are_alike`: one form of program for rows of any length."""
    plan: AttentionPlan = inputs.plan
    (num_tokens, num_heads, width), rank = absorbed.shape, inputs.absorb.shape[1]
    are_single = not are_alike and rows.stop <= plan.num_single
    tiles = tiles_for(absorbed.dtype, num_heads, are_single=are_single, keys_each=plan.max_context // splits)
    members = min(next_power_of_2(num_heads), tiles.pairs)
    queries = tiles.pairs // members
    if splits > 1:
        mixed = parts = torch.empty(len(rows), num_heads, splits, rank, dtype=torch.float32, device=absorbed.device)
        lse = torch.empty(len(rows), num_heads, splits, 2, dtype=torch.float32, device=absorbed.device)
    else:
        mixed = parts = lse = absorbed.new_empty(num_tokens, num_heads, rank)
    num_tiles = len(rows) if are_single else (num_tokens - rows.start) // queries + len(rows)
    options = {"enable_fp_fusion": False} if are_alike else {}
    is_early = are_single and queries == 1 and len(rows) <= VERY_FEW_TOKENS
    if is_early:
        plan.settle()
    _attend[(num_tiles, cdiv(num_heads, members), splits)](
        absorbed, inputs.latents, mixed, parts, lse, plan.tables, plan.query_starts, plan.contexts,
        inputs.scale, plan.tables.stride(0), rows.start, rows.stop,
        num_heads, members, rank, max(16, next_power_of_2(rank)), width - rank, max(16, next_power_of_2(width - rank)),
        inputs.latents.shape[1], tiles.pairs, tiles.keys, splits, are_single, precision_of(absorbed),
        32 * tiles.warps if is_early else 0,
        num_warps=tiles.warps, num_stages=tiles.stages, **options, **launch_options(),
    )  # fmt: skip
    return Mixtures(mixed, lse, plan.contexts, splits, tiles.keys, is_early)


def _tokens_of_tile(x: torch.Tensor, *, are_alike: bool) -> int:
    """Return the number of tokens per tile of `_absorb` and `_expand`; `are_alike`: the same in every step."""
    return FEW_TOKENS if are_alike or len(x) <= 256 or x.dtype == torch.float32 else 64


def expand_mixtures(
    found: Mixtures, tokens: slice, expand: torch.Tensor, out: torch.Tensor, *, are_alike: bool = False
) -> None:
    """Write the values of some tokens to their rows of `out` [T, heads * value_dim]."""
    (num_heads, value_dim, rank), values, own = expand.shape, found.values[tokens], out[tokens]
    num_tokens, padded = len(own), max(16, next_power_of_2(rank))
    if num_tokens <= VERY_FEW_TOKENS and not are_alike:
        block = min(next_power_of_2(value_dim), TOKEN_BLOCK)
        _expand_token[(num_tokens, num_heads, cdiv(value_dim, block))](
            values, found.lse, found.contexts, expand, own,
            num_heads, rank, padded, value_dim, found.splits, found.keys, block, min(16, found.splits),
            found.is_settled,
            num_warps=4, **launch_options(),
        )  # fmt: skip
        return
    each = _tokens_of_tile(own, are_alike=are_alike)
    block = min(next_power_of_2(value_dim), VALUE_BLOCK if num_tokens <= FEW_TOKENS or are_alike else 128)
    _expand[(cdiv(num_tokens, each), num_heads, cdiv(value_dim, block))](
        values, found.lse, found.contexts, expand, own, num_tokens,
        num_heads, rank, value_dim, found.splits, found.keys, each, max(16, block), min(128, padded),
        precision_of(out), num_warps=4, **launch_options(),
    )  # fmt: skip
