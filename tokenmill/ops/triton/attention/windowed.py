"""Attention over a sliding window and compressed entries (`arch/compressed.py`) in the paged cache.

    prepare, make_entries   write keys and entries to the cache (`windowed_inputs.py`)
    highest_entries         the indexer's selection among complete entries (`sparse.py`), if there are more than top_k
    _attend                 attends with a token's heads to the keys of its window, then to entries; for few tokens in
                            splits that run in parallel
    _merge                  merges the splits of a head, and rotates the result back by the query's angle

All heads share a key, which is also the value: it is read once per tile of heads. Every token is computed separately,
in decoding and in prompts; with one split its result depends on its context only.
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.compressed import WindowedInputs
from tokenmill.ops.triton.attention.latent import LatentTiles, num_latent_splits, tiles_for
from tokenmill.ops.triton.attention.softmax import LOG2E, add_keys, attention_output, empty_state
from tokenmill.ops.triton.attention.sparse import AskedEntries, ChosenEntries, highest_entries
from tokenmill.ops.triton.attention.windowed_inputs import TokenPlaces, make_entries, prepare, prepare_index
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


@kernel_unspecialized("window", "key_stride", "entry_stride", "top_k")
def _attend(
    queries, keys, entries, key_tables, entry_tables, chosen, counts, rows, lasts, sinks, cos, sin, out, parts, lse,
    scale, window, key_stride, entry_stride, top_k,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, RATE: tl.constexpr, IS_CHOSEN: tl.constexpr,
    TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, HEADS, D] if there is one split; else each split's part, for `_merge`. RATE 0: a window only"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    is_head, dims = heads < HEADS, tl.arange(0, DIM_PADDED)
    q_rows, is_dim = token * HEADS + heads, (dims < DIM)[None, :]
    query = tl.load(queries + q_rows[:, None] * DIM + dims[None, :], mask=is_head[:, None] & is_dim, other=0.0)
    last, row = tl.load(lasts + token), tl.load(rows + token).to(tl.int64)
    oldest = tl.maximum(last - window + 1, 0)
    first_tile = oldest // TILE
    num_window = tl.where(last >= 0, last // TILE + 1 - first_tile, 0)
    num_entries = 0
    if RATE > 0:
        num_entries = (last + 1) // RATE
        if IS_CHOSEN:
            num_entries = tl.load(counts + token)
    num_tiles = num_window + tl.cdiv(num_entries, TILE)
    each = tl.cdiv(num_tiles, NUM_SPLITS)
    low = split * each
    high = tl.minimum(low + each, num_tiles)
    state = empty_state(PAIRS, DIM_PADDED)
    for tile in range(low, tl.minimum(high, num_window)):
        offs_n = (first_tile + tile) * TILE + tl.arange(0, TILE)
        seen = (offs_n >= oldest) & (offs_n <= last)
        blocks = tl.load(key_tables + row * key_stride + offs_n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        source = keys + (blocks * BLOCK_SIZE + offs_n % BLOCK_SIZE)[:, None] * DIM
        key = tl.load(source + dims[None, :], mask=seen[:, None] & is_dim, other=0.0).to(query.dtype)
        qk = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
        state = add_keys(state, tl.where(seen[None, :], qk, float("-inf")), key, seen, False, PRECISION)
    if RATE > 0:
        EACH: tl.constexpr = BLOCK_SIZE // RATE  # entries per block
        for tile in range(tl.maximum(low, num_window), high):
            numbers = (tile - num_window) * TILE + tl.arange(0, TILE)
            seen = numbers < num_entries
            if IS_CHOSEN:
                numbers = tl.load(chosen + token * top_k + numbers, mask=seen, other=0)
            blocks = tl.load(entry_tables + row * entry_stride + numbers // EACH, mask=seen, other=0).to(tl.int64)
            source = entries + (blocks * EACH + numbers % EACH)[:, None] * DIM
            key = tl.load(source + dims[None, :], mask=seen[:, None] & is_dim, other=0.0).to(query.dtype)
            qk = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
            state = add_keys(state, tl.where(seen[None, :], qk, float("-inf")), key, seen, False, PRECISION)
    is_result = is_head[:, None] & is_dim
    if NUM_SPLITS == 1:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0)
        result = attention_output(state, sink, True).to(out.dtype.element_ty)
        tl.store(out + q_rows[:, None] * DIM + dims[None, :], result, mask=is_result)
        tl.debug_barrier()  # the values to rotate back were stored by other threads
        half = tl.arange(0, HALF_PADDED)
        is_pair = is_head[:, None] & (half < HALF)[None, :]
        at = tl.maximum(last, 0).to(tl.int64) * HALF + half
        cosine = tl.load(cos + at, mask=half < HALF, other=1.0)[None, :]
        sine = tl.load(sin + at, mask=half < HALF, other=0.0)[None, :]
        target = out + q_rows[:, None] * DIM + DIM - 2 * HALF + 2 * half[None, :]
        even = tl.load(target, mask=is_pair, other=0.0).to(tl.float32)
        odd = tl.load(target + 1, mask=is_pair, other=0.0).to(tl.float32)
        tl.store(target, (even * cosine + odd * sine).to(out.dtype.element_ty), mask=is_pair)
        tl.store(target + 1, (odd * cosine - even * sine).to(out.dtype.element_ty), mask=is_pair)
    else:
        m_i, l_i, acc = state
        index = q_rows * NUM_SPLITS + split
        tl.store(lse + index * 2, m_i, mask=is_head)
        tl.store(lse + index * 2 + 1, l_i, mask=is_head)
        if low < high:
            tl.store(parts + index[:, None] * DIM + dims[None, :], acc, mask=is_result)


@kernel_unspecialized("num_pairs")
def _merge(
    parts, lse, lasts, sinks, cos, sin, out, num_pairs,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS_PADDED: tl.constexpr, HALF: tl.constexpr, NUM_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge one head of one token, in pairs of neighbouring dimensions."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    q_row = tl.program_id(0).to(tl.int64)
    token, head = q_row // HEADS, q_row % HEADS
    splits, pairs = tl.arange(0, NUM_SPLITS), tl.arange(0, PAIRS_PADDED)
    m_i = tl.load(lse + (q_row * NUM_SPLITS + splits) * 2)
    l_i = tl.load(lse + (q_row * NUM_SPLITS + splits) * 2 + 1)
    highest = tl.max(m_i, axis=0)
    shares = tl.where(l_i > 0.0, tl.exp2(m_i - highest), 0.0)
    total = tl.sum(shares * l_i, axis=0) + tl.exp2(tl.load(sinks + head) * LOG2E - highest)
    even, odd = tl.zeros((PAIRS_PADDED,), tl.float32), tl.zeros((PAIRS_PADDED,), tl.float32)
    for split in range(NUM_SPLITS):
        weight = tl.sum(tl.where(splits == split, shares, 0.0), axis=0)
        inside = (pairs < DIM // 2) & (pairs * 0.0 + weight > 0.0)  # splits without keys wrote nothing
        source = parts + (q_row * NUM_SPLITS + split) * DIM + 2 * pairs
        even += tl.load(source, mask=inside, other=0.0) * weight
        odd += tl.load(source + 1, mask=inside, other=0.0) * weight
    kind = out.dtype.element_ty
    even, odd = (even / total).to(kind).to(tl.float32), (odd / total).to(kind).to(tl.float32)
    is_turned = (pairs >= DIM // 2 - HALF) & (pairs < DIM // 2)
    at = tl.maximum(tl.load(lasts + token), 0).to(tl.int64) * HALF + pairs - (DIM // 2 - HALF)
    cosine = tl.load(cos + at, mask=is_turned, other=1.0)
    sine = tl.load(sin + at, mask=is_turned, other=0.0)
    target, is_result = out + q_row * DIM + 2 * pairs, pairs < DIM // 2
    tl.store(target, (even * cosine + odd * sine).to(kind), mask=is_result)
    tl.store(target + 1, (odd * cosine - even * sine).to(kind), mask=is_result)


def windowed_attend(inputs: WindowedInputs) -> torch.Tensor:
    """→ [T, heads * head_dim]"""
    queries, places, chosen = _looked_at(inputs)
    num_tokens, num_heads, _ = queries.shape
    longest = _longest(inputs, chosen)
    tiles = tiles_for(queries.dtype, num_heads, are_single=True, keys_each=longest)
    num_programs = num_tokens * cdiv(num_heads, tiles.pairs)
    splits = num_latent_splits(num_programs, longest, capabilities_of(queries.device))
    return _attended(inputs, queries, places, chosen, tiles, splits)


def deterministic_windowed_attend(inputs: WindowedInputs) -> torch.Tensor:
    """Deterministic form: one program of a fixed form adds up a token's whole context."""
    queries, places, chosen = _looked_at(inputs)
    return _attended(inputs, queries, places, chosen, tiles_for(queries.dtype, queries.shape[1], are_single=False), 1)


