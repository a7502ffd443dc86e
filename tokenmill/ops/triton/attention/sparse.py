"""Latent attention over entries that an indexer chooses (see `arch/indexer.py` and `attention/latent.py`).

    _score      a query's score for each entry before it: products of its index heads with the entries' short keys
    _choose     positions of the highest scores, in their order: the lowest score that is among them is found bit by bit
    _attend     a token's heads over its chosen entries, in splits that run side by side; `latent.py` merges them

Scores of as many tokens at a time are kept as MAX_SCORES holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.interface import IndexInputs, LatentInputs
from tokenmill.ops.reference.elementwise import layer_norm, rotate
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
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.softmax import empty_state
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

MAX_SCORES = 1 << 24  # float32
SCORE_TILE = 64  # entries that a program of `_score` looks at
CHOOSE_TILE = 2048  # scores that a program of `_choose` looks at together


class ChosenEntries(NamedTuple):
    """What each query of a step looks at: the same in every layer that shares an index."""

    positions: torch.Tensor  # int32 [T, top_k], ascending; those behind the last are not read
    counts: torch.Tensor  # int32 [T]
    rows: torch.Tensor  # int32 [T]: whose table a query's entries are found by


@kernel_unspecialized("table_stride", "width")
def _score(
    queries, weights, kept, tables, rows, lasts, out, table_stride, width,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, width]: what lies behind a query's own entry is not written"""
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
        total = tl.where(total == 0.0, 0.0, total)  # a zero below 0 is as good as one above
        tl.store(out + token * width + offs_n, total, mask=inside)


@triton.jit
def _ordered(scores, offs_n, last):
    """Scores as whole numbers of the same order, all above 0; what lies behind the last is 0"""
    bits = tl.load(scores + offs_n, mask=offs_n <= last, other=0.0).to(tl.uint32, bitcast=True)
    is_negative = (bits >> 31) > 0
    number = tl.where(is_negative, ~bits, bits | 0x80000000)
    return tl.where(offs_n <= last, number, 0)


@triton.jit
def _num_from(scores, lowest, last, TILE: tl.constexpr):
    """How many scores are as high as `lowest`, or higher"""
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, last + 1, TILE):
        found += (_ordered(scores, start + tl.arange(0, TILE), last) >= lowest).to(tl.int32)
    return tl.sum(found, axis=0)


@kernel_unspecialized("width", "top_k")
def _choose(scores, lasts, positions, counts, width, top_k, TILE: tl.constexpr) -> None:
    """The top_k highest of a token's scores, of equal ones the first; all where there are no more than that"""
    token = tl.program_id(0).to(tl.int64)
    last, own = tl.load(lasts + token), scores + token * width
    tl.store(counts + token, tl.minimum(last + 1, top_k))
    lowest = (last * 0).to(tl.uint32)
    room = top_k
    if last + 1 > top_k:
        bit = lowest + 0x80000000
        for _ in range(32):
            tried = lowest | bit
            lowest = tl.where(_num_from(own, tried, last, TILE) >= top_k, tried, lowest)
            bit = bit >> 1
        room = top_k - _num_from(own, lowest + 1, last, TILE)
    place, num_equal = top_k * 0, top_k * 0
    for start in range(0, last + 1, TILE):
        offs_n = start + tl.arange(0, TILE)
        number = _ordered(own, offs_n, last)
        is_equal = (number == lowest).to(tl.int32)
        is_early = num_equal + tl.cumsum(is_equal, axis=0) <= room
        is_chosen = ((number > lowest) | ((is_equal > 0) & is_early)) & (offs_n <= last)
        chosen = is_chosen.to(tl.int32)
        targets = place + tl.cumsum(chosen, axis=0) - 1
        tl.store(positions + token * top_k + targets, offs_n, mask=is_chosen)
        place += tl.sum(chosen, axis=0)
        num_equal += tl.sum(is_equal, axis=0)


def choose_entries(inputs: IndexInputs) -> ChosenEntries:
    """Writes index keys into their cache."""
    indexer, kept, plan = inputs.indexer, inputs.kept, inputs.plan
    num_tokens, heads, dim = len(inputs.queries), indexer.num_heads, indexer.head_dim
    queries = inputs.queries.view(num_tokens, heads, dim)
    keys = layer_norm(inputs.keys, inputs.norm.weight, inputs.norm.bias, inputs.norm.eps).unsqueeze(1)
    if inputs.cos_sin is not None:
        queries, keys = rotate(queries, *inputs.cos_sin), rotate(keys, *inputs.cos_sin)
    kept.view(-1, dim)[inputs.slots] = keys[:, 0].to(kept.dtype)
    weights = (inputs.weights.float() * indexer.scale).contiguous()
    rows, lasts = _places(plan, num_tokens)
    positions = torch.empty(num_tokens, indexer.top_k, dtype=torch.int32, device=kept.device)
    counts = torch.empty(num_tokens, dtype=torch.int32, device=kept.device)
    queries, width = queries.contiguous(), plan.max_context
    each = max(1, MAX_SCORES // width)
    for first in range(0, num_tokens, each):
        some = slice(first, first + each)
        count = len(rows[some])
        scores = torch.empty(count, width, dtype=torch.float32, device=kept.device)
        _score[(count, cdiv(width, SCORE_TILE))](
            queries[some], weights[some], kept, plan.tables, rows[some], lasts[some], scores, plan.tables.stride(0),
            width, heads, max(16, next_power_of_2(heads)), dim, max(16, next_power_of_2(dim)), kept.shape[1],
            SCORE_TILE, precision_of(queries),
            num_warps=4,
        )  # fmt: skip
        _choose[(count,)](
            scores, lasts[some], positions[some], counts[some], width, indexer.top_k, CHOOSE_TILE, num_warps=8
        )
    return ChosenEntries(positions, counts, rows)


def _places(plan: AttentionPlan, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the queries, and positions of the last entries that they may look at: int32 [T] each"""
    numbers = torch.arange(num_tokens, device=plan.contexts.device, dtype=torch.int32)
    rows = torch.searchsorted(plan.query_starts[1:], numbers, right=True).clamp_(max=len(plan.contexts) - 1)
    behind = plan.query_starts[1:][rows] - numbers  # queries of the row from this one on
    return rows.int(), (plan.contexts[rows] - behind).int()


@kernel_unspecialized("table_stride", "top_k")
def _attend_chosen(
    queries, latents, out, parts, lse, tables, positions, counts, rows, scale, table_stride, top_k,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """PAIRS of one token and its heads; as `_attend` of `latent.py`"""
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
    """→ [T, heads * value_dim], over all entries or over those that an indexer chose"""
    return dense_latent_attend(inputs) if inputs.choice is None else sparse_latent_attend(inputs)


def sparse_latent_attend(inputs: LatentInputs) -> torch.Tensor:
    absorbed, chosen, plan = absorb_queries(inputs), inputs.choice, inputs.plan
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
