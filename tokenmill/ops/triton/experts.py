"""Routed experts in two ways, both without the host knowing who was chosen.

A few tokens: each (token, choice) pair streams its expert's matrices, as for a single row. Many tokens: pairs are
sorted by expert and multiplied in tiles; which expert a tile belongs to is found on the device. Expert e's tiles begin
at offsets[e] // TILE + e, which leaves each expert room for its last, partly filled one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight
from tokenmill.ops.triton.activation import act_mul, activate
from tokenmill.ops.triton.decode_attention import precision_of
from tokenmill.ops.triton.kernel import kernel, kernel_for_any
from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous
from tokenmill.ops.triton.sizes import cdiv, next_power_of_2

MAX_STREAMED_TOKENS = 4
STRIP = 2  # matrix rows a program streams
MAX_FEW_PAIRS = 256  # that a single program sorts, faster than a dozen kernels that sort any number


@kernel
def _stream_gate_up(
    x, ids, gate_up, out, hidden, inter,
    K: tl.constexpr, KIND: tl.constexpr, STRIP: tl.constexpr, STRIDE: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [pairs, inter] = act(gate x) * up x"""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)  # not before the ids are there: the next kernel reads them without waiting
    pair = tl.program_id(0)
    rows = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    columns = tl.arange(0, STRIDE)
    is_row = rows < inter
    expert = tl.load(ids + pair)
    lines = gate_up + (expert * 2 * inter + rows)[:, None] * hidden + columns[None, :]
    source = x + (pair // K).to(tl.int64) * hidden
    gates = tl.zeros((STRIP, STRIDE), tl.float32)
    ups = tl.zeros((STRIP, STRIDE), tl.float32)
    for start in range(0, hidden, STRIDE):
        inside = start + columns < hidden
        both = is_row[:, None] & inside[None, :]
        factors = tl.load(source + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        gates += tl.load(lines + start, mask=both, other=0.0).to(tl.float32) * factors
        ups += tl.load(lines + inter * hidden + start, mask=both, other=0.0).to(tl.float32) * factors
    result = activate(tl.sum(gates, axis=1), KIND) * tl.sum(ups, axis=1)
    tl.store(out + pair.to(tl.int64) * inter + rows, result.to(out.dtype.element_ty), mask=is_row)


@kernel
def _stream_down(
    inner, ids, weights, down, out, hidden, inter,
    K: tl.constexpr, K_PADDED: tl.constexpr, STRIP: tl.constexpr, STRIDE: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, hidden] = sum over the choices; their matrices are on their way before `inner` is known"""
    let_next_begin(OVERLAPS)
    token = tl.program_id(0)
    rows = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    columns = tl.arange(0, STRIDE)
    choices = tl.arange(0, K_PADDED)
    pairs = token * K + choices
    is_choice = choices < K
    chosen = tl.load(ids + pairs, mask=is_choice, other=0, cache_modifier=".cg")
    lines = down + (chosen[:, None] * hidden + rows[None, :])[:, :, None] * inter + columns[None, None, :]
    is_line = is_choice[:, None, None] & (rows < hidden)[None, :, None]
    parts = tl.load(lines, mask=is_line & (columns < inter)[None, None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    shares = tl.load(weights + pairs, mask=is_choice, other=0.0)
    sums = tl.zeros((STRIP, STRIDE), tl.float32)
    for start in range(0, inter, STRIDE):
        inside = is_choice[:, None] & (start + columns < inter)[None, :]
        factors = tl.load(inner + pairs[:, None] * inter + start + columns[None, :], mask=inside, other=0.0)
        factors = factors.to(tl.float32) * shares[:, None]
        sums += tl.sum(parts.to(tl.float32) * factors[:, None, :], axis=0)
        following = start + STRIDE
        parts = tl.load(lines + following, mask=is_line & (following + columns < inter)[None, None, :], other=0.0)
    tl.store(out + token * hidden + rows, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=rows < hidden)


@kernel_for_any("num_pairs")
def _sort_pairs(
    ids, order, offsets, num_pairs, num_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, AT_ONCE: tl.constexpr
) -> None:  # fmt: skip
    """A pair's place is the number of pairs before it, and an expert's offset that of pairs before his."""
    pairs, experts = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    own = tl.load(ids + pairs, mask=pairs < num_pairs, other=0)
    places, begins = tl.zeros((PAIRS,), tl.int64), tl.zeros((EXPERTS,), tl.int64)
    for first in range(0, num_pairs, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)
        found = tl.load(ids + others, mask=others < num_pairs, other=num_experts)[None, :]
        is_earlier = (found == own[:, None]) & (others[None, :] < pairs[:, None])
        places += tl.sum(((found < own[:, None]) | is_earlier).to(tl.int64), axis=1)
        begins += tl.sum((found < experts[:, None]).to(tl.int64), axis=1)
    tl.store(order + places, pairs.to(tl.int64), mask=pairs < num_pairs)
    tl.store(offsets + experts, begins, mask=experts <= num_experts)


@kernel
def _grouped(
    x, matrices, out, order, offsets, shares, num_out, num_in, num_experts,
    K: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    IS_GATHERED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Tiles of sorted pairs times their expert's matrix [num_out, num_in].

    IS_GATHERED: rows of x are tokens, rows of out sorted pairs; else x has sorted pairs, and out pairs times shares.
    """
    tile = tl.program_id(0)
    low, high = 0, num_experts
    while high - low > 1:  # the last expert whose tiles begin at or before this one
        middle = (low + high) // 2
        if tl.load(offsets + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    expert = low
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    first = begin + (tile - begin // TILE - expert) * TILE
    if first < end:
        places = first + tl.arange(0, TILE)
        is_pair = places < end
        pairs = tl.load(order + places, mask=is_pair, other=0)
        sources = pairs // K if IS_GATHERED else places
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < num_out
        strides = tl.arange(0, STRIDE)
        matrix = matrices + tl.cast(expert, tl.int64) * num_out * num_in
        x_lines = x + sources.to(tl.int64)[:, None] * num_in + strides[None, :]
        lines = matrix + columns[:, None] * num_in + strides[None, :]
        sums = tl.zeros((TILE, COLUMNS), tl.float32)
        for start in range(0, num_in, STRIDE):
            inside = (start + strides < num_in)[None, :]
            left = tl.load(x_lines + start, mask=is_pair[:, None] & inside, other=0.0)
            right = tl.load(lines + start, mask=is_column[:, None] & inside, other=0.0)
            sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
        if IS_GATHERED:
            targets = places
        else:
            sums *= tl.load(shares + pairs, mask=is_pair, other=0.0)[:, None]
            targets = pairs
        out_lines = out + targets.to(tl.int64)[:, None] * num_out + columns[None, :]
        tl.store(out_lines, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    if len(x) <= MAX_STREAMED_TOKENS:
        return _streamed(x.contiguous(), weights, ids, packed, activation)
    tile = _tile_for(ids.numel() / packed.num_experts, x.dtype)
    return sorted_experts(x.contiguous(), weights, ids, packed, activation, tile).sum(dim=1)


def _streamed(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    gate_up, down = packed.packed
    (num_tokens, hidden), k, inter = x.shape, ids.shape[1], down.shape[2]
    inner = x.new_empty(num_tokens * k, inter)
    out = torch.empty_like(x)
    wide = min(2048, next_power_of_2(hidden))
    _stream_gate_up[(num_tokens * k, cdiv(inter, STRIP))](
        x, ids, gate_up, inner, hidden, inter, k, activation, STRIP, wide, num_warps=4, **launch_options()
    )  # fmt: skip
    _stream_down[(num_tokens, cdiv(hidden, STRIP))](
        inner, ids, weights, down, out, hidden, inter, k, next_power_of_2(k), STRIP,
        min(1024, next_power_of_2(inter)), num_warps=4, **launch_options()
    )  # fmt: skip
    return out


class Tile(NamedTuple):
    """Sorted pairs, matrix rows and columns that a program multiplies at a time."""

    pairs: int
    columns: int
    stride: int
    warps: int
    stages: int


def sorted_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: ExpertsWeight,
    activation: Activation,
    tile: Tile,
) -> torch.Tensor:
    """What each choice adds: [T, k, H]"""
    gate_up, down = packed.packed
    (num_tokens, hidden), k, inter = x.shape, ids.shape[1], down.shape[2]
    order, offsets = sorted_pairs(ids.flatten(), packed.num_experts)
    gated = x.new_empty(num_tokens * k, 2 * inter)
    _multiply(x, gate_up, gated, order, offsets, weights, k, tile, is_gathered=True)
    pairs = x.new_empty(num_tokens * k, hidden)
    _multiply(act_mul(gated, activation), down, pairs, order, offsets, weights, k, tile, is_gathered=False)
    return pairs.view(num_tokens, k, hidden)


def sorted_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [P] → pairs in the order of their experts [P]; where each expert's begin [num_experts + 1]"""
    if len(ids) > MAX_FEW_PAIRS:
        sorted_ids, order = ids.sort(stable=True)
        return order, torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    order, offsets = torch.empty_like(ids), ids.new_empty(num_experts + 1)
    _sort_pairs[(1,)](
        ids, order, offsets, len(ids), num_experts, MAX_FEW_PAIRS, next_power_of_2(num_experts + 1), 32, num_warps=8
    )
    return order, offsets


def _multiply(
    x: torch.Tensor,
    matrices: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    shares: torch.Tensor,
    k: int,
    tile: Tile,
    *,
    is_gathered: bool,
) -> None:
    num_experts, num_out, num_in = matrices.shape
    num_pairs = len(order)
    grid = (num_pairs // tile.pairs + num_experts, cdiv(num_out, tile.columns))
    _grouped[grid](
        x, matrices, out, order, offsets, shares, num_out, num_in, num_experts,
        k, tile.pairs, tile.columns, tile.stride, is_gathered, precision_of(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tile_for(pairs_per_expert: float, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2)
    if pairs_per_expert <= 16:
        return Tile(16, 64, 128, 4, 4)
    return Tile(64, 128, 64, 4, 4) if pairs_per_expert <= 128 else Tile(128, 128, 64, 8, 3)
