"""Inputs of attention over a sliding window and compressed entries (`arch/compressed.py`), computed and cached.

    _prepare         norms and rotates a token's queries and key; caches the key and the inputs of entries;
                     stores the token's row and position
    _prepare_index   the same for an indexer: rotated queries, weights, inputs of its entries
    _make_entry      computes the entry that a token completes, if any: the weighted mean of its tokens' values, normed,
                     and rotated by the angle of its first token

RoPE rotates neighbouring pairs, the last dimensions of a vector. An entry is stored across the slots of its tokens, so
a field of entries is a cache of fewer, wider entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.compressed import Compression
from tokenmill.ops.compressed import CachedField, EntryWeights, WindowedInputs
from tokenmill.ops.triton.attention.softmax import LOWEST
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

HEADS_TOGETHER = 8  # heads per program of `_prepare`
TOKENS_TOGETHER = 8  # tokens of an entry per iteration


class TokenPlaces(NamedTuple):
    """The row and the position of each token, int32 [T]."""

    rows: torch.Tensor
    lasts: torch.Tensor  # position; -1 for padding rows


class IndexQueries(NamedTuple):
    queries: torch.Tensor  # [T, index heads, dim], rotated
    weights: torch.Tensor  # float32 [T, index heads]
    lasts: torch.Tensor  # int32 [T]: the last entry that a query may select, -1 for none
    counts: torch.Tensor  # int32 [T]: receives the number of selected entries


@triton.jit
def _neighbours_turned(own, partner, dims, cos, sin, position, DIM: tl.constexpr, HALF: tl.constexpr):
    """Rotate the last 2 * HALF dimensions of vectors [N, D]; `partner` has each element's neighbour at its index."""
    is_turned = (dims >= DIM - 2 * HALF) & (dims < DIM)
    angles = position * HALF + (dims - (DIM - 2 * HALF)) // 2
    cosine = tl.load(cos + angles, mask=is_turned, other=1.0)
    sine = tl.load(sin + angles, mask=is_turned, other=0.0)
    sine = tl.where(dims % 2 == 0, -sine, sine)
    return own * cosine[None, :] + partner * sine[None, :]


@triton.jit
def _row_of(starts, token, num_rows):
    row = 0
    for first in range(0, num_rows, 256):
        some = first + tl.arange(0, 256)
        ends = tl.load(starts + 1 + some, mask=some < num_rows, other=0x7FFFFFFF)
        row += tl.sum((ends <= token).to(tl.int32), axis=0)
    return tl.minimum(row, num_rows - 1)


@triton.jit
def _copy_inputs(source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, SIZE, BLOCK):
        numbers = first + tl.arange(0, BLOCK)
        found = tl.load(source + numbers, mask=numbers < SIZE, other=0.0)
        tl.store(target + numbers, found.to(target.dtype.element_ty), mask=numbers < SIZE)


