"""Sparse latent attention over entries that an indexer selects (see `arch/indexer.py` and `attention/latent.py`).

    _prepare    norms, rotates and writes the index key to the cache; rotates the index queries
    _score      computes a query's score for each earlier entry: products of its index heads with the index keys
    _choose     selects the positions of the highest scores, ascending, by radix select: the lowest selected score is
                found digit by digit with histograms; for a few tokens, several programs count parts of a context
    _attend     attends with a token's heads to its selected entries, in splits that run in parallel; `latent.py` merges

Tokens are processed in groups whose scores fit in MAX_SCORES.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.interface import IndexInputs, LatentInputs
from tokenmill.ops.triton.attention.latent import (
    Mixtures,
    absorb_queries,
    add_entries,
    dense_latent_attend,
    expand_mixtures,
    num_latent_splits,
    split_size,
    store_mixtures,
    tiles_for,
)
from tokenmill.ops.triton.attention.softmax import empty_state
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

MAX_SCORES = 1 << 24  # float32
SCORE_TILE = 64  # entries per program of `_score`
CHOOSE_TILE = 2048  # scores per iteration of `_choose`
CHOOSE_PROGRAMS = 256  # from this many tokens on, one program selects for each token
MAX_PARTS = 64  # of a token's scores, for several programs
DIGIT_BITS = tl.constexpr(8)
BINS = tl.constexpr(256)
NUM_DIGITS = tl.constexpr(4)  # of a score's 32 bits


class ChosenEntries(NamedTuple):
    """The entries that each query of a step attends to: the same in every layer that shares an index."""

    positions: torch.Tensor  # int32 [T, top_k], ascending; only the first `counts` are valid
    counts: torch.Tensor  # int32 [T]
    rows: torch.Tensor  # int32 [T]: the row of each query, for its block table


@kernel_unspecialized("table_stride", "width")
def _score(
    queries, weights, kept, tables, rows, lasts, out, table_stride, width,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, width]: scores after a query's own entry are not written"""
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    last = tl.load(lasts + token)
    if tl.program_id(1) * TILE <= last:
        heads, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
        is_query = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
        query = tl.load(queries + (token * HEADS + heads)[:, None] * DIM + dims[None, :], mask=is_query, other=0.0)
        weight = tl.load(weights + token * HEADS + heads, mask=heads < HEADS, other=0.0)
        inside = offs_n <= last
        table = tables + tl.load(rows + token).to(tl.int64) * table_stride
        blocks = tl.load(table + offs_n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        entry = kept + (blocks * BLOCK_SIZE + offs_n % BLOCK_SIZE)[:, None] * DIM + dims[None, :]
        key = tl.load(entry, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0).to(query.dtype)
        products = tl.maximum(tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0)
        total = tl.sum(products * weight[:, None], axis=0)
        total = tl.where(total == 0.0, 0.0, total)  # -0.0 becomes 0.0
        tl.store(out + token * width + offs_n, total, mask=inside)


@kernel_unspecialized("num_rows")
def _prepare(
    queries, keys, weights, kept, slots, norm, norm_bias, cos, sin, starts, contexts,
    turned, scaled, rows, lasts, num_rows, eps, scale,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Write a token's normed and rotated key to the cache, its rotated queries, its heads' weights, its row, and the
    position of the last entry that it may attend to."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
    is_dim, is_head = dims < DIM, heads < HEADS
    partners = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    angles, is_turned = dims % tl.maximum(HALF, 1), is_dim & (dims < 2 * HALF)
    cosine = tl.load(cos + token * HALF + angles, mask=is_turned, other=1.0)
    sine = tl.load(sin + token * HALF + angles, mask=is_turned, other=0.0)
    sine = tl.where(dims < HALF, -sine, sine)

    row = 0
    for first in range(0, num_rows, 256):
        some = first + tl.arange(0, 256)
        ends = tl.load(starts + 1 + some, mask=some < num_rows, other=0x7FFFFFFF)
        row += tl.sum((ends <= token).to(tl.int32), axis=0)
    row = tl.minimum(row, num_rows - 1)
    tl.store(rows + token, row)
    behind = tl.load(starts + 1 + row) - token.to(tl.int32)  # number of the row's queries from this one on
    tl.store(lasts + token, tl.load(contexts + row) - behind)

    key = tl.load(keys + token * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    mean = tl.sum(key, axis=0) / DIM
    centred = tl.where(is_dim, key - mean, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, axis=0) / DIM + eps)
    other = tl.load(keys + token * DIM + partners, mask=is_dim, other=0.0).to(tl.float32) - mean
    own = centred * factor * tl.load(norm + dims, mask=is_dim, other=0.0)
    other = other * factor * tl.load(norm + partners, mask=is_dim, other=0.0)
    if HAS_BIAS:
        own += tl.load(norm_bias + dims, mask=is_dim, other=0.0)
        other += tl.load(norm_bias + partners, mask=is_dim, other=0.0)
    own, other = own.to(keys.dtype.element_ty).to(tl.float32), other.to(keys.dtype.element_ty).to(tl.float32)
    key = (own * cosine + other * sine).to(keys.dtype.element_ty)
    tl.store(kept + tl.load(slots + token) * DIM + dims, key.to(kept.dtype.element_ty), mask=is_dim)

    inside = is_head[:, None] & is_dim[None, :]
    source = queries + (token * HEADS + heads)[:, None] * DIM
    query = tl.load(source + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    query = query * cosine[None, :] + partner * sine[None, :]
    target = turned + (token * HEADS + heads)[:, None] * DIM + dims[None, :]
    tl.store(target, query.to(turned.dtype.element_ty), mask=inside)
    weight = tl.load(weights + token * HEADS + heads, mask=is_head, other=0.0).to(tl.float32)
    tl.store(scaled + token * HEADS + heads, weight * scale, mask=is_head)


@triton.jit
def _ordered(scores, offs_n, last):
    """Map scores to positive integers of the same order; those after the last entry become 0."""
    bits = tl.load(scores + offs_n, mask=offs_n <= last, other=0.0).to(tl.uint32, bitcast=True)
    is_negative = (bits >> 31) > 0
    number = tl.where(is_negative, ~bits, bits | 0x80000000)
    return tl.where(offs_n <= last, number, 0)


@triton.jit
def _digits(scores, lowest, low, high, DIGIT: tl.constexpr, TILE: tl.constexpr):
    """Count the values of digit DIGIT among scores [low, high) whose earlier digits equal those of `lowest`."""
    FIRST: tl.constexpr = DIGIT_BITS * DIGIT  # digits are counted from the highest bits
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(low, high, TILE):
        offs_n = start + tl.arange(0, TILE)
        number = _ordered(scores, offs_n, high - 1)
        is_candidate = offs_n < high
        if DIGIT > 0:
            is_candidate &= (number >> (32 - FIRST)) == (lowest >> (32 - FIRST))
        digit = (number << FIRST) >> (32 - DIGIT_BITS)
        counts += tl.histogram(digit.to(tl.int32), BINS, mask=is_candidate)
    return counts


@triton.jit
def _next_digit(counts, lowest, room, DIGIT: tl.constexpr):
    """Extend `lowest` by one digit such that `room` of the counted scores are as high or higher; also return how many
    of the scores with exactly this digit are among them."""
    higher = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)  # than each value
    is_reached = (higher + counts >= room).to(tl.int32)
    digit = tl.sum(is_reached, axis=0) - 1
    values = tl.arange(0, BINS)
    room -= tl.sum(tl.where(values == digit, higher, 0), axis=0)
    FIRST: tl.constexpr = DIGIT_BITS * DIGIT
    return lowest | ((digit.to(tl.uint32) << (32 - DIGIT_BITS)) >> FIRST), room


@triton.jit
def _lowest_chosen(bins, top_k, DIGITS: tl.constexpr):
    """Return the first DIGITS digits of the lowest selected score, and how many scores with these digits are
    selected."""
    lowest, room = (top_k * 0).to(tl.uint32), top_k
    for digit in tl.static_range(DIGITS):
        counts = tl.load(bins + digit * BINS + tl.arange(0, BINS))
        lowest, room = _next_digit(counts, lowest, room, digit)
    return lowest, room


@triton.jit
def _write_chosen(
    scores, positions, low, high, lowest, room, place, num_equal, TILE: tl.constexpr
):  # fmt: skip
    """Write the positions of the selected scores in [low, high), from index `place` on. Of scores equal to the lowest,
    `room` are selected in all, and `num_equal` precede this range."""
    for start in range(low, high, TILE):
        offs_n = start + tl.arange(0, TILE)
        number = _ordered(scores, offs_n, high - 1)
        is_equal = ((number == lowest) & (offs_n < high)).to(tl.int32)
        is_early = num_equal + tl.cumsum(is_equal, axis=0) <= room
        is_chosen = ((number > lowest) | ((is_equal > 0) & is_early)) & (offs_n < high)
        chosen = is_chosen.to(tl.int32)
        targets = place + tl.cumsum(chosen, axis=0) - 1
        tl.store(positions + targets, offs_n, mask=is_chosen)
        place += tl.sum(chosen, axis=0)
        num_equal += tl.sum(is_equal, axis=0)


@kernel_unspecialized("width", "top_k")
def _choose(scores, lasts, positions, counts, width, top_k, TILE: tl.constexpr) -> None:
    """Select the top_k highest of a token's scores, of equal ones the first; all, if there are no more."""
    token = tl.program_id(0).to(tl.int64)
    num, own = tl.load(lasts + token) + 1, scores + token * width
    tl.store(counts + token, tl.minimum(num, top_k))
    lowest, room = (top_k * 0).to(tl.uint32), top_k
    if num > top_k:
        for digit in tl.static_range(NUM_DIGITS):
            lowest, room = _next_digit(_digits(own, lowest, 0, num, digit, TILE), lowest, room, digit)
    _write_chosen(own, positions + token * top_k, 0, num, lowest, room, top_k * 0, top_k * 0, TILE)


@kernel_unspecialized("width", "top_k")
def _count_digits(
    scores, lasts, bins, width, top_k, part_size, DIGIT: tl.constexpr, TILE: tl.constexpr
) -> None:  # fmt: skip
    """Add one part of a token's scores to the histogram of a digit, if there are more than top_k."""
    token = tl.program_id(0).to(tl.int64)
    num, low = tl.load(lasts + token) + 1, tl.program_id(1) * part_size
    if (num > top_k) & (low < num):
        own = bins + token * (NUM_DIGITS * BINS)
        lowest, _ = _lowest_chosen(own, top_k, DIGIT)
        counts = _digits(scores + token * width, lowest, low, tl.minimum(low + part_size, num), DIGIT, TILE)
        tl.atomic_add(own + DIGIT * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@kernel_unspecialized("width", "top_k")
def _count_chosen(scores, lasts, bins, parts, width, top_k, part_size, TILE: tl.constexpr) -> None:
    """Count the scores of a part that are above the lowest selected one, and those equal to it."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num, low = tl.load(lasts + token) + 1, part * part_size
    higher, equal = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    lowest = (top_k * 0).to(tl.uint32)
    if num > top_k:
        lowest, _ = _lowest_chosen(bins + token * (NUM_DIGITS * BINS), top_k, NUM_DIGITS)
    high = tl.minimum(low + part_size, num)
    for start in range(low, high, TILE):
        offs_n = start + tl.arange(0, TILE)
        number = _ordered(scores + token * width, offs_n, high - 1)
        higher += ((number > lowest) & (offs_n < high)).to(tl.int32)
        equal += ((number == lowest) & (offs_n < high)).to(tl.int32)
    target = parts + (token * tl.num_programs(1) + part) * 2
    tl.store(target, tl.sum(higher, axis=0))
    tl.store(target + 1, tl.sum(equal, axis=0))


@kernel_unspecialized("width", "top_k")
def _write_parts(
    scores, lasts, bins, parts, positions, counts, width, top_k, part_size, PARTS: tl.constexpr, TILE: tl.constexpr
) -> None:
    """Write the selected positions of one part, after those of the earlier parts."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num, low = tl.load(lasts + token) + 1, part * part_size
    if part == 0:
        tl.store(counts + token, tl.minimum(num, top_k))
    lowest, room = (top_k * 0).to(tl.uint32), top_k
    if num > top_k:
        lowest, room = _lowest_chosen(bins + token * (NUM_DIGITS * BINS), top_k, NUM_DIGITS)
    before = tl.arange(0, PARTS)
    found = parts + (token * tl.num_programs(1) + before) * 2
    higher = tl.sum(tl.load(found, mask=before < part, other=0), axis=0)
    equal = tl.sum(tl.load(found + 1, mask=before < part, other=0), axis=0)
    _write_chosen(
        scores + token * width, positions + token * top_k, low, tl.minimum(low + part_size, num), lowest, room,
        higher + tl.minimum(equal, room), equal, TILE,
    )  # fmt: skip


def choose_entries(inputs: IndexInputs) -> ChosenEntries | None:
    """Write index keys to their cache, and select entries; None: every query attends to all earlier entries."""
    indexer, kept, plan = inputs.indexer, inputs.kept, inputs.plan
    num_tokens, heads, dim, device = len(inputs.queries), indexer.num_heads, indexer.head_dim, kept.device
    queries = torch.empty(num_tokens, heads, dim, dtype=inputs.queries.dtype, device=device)
    weights = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
    rows, lasts, counts = torch.empty(3, num_tokens, dtype=torch.int32, device=device)
    cos, sin = inputs.cos_sin or (weights, weights)
    norm_bias = inputs.norm.bias
    _prepare[(num_tokens,)](
        inputs.queries.contiguous(), inputs.keys.contiguous(), inputs.weights.contiguous(), kept, inputs.slots,
        inputs.norm.weight, inputs.norm.weight if norm_bias is None else norm_bias, cos.contiguous(), sin.contiguous(),
        plan.query_starts, plan.contexts, queries, weights, rows, lasts, len(plan.contexts), inputs.norm.eps,
        indexer.scale, heads, max(16, next_power_of_2(heads)), dim, max(16, next_power_of_2(dim)),
        cos.shape[1] if inputs.cos_sin else 0, norm_bias is not None,
        num_warps=4,
    )  # fmt: skip
    if plan.max_context <= indexer.top_k:
        return None
    asked = AskedEntries(queries, weights, rows, lasts, counts)
    return highest_entries(asked, kept, plan.tables, plan.max_context, indexer.top_k)


class AskedEntries(NamedTuple):
    """The queries of an indexer."""

    queries: torch.Tensor  # [T, heads, D]
    weights: torch.Tensor  # float32 [T, heads]
    rows: torch.Tensor  # int32 [T]
    lasts: torch.Tensor  # int32 [T]: the last entry that each may select, -1 for none
    counts: torch.Tensor  # int32 [T]: receives the number of selected entries


def highest_entries(
    asked: AskedEntries, kept: torch.Tensor, tables: torch.Tensor, width: int, top_k: int
) -> ChosenEntries:
    """Select the highest-scoring of up to `width` entries; kept [blocks, entries per block, D]."""
    queries, weights, rows, lasts, counts = asked
    num_tokens, heads, dim = queries.shape
    positions = torch.empty(num_tokens, top_k, dtype=torch.int32, device=queries.device)
    each = max(1, MAX_SCORES // width)
    for first in range(0, num_tokens, each):
        some = slice(first, first + each)
        count = len(rows[some])
        scores = torch.empty(count, width, dtype=torch.float32, device=queries.device)
        _score[(count, cdiv(width, SCORE_TILE))](
            queries[some], weights[some], kept, tables, rows[some], lasts[some], scores, tables.stride(0),
            width, heads, max(16, next_power_of_2(heads)), dim, max(16, next_power_of_2(dim)), kept.shape[1],
            SCORE_TILE, precision_of(queries),
            num_warps=4,
        )  # fmt: skip
        _choose_highest(scores, lasts[some], positions[some], counts[some], top_k)
    return ChosenEntries(positions, counts, rows)


def _choose_highest(
    scores: torch.Tensor, lasts: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor, top_k: int
) -> None:
    """Select with one program per token if there are many tokens, otherwise with several."""
    num_tokens, width = scores.shape
    num_parts = min(CHOOSE_PROGRAMS // num_tokens, cdiv(width, CHOOSE_TILE), MAX_PARTS)
    if num_parts < 2:
        _choose[(num_tokens,)](scores, lasts, positions, counts, width, top_k, CHOOSE_TILE, num_warps=8)
        return
    part_size = cdiv(width, num_parts * CHOOSE_TILE) * CHOOSE_TILE
    grid = (num_tokens, num_parts)
    bins = torch.zeros(num_tokens, NUM_DIGITS.value, BINS.value, dtype=torch.int32, device=scores.device)
    parts = torch.empty(num_tokens, num_parts, 2, dtype=torch.int32, device=scores.device)
    for digit in range(NUM_DIGITS.value):
        _count_digits[grid](scores, lasts, bins, width, top_k, part_size, digit, CHOOSE_TILE, num_warps=8)
    _count_chosen[grid](scores, lasts, bins, parts, width, top_k, part_size, CHOOSE_TILE, num_warps=8)
    _write_parts[grid](
        scores, lasts, bins, parts, positions, counts, width, top_k, part_size, MAX_PARTS, CHOOSE_TILE, num_warps=8
    )


@kernel_unspecialized("table_stride", "top_k")
def _attend_chosen(
    queries, latents, out, parts, lse, tables, positions, counts, rows, scale, table_stride, top_k,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with PAIRS of one token and its heads; see `_attend` of `latent.py`."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    WIDTH: tl.constexpr = RANK + ROPE
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    is_pair, q_rows = heads < HEADS, token * HEADS + heads
    offs_r, offs_p = tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
    is_rank, is_rope = (offs_r < RANK)[None, :], (offs_p < ROPE)[None, :]
    source = queries + q_rows[:, None] * WIDTH
    query = tl.load(source + offs_r[None, :], mask=is_pair[:, None] & is_rank, other=0.0)
    turned = tl.load(source + RANK + offs_p[None, :], mask=is_pair[:, None] & is_rope, other=0.0)
    state = empty_state(PAIRS, RANK_PADDED)
    count = tl.load(counts + token)
    each = split_size(count, TILE, NUM_SPLITS)
    low = split * each
    table = tables + tl.load(rows + token).to(tl.int64) * table_stride
    for start in range(low, tl.minimum(low + each, count), TILE):
        numbers = start + tl.arange(0, TILE)
        inside = numbers < count
        offs_n = tl.load(positions + token * top_k + numbers, mask=inside, other=0)
        state = add_entries(
            state, query, turned, latents, table, offs_n, inside, inside[None, :], scale,
            RANK, RANK_PADDED, ROPE, ROPE_PADDED, BLOCK_SIZE, PRECISION,
        )  # fmt: skip
    store_mixtures(state, out, parts, lse, q_rows, is_pair, split, low < count, RANK, RANK_PADDED, NUM_SPLITS)


def latent_attend(inputs: LatentInputs) -> torch.Tensor:
    """→ [T, heads * value_dim], over all entries or over those that an indexer selected"""
    return dense_latent_attend(inputs) if inputs.choice is None else sparse_latent_attend(inputs)


def sparse_latent_attend(inputs: LatentInputs) -> torch.Tensor:
    absorbed, chosen, plan = absorb_queries(inputs, len(inputs.queries)), inputs.choice, inputs.plan
    (num_tokens, num_heads, width), rank = absorbed.shape, inputs.absorb.shape[1]
    longest = min(chosen.positions.shape[1], plan.max_context)
    tiles = tiles_for(absorbed.dtype, num_heads, are_single=True, keys_each=longest)
    num_programs = num_tokens * cdiv(num_heads, tiles.pairs)
    splits = num_latent_splits(num_programs, longest, capabilities_of(absorbed.device))
    if splits > 1:
        mixed = parts = torch.empty(num_tokens, num_heads, splits, rank, dtype=torch.float32, device=absorbed.device)
        lse = torch.empty(num_tokens, num_heads, splits, 2, dtype=torch.float32, device=absorbed.device)
    else:
        mixed = parts = lse = absorbed.new_empty(num_tokens, num_heads, rank)
    _attend_chosen[(num_tokens, cdiv(num_heads, tiles.pairs), splits)](
        absorbed, inputs.latents, mixed, parts, lse, plan.tables, *chosen, inputs.scale, plan.tables.stride(0),
        chosen.positions.shape[1], num_heads, rank, max(16, next_power_of_2(rank)), width - rank,
        max(16, next_power_of_2(width - rank)), inputs.latents.shape[1], tiles.pairs, tiles.keys, splits,
        precision_of(absorbed),
        num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(),
    )  # fmt: skip
    out = absorbed.new_empty(num_tokens, inputs.expand.shape[0] * inputs.expand.shape[1])
    expand_mixtures(Mixtures(mixed, lse, chosen.counts, splits, tiles.keys), slice(None), inputs.expand, out)
    return out