def _looked_at(inputs: WindowedInputs) -> tuple[torch.Tensor, TokenPlaces, ChosenEntries | None]:
    """Write keys, entries and index entries to the cache, and return the queries."""
    queries, places = prepare(inputs)
    compression, weights, fields = inputs.spec.compression, inputs.weights, inputs.entry_fields
    if compression is None or fields is None or weights.entries is None:
        return queries, places, None
    make_entries(inputs, fields, weights.entries, compression, places)
    index_fields, indexer = inputs.index_fields, compression.indexer
    if indexer is None or index_fields is None or weights.index_entries is None:
        return queries, places, None
    asked = prepare_index(inputs, compression, places)
    make_entries(inputs, index_fields, weights.index_entries, compression, places)
    width = inputs.batch.max_context_len // compression.rate
    if width <= indexer.top_k:
        return queries, places, None
    kept, tables = index_fields[1]
    entries = kept.view(len(kept), -1, indexer.head_dim)
    asking = AskedEntries(asked.queries, asked.weights, places.rows, asked.lasts, asked.counts)
    return queries, places, highest_entries(asking, entries, tables.block_tables, width, indexer.top_k)


def _longest(inputs: WindowedInputs, chosen: ChosenEntries | None) -> int:
    """Return an estimate of the most keys and entries that a query of the step attends to."""
    compression, context = inputs.spec.compression, inputs.batch.max_context_len
    entries = 0 if compression is None else context // compression.rate
    return min(context, inputs.spec.window) + (entries if chosen is None else chosen.positions.shape[1])