@triton.jit
def _normed_and_turned(
    source, inside, weight, cos, sin, position, eps,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Load vectors [N, D] at source [N, 1], and norm and rotate them."""
    dims = tl.arange(0, DIM_PADDED)
    partners = dims ^ 1
    kind = source.dtype.element_ty
    own = tl.load(source + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(own * own, axis=1) / DIM + eps)[:, None]
    other = tl.load(source + partners[None, :], mask=inside, other=0.0).to(tl.float32) * inverse
    own *= inverse
    if HAS_WEIGHT:
        own *= tl.load(weight + dims, mask=dims < DIM, other=0.0)[None, :]
        other *= tl.load(weight + partners, mask=dims < DIM, other=0.0)[None, :]
    own, other = own.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
    return _neighbours_turned(own, other, dims, cos, sin, position, DIM, HALF).to(kind)


@kernel_unspecialized("num_rows", "key_stride", "input_stride")
def _prepare(
    queries, keys, entry_inputs, kept_keys, kept_inputs, key_slots, input_slots, norm, cos, sin, positions, starts,
    contexts, out, rows, lasts, num_rows, key_stride, input_stride, eps,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The last program of a token handles its key and the inputs of entries."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, position = tl.arange(0, DIM_PADDED), tl.load(positions + token)
    if block * BLOCK_HEADS < HEADS:
        heads = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
        at = (token * HEADS + heads)[:, None] * DIM
        turned = _normed_and_turned(
            queries + at, inside, norm, cos, sin, position, eps, DIM, DIM_PADDED, HALF, False
        )  # fmt: skip
        tl.store(out + at + dims[None, :], turned, mask=inside)
    else:
        row = _row_of(starts, token, num_rows)
        tl.store(rows + token, row)
        is_there = position < tl.load(contexts + row)
        tl.store(lasts + token, tl.where(is_there, position, -1).to(tl.int32))
        one = tl.zeros((1, 1), tl.int64)
        is_number = (one == 0) & (dims < DIM)[None, :]
        source = keys + token * key_stride + one
        key = _normed_and_turned(
            source, is_number, norm, cos, sin, position, eps, DIM, DIM_PADDED, HALF, True
        )  # fmt: skip
        kept = kept_keys + tl.load(key_slots + token) * DIM + one
        tl.store(kept + dims[None, :], key.to(kept_keys.dtype.element_ty), mask=is_number)
        if INPUTS > 0:
            target = kept_inputs + tl.load(input_slots + token) * INPUTS
            _copy_inputs(entry_inputs + token * input_stride, target, INPUTS, BLOCK_INPUTS)


@kernel_unspecialized("input_stride", "weight_stride", "rate")
def _prepare_index(
    queries, weights, inputs, kept_inputs, input_slots, cos, sin, positions, token_lasts, turned, scaled, lasts,
    input_stride, weight_stride, rate, scale,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
    partners = dims ^ 1
    inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
    source = queries + (token * HEADS + heads)[:, None] * DIM
    own = tl.load(source + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    result = _neighbours_turned(own, other, dims, cos, sin, tl.load(positions + token), DIM, HALF)
    target = turned + (token * HEADS + heads)[:, None] * DIM + dims[None, :]
    tl.store(target, result.to(turned.dtype.element_ty), mask=inside)
    weight = tl.load(weights + token * weight_stride + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    tl.store(scaled + token * HEADS + heads, weight * scale, mask=heads < HEADS)
    tl.store(lasts + token, (tl.load(token_lasts + token) + 1) // rate - 1)
    kept = kept_inputs + tl.load(input_slots + token) * INPUTS
    _copy_inputs(inputs + token * input_stride, kept, INPUTS, BLOCK_INPUTS)


@kernel_unspecialized("input_stride", "entry_stride")
def _make_entry(
    inputs, entries, input_tables, entry_tables, bias, norm, cos, sin, rows, lasts, input_stride, entry_stride, eps,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr, RATE: tl.constexpr, SERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(lasts + token)
    if (last >= 0) & ((last + 1) % RATE == 0):
        dims = tl.arange(0, DIM_PADDED)
        row, first = tl.load(rows + token).to(tl.int64), last + 1 - RATE
        table = input_tables + row * input_stride
        m_i = tl.full((DIM_PADDED,), LOWEST, tl.float32)
        l_i, acc = tl.zeros((DIM_PADDED,), tl.float32), tl.zeros((DIM_PADDED,), tl.float32)
        for start in range(0, RATE * SERIES, TOKENS):
            numbers = start + tl.arange(0, TOKENS)
            places = first - RATE * (SERIES - 1) + numbers
            is_token = (places >= 0) & (numbers < RATE * SERIES)
            # First the earlier tokens' values for the next entry, then the tokens' values for their own entry.
            offset = numbers // RATE * DIM
            blocks = tl.load(table + places // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            source = inputs + (blocks * BLOCK_SIZE + places % BLOCK_SIZE) * (2 * SERIES * DIM) + offset
            inside = is_token[:, None] & (dims < DIM)[None, :]
            values = tl.load(source[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
            gates = tl.load(source[:, None] + SERIES * DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
            place = bias + numbers % RATE * (SERIES * DIM) + offset
            gates += tl.load(place[:, None] + dims[None, :], mask=inside, other=0.0)
            gates = tl.where(inside, gates, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(gates, axis=0))
            shares, alpha = tl.exp(gates - m_new[None, :]), tl.exp(m_i - m_new)
            l_i = l_i * alpha + tl.sum(shares, axis=0)
            acc = acc * alpha + tl.sum(shares * values, axis=0)
            m_i = m_new
        mean = tl.where(dims < DIM, acc / tl.maximum(l_i, 1e-30), 0.0)
        normed = mean * tl.rsqrt(tl.sum(mean * mean, axis=0) / DIM + eps)
        normed *= tl.load(norm + dims, mask=dims < DIM, other=0.0)
        even, odd = tl.split(tl.reshape(normed, (DIM_PADDED // 2, 2)))
        pairs = tl.arange(0, DIM_PADDED // 2)
        is_turned = (pairs >= DIM // 2 - HALF) & (pairs < DIM // 2)
        angles = first.to(tl.int64) * HALF + pairs - (DIM // 2 - HALF)
        cosine = tl.load(cos + angles, mask=is_turned, other=1.0)
        sine = tl.load(sin + angles, mask=is_turned, other=0.0)
        block = tl.load(entry_tables + row * entry_stride + first // BLOCK_SIZE).to(tl.int64)
        target = entries + (block * BLOCK_SIZE + first % BLOCK_SIZE) // RATE * DIM + 2 * pairs
        is_pair = pairs < DIM // 2
        kind = entries.dtype.element_ty
        tl.store(target, (even * cosine - odd * sine).to(kind), mask=is_pair)
        tl.store(target + 1, (odd * cosine + even * sine).to(kind), mask=is_pair)


def prepare(inputs: WindowedInputs) -> tuple[torch.Tensor, TokenPlaces]:
    """Write keys and the inputs of entries; → queries [T, heads, D], normed and rotated"""
    spec, batch, given = inputs.spec, inputs.batch, inputs.entry_inputs
    num_tokens, heads, dim, device = len(inputs.queries), spec.num_heads, spec.head_dim, inputs.queries.device
    out = inputs.queries.new_empty(num_tokens, heads, dim)
    rows, lasts = torch.empty(2, num_tokens, dtype=torch.int32, device=device)
    together, window = min(HEADS_TOGETHER, next_power_of_2(heads)), inputs.window
    source = window if inputs.entry_fields is None else inputs.entry_fields[0]
    size = 0 if given is None else given.shape[1]
    given = inputs.keys if given is None else given
    cos, sin = inputs.cos_sin
    _prepare[(num_tokens, cdiv(heads, together) + 1)](
        inputs.queries.contiguous(), inputs.keys, given, window.values, source.values, window.tables.slots,
        source.tables.slots, inputs.weights.kv_norm, cos, sin, batch.positions, batch.query_starts, batch.context_lens,
        out, rows, lasts, len(batch.context_lens), inputs.keys.stride(0), given.stride(0), spec.norm_eps,
        heads, together, dim, max(16, next_power_of_2(dim)), cos.shape[1], size, min(1024, next_power_of_2(size)),
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return out, TokenPlaces(rows, lasts)


def prepare_index(inputs: WindowedInputs, compression: Compression, places: TokenPlaces) -> IndexQueries:
    """Write the inputs of the index's entries, and return its queries."""
    indexer, fields, given, weights = (
        compression.indexer, inputs.index_fields, inputs.index_inputs, inputs.index_weights,
    )  # fmt: skip
    assert indexer is not None and fields is not None and given is not None and weights is not None
    assert inputs.index_queries is not None
    num_tokens, heads, dim, device = len(given), indexer.num_heads, indexer.head_dim, given.device
    turned = given.new_empty(num_tokens, heads, dim)
    scaled = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
    lasts, counts = torch.empty(2, num_tokens, dtype=torch.int32, device=device)
    cos, sin = inputs.cos_sin
    _prepare_index[(num_tokens,)](
        inputs.index_queries.contiguous(), weights, given, fields[0].values, fields[0].tables.slots, cos, sin,
        inputs.batch.positions, places.lasts, turned, scaled, lasts, given.stride(0), weights.stride(0),
        compression.rate, indexer.scale, heads, next_power_of_2(heads), dim, max(16, next_power_of_2(dim)),
        cos.shape[1], given.shape[1], min(1024, next_power_of_2(given.shape[1])), num_warps=4, **launch_options(),
    )  # fmt: skip
    return IndexQueries(turned, scaled, lasts, counts)


def make_entries(
    inputs: WindowedInputs,
    fields: tuple[CachedField, CachedField],
    weights: EntryWeights,
    compression: Compression,
    places: TokenPlaces,
) -> None:
    """Write the entries that tokens of the step complete."""
    source, target = fields
    dim = len(weights.norm)
    cos, sin = inputs.cos_sin
    _make_entry[(len(places.rows),)](
        source.values, target.values, source.tables.block_tables, target.tables.block_tables, weights.bias,
        weights.norm, cos, sin, places.rows, places.lasts, source.tables.block_tables.stride(0),
        target.tables.block_tables.stride(0), inputs.spec.norm_eps, dim, max(16, next_power_of_2(dim)), cos.shape[1],
        compression.rate, compression.num_series, source.values.shape[1],
        min(TOKENS_TOGETHER, next_power_of_2(compression.rate)),
        num_warps=4, **launch_options(),
    )  # fmt: skip