def _attended(
    inputs: WindowedInputs,
    queries: torch.Tensor,
    places: TokenPlaces,
    chosen: ChosenEntries | None,
    tiles: LatentTiles,
    splits: int,
) -> torch.Tensor:
    (num_tokens, num_heads, dim), spec, keys = queries.shape, inputs.spec, inputs.window
    entries = keys if inputs.entry_fields is None else inputs.entry_fields[1]
    out = queries.new_empty(num_tokens, num_heads * dim)
    parts = lse = out
    if splits > 1:
        parts = torch.empty(num_tokens, num_heads, splits, dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(num_tokens, num_heads, splits, 2, dtype=torch.float32, device=out.device)
    (cos, sin), sinks = inputs.cos_sin, inputs.weights.sinks
    half, key_tables, entry_tables = cos.shape[1], keys.tables.block_tables, entries.tables.block_tables
    _attend[(num_tokens, cdiv(num_heads, tiles.pairs), splits)](
        queries, keys.values, entries.values, key_tables, entry_tables,
        places.rows if chosen is None else chosen.positions, places.rows if chosen is None else chosen.counts,
        places.rows, places.lasts, sinks, cos, sin, out, parts, lse,
        spec.scale, spec.window, key_tables.stride(0), entry_tables.stride(0),
        0 if chosen is None else chosen.positions.shape[1],
        num_heads, tiles.pairs, dim, max(16, next_power_of_2(dim)), half, next_power_of_2(half),
        keys.values.shape[1], 0 if spec.compression is None else spec.compression.rate, chosen is not None,
        tiles.keys, splits, precision_of(queries),
        num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(),
    )  # fmt: skip
    if splits > 1:
        _merge[(num_tokens * num_heads,)](
            parts, lse, places.lasts, sinks, cos, sin, out, num_tokens * num_heads,
            num_heads, dim, next_power_of_2(dim // 2), half, splits, num_warps=1 if dim <= 128 else 4,
            **launch_options(),
        )  # fmt: skip
    return out
