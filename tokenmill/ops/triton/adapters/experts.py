"""Adapters of routed experts on a GPU: low-rank updates of the experts' products, per (token, expert) pair.

Pairs are sorted by expert, as for the experts' own products (`moe/pairs.py`), whose results are updated in place:

    gate_up [P, 2 inter]   sorted pairs, before the activation       += b (a x) of the pair's slot and expert
    down    [P, H]         pairs in their own order, weighted        += weight * b (a inner)

A few tokens are computed pair by pair: a program looks up its pair's slot and expert and reads those matrices; the same
kernel applies the activation, or sums over a token's experts. More tokens are computed in tiles of an expert's pairs,
which loop over the adapters of their tokens. Both ways use a fixed order for every sum, but not the same one; with
--deterministic tiles are always used.

The matrices of a layer are one tensor for all slots and experts, sized for the largest rank and padded with zeros. Gate
rows are stacked above up rows. It is allocated only if an adapter of experts is configured at load, since it takes
several times the memory of other adapters (`lora/sizes.py` counts it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight
from tokenmill.ops.low_rank import ExpertsShape, LowRank
from tokenmill.ops.triton.adapters.token_slots import RANKS, TokenSlots
from tokenmill.ops.triton.elementwise.activation import act, act_mul, activate, gated
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.moe.grouped_gemm import (
    add_choices,
    deterministic_experts,
    deterministic_tile,
    experts,
    multiply_pairs,
    pick_grouped_config,
)
from tokenmill.ops.triton.moe.pairs import SortedPairs, expert_of_tile, sort_pairs

TILE = 32  # pairs per tile
ROWS = 64  # rows of b that a tile is multiplied by at a time
SHRINK_ROWS, SHRINK_COLUMNS = 4, 2048  # of `a`, per program of `_shrink_pairs`
EXPAND_ROWS = 256  # of `b`, per program of `_expand_inner` and `_expand_down`


# ── one pair per program ───────────────────────────────────────────────────────────────────────────────


@kernel
def _shrink_pairs(
    x, order, ids, slots, a, out, columns, num_ranks, num_experts, K: tl.constexpr, IS_GATHERED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """IS_GATHERED: rows of x are tokens; else sorted pairs. out [P, num_ranks]: pairs in their original order"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + place)
    slot = tl.load(slots + pair // K).to(tl.int64)
    if slot > 0:
        matrix = (slot - 1) * num_experts + tl.load(ids + pair)
        source = x + (pair // K if IS_GATHERED else place) * columns
        rows, lanes = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        own = a + (matrix * num_ranks + rows[:, None]) * columns + lanes[None, :]
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, columns, BLOCK):
            inside = start + lanes < columns
            values = tl.load(source + start + lanes, mask=inside, other=0.0).to(tl.float32)
            sums += tl.load(own + start, mask=inside[None, :], other=0.0).to(tl.float32) * values[None, :]
        tl.store(out + pair * num_ranks + rows, tl.sum(sums, axis=1))


@triton.jit
def _added(
    product, shrunk, b, gains, bias, matrix, expert, rows, inside, num_rows, weight,
    RANKS_EACH: tl.constexpr, WIDTH: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add the adapter's update, times the pair's routing `weight`, to some rows of one pair's `product`."""
    ranks = tl.arange(0, WIDTH)
    at = b + (matrix * num_rows + rows[:, None]) * RANKS_EACH + ranks[None, :]
    sums = product * 0.0
    for start in range(0, RANKS_EACH, WIDTH):
        factors = tl.load(at + start, mask=inside[:, None], other=0.0).to(tl.float32)
        sums += tl.sum(factors * tl.load(shrunk + start + ranks)[None, :], axis=1)
    sums *= weight
    if HAS_GAIN:
        own = product
        if HAS_BIAS:
            own -= tl.load(bias + expert * num_rows + rows, mask=inside, other=0.0).to(tl.float32) * weight
        sums += own * tl.load(gains + matrix * num_rows + rows, mask=inside, other=0.0)
    return product + sums


@kernel
def _expand_inner(
    product, shrunk, order, ids, slots, b, gains, bias, out, inter, num_rows, num_experts, K: tl.constexpr,
    RANKS_EACH: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """product [P, num_rows] of sorted pairs, gates and then ups or ups alone → out [P, inter] = act(gate) * up"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    place, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, pair = rows < inter, tl.load(order + place)
    slot, expert = tl.load(slots + pair // K).to(tl.int64), tl.load(ids + pair)
    num_parts: tl.constexpr = 2 if IS_GATED else 1
    source, held = product + place * num_rows + rows, shrunk + pair * num_parts * RANKS_EACH
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = first
    if IS_GATED:
        second = tl.load(source + inter, mask=inside, other=0.0).to(tl.float32)
    if slot > 0:
        matrix = (slot - 1) * num_experts + expert
        first = _added(
            first, held, b, gains, bias, matrix, expert, rows, inside, num_rows, 1.0, RANKS_EACH, WIDTH, HAS_GAIN,
            HAS_BIAS,
        )  # fmt: skip
        if IS_GATED:
            second = _added(
                second, held + RANKS_EACH, b, gains, bias, matrix, expert, rows + inter, inside, num_rows, 1.0,
                RANKS_EACH, WIDTH, HAS_GAIN, HAS_BIAS,
            )  # fmt: skip
    # Rounded as by the separate activation kernel.
    first = first.to(out.dtype.element_ty).to(tl.float32)
    second = second.to(out.dtype.element_ty).to(tl.float32)
    result = gated(first, second, KIND) if IS_GATED else activate(first, KIND)
    tl.store(out + place * inter + rows, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _expand_down(
    product, shrunk, ids, weights, slots, b, gains, bias, out, num_rows, num_experts, K: tl.constexpr,
    RANKS_EACH: tl.constexpr, WIDTH: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """product [P, num_rows] of weighted pairs → out [T, num_rows], summed over the experts of each token"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = rows < num_rows, tl.load(slots + token).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        pair = token * K + choice
        result = tl.load(product + pair * num_rows + rows, mask=inside, other=0.0).to(tl.float32)
        if slot > 0:
            expert = tl.load(ids + pair)
            matrix = (slot - 1) * num_experts + expert
            result = _added(
                result, shrunk + pair * RANKS_EACH, b, gains, bias, matrix, expert, rows, inside, num_rows,
                tl.load(weights + pair), RANKS_EACH, WIDTH, HAS_GAIN, HAS_BIAS,
            )  # fmt: skip
        total += result
    tl.store(out + token * num_rows + rows, total.to(out.dtype.element_ty), mask=inside)


# ── tiles of an expert's pairs ─────────────────────────────────────────────────────────────────────────


@kernel_unspecialized("num_experts")
def _shrink_tiles(
    x, order, offsets, slots, a, out, columns, num_ranks, num_experts, K: tl.constexpr, IS_GATHERED: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    expert, first, end = expert_of_tile(offsets, num_experts, TILE)
    if first < end:
        places = first + tl.arange(0, TILE)
        is_pair = places < end
        pairs = tl.load(order + places, mask=is_pair, other=0)
        sources = pairs // K if IS_GATHERED else places
        rows, lanes = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        left = tl.load(slots + pairs // K, mask=is_pair, other=0)
        present = tl.max(left, axis=0)
        while present > 0:
            mine = left == present
            own = a + ((present - 1).to(tl.int64) * num_experts + expert) * num_ranks * columns
            sums = tl.zeros((TILE, ROWS), tl.float32)
            for start in range(0, columns, BLOCK):
                inside = start + lanes < columns
                at = x + sources.to(tl.int64)[:, None] * columns + start + lanes[None, :]
                values = tl.load(at, mask=mine[:, None] & inside[None, :], other=0.0)
                at = own + rows[None, :].to(tl.int64) * columns + start + lanes[:, None]
                sums = tl.dot(values, tl.load(at, mask=inside[:, None], other=0.0), sums, input_precision="ieee")
            tl.store(out + pairs[:, None] * num_ranks + rows[None, :], sums, mask=mine[:, None])
            left = tl.where(mine, 0, left)
            present = tl.max(left, axis=0)


@kernel_unspecialized("num_experts")
def _expand_tiles(
    shrunk, order, offsets, weights, slots, b, gains, bias, out, num_rows, num_experts, inter, K: tl.constexpr,
    PARTS: tl.constexpr, IS_GATHERED: tl.constexpr, RANKS_EACH: tl.constexpr, WIDTH: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Add to rows of `out`: sorted pairs if tokens were gathered, else weighted pairs. Rows from `inter` on belong to
    the second of two PARTS."""
    expert, first, end = expert_of_tile(offsets, num_experts, TILE)
    if first < end:
        places = first + tl.arange(0, TILE)
        is_pair = places < end
        pairs = tl.load(order + places, mask=is_pair, other=0)
        targets = places if IS_GATHERED else pairs
        counts = tl.full((TILE,), 1.0, tl.float32)
        if not IS_GATHERED:
            counts = tl.load(weights + pairs, mask=is_pair, other=0.0)
        rows, ranks = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        is_row = rows < num_rows
        left = tl.load(slots + pairs // K, mask=is_pair, other=0)
        present = tl.max(left, axis=0)
        while present > 0:
            mine = left == present
            matrix = (present - 1).to(tl.int64) * num_experts + expert
            sums = tl.zeros((TILE, ROWS), tl.float32)
            for part in tl.static_range(PARTS):
                is_own = is_row
                if PARTS == 2:
                    is_own = is_row & (rows >= inter if part == 1 else rows < inter)
                if tl.max(is_own.to(tl.int32), axis=0) > 0:
                    of_pairs = shrunk + (pairs[:, None] * PARTS + part) * RANKS_EACH + ranks[None, :]
                    of_rows = b + (matrix * num_rows + rows[None, :]) * RANKS_EACH + ranks[:, None]
                    for start in range(0, RANKS_EACH, WIDTH):
                        held = tl.load(of_pairs + start, mask=mine[:, None], other=0.0)
                        factors = tl.load(of_rows + start, mask=is_own[None, :], other=0.0)
                        sums = tl.dot(held.to(factors.dtype), factors, sums, input_precision="ieee")
            sums *= counts[:, None]
            there = mine[:, None] & is_row[None, :]
            at = out + targets.to(tl.int64)[:, None] * num_rows + rows[None, :]
            before = tl.load(at, mask=there, other=0.0).to(tl.float32)
            if HAS_GAIN:
                own = before
                if HAS_BIAS:
                    found = tl.load(bias + expert * num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
                    own -= found[None, :] * counts[:, None]
                sums += own * tl.load(gains + matrix * num_rows + rows, mask=is_row, other=0.0)[None, :]
            tl.store(at, (before + sums).to(out.dtype.element_ty), mask=there)
            left = tl.where(mine, 0, left)
            present = tl.max(left, axis=0)


# ── a layer's adapters ─────────────────────────────────────────────────────────────────────────────────


class _ProductAdapters:
    """The adapters of one of a layer's two products, for all slots and experts; `sizes`: rows of its parts."""

    def __init__(self, sizes: tuple[int, ...], columns: int, num_experts: int, num_slots: int, ranks: int,
                 like: torch.Tensor) -> None:  # fmt: skip
        self.sizes, self.columns, self.ranks = sizes, columns, ranks
        self.num_experts, self.num_rows = num_experts, sum(sizes)
        self.a = like.new_zeros(num_slots, num_experts, len(sizes) * ranks, columns)
        self.b = like.new_zeros(num_slots, num_experts, self.num_rows, ranks)
        self.gains = like.new_zeros(1, dtype=torch.float32)  # [slots, experts, rows] once a DoRA adapter is loaded

    @property
    def num_ranks(self) -> int:
        return len(self.sizes) * self.ranks

    @property
    def has_gains(self) -> bool:
        return self.gains.dim() == 3

    def put(self, slot: int, experts: Sequence[Sequence[LowRank | None]]) -> None:
        if not self.has_gains and any(part is not None and part.gain is not None for own in experts for part in own):
            self.gains = self.gains.new_zeros(self.b.shape[:3])
        kept = (self.a, self.b, self.gains) if self.has_gains else (self.a, self.b)
        # Assembled on the adapter's device, mostly the host, and copied in one transfer.
        place = next((part.a.device for own in experts for part in own if part is not None), self.a.device)
        made = [held.new_zeros(held.shape[1:], device=place) for held in kept]
        for expert, parts in enumerate(experts):
            row = 0
            for number, (part, size) in enumerate(zip(parts, self.sizes, strict=True)):
                if part is not None:
                    first = number * self.ranks
                    made[0][expert, first : first + part.rank] = part.a
                    made[1][expert, row : row + size, : part.rank] = part.b
                    if part.gain is not None:
                        made[2][expert, row : row + size] = part.gain
                row += size
        for held, new in zip(kept, made, strict=True):
            held[slot - 1] = new

    def shrunk(
        self, x: torch.Tensor, ids: torch.Tensor, pairs: SortedPairs, plan: TokenSlots, *, is_gathered: bool
    ) -> torch.Tensor:
        """Return a x of each pair, float32 [P, ranks of all parts]; undefined for pairs without an adapter."""
        num_pairs = len(pairs.order)
        out = torch.empty(num_pairs, self.num_ranks, dtype=torch.float32, device=x.device)
        sizes = (self.columns, self.num_ranks, self.num_experts, pairs.k, is_gathered)
        if plan.in_tiles:
            _shrink_tiles[(num_pairs // TILE + self.num_experts, self.num_ranks // RANKS)](
                x, pairs.order, pairs.offsets, plan.slots, self.a, out, *sizes, TILE, RANKS, 64
            )
        else:
            block = min(SHRINK_COLUMNS, next_power_of_2(self.columns))
            _shrink_pairs[(num_pairs, self.num_ranks // SHRINK_ROWS)](
                x, pairs.order, ids, plan.slots, self.a, out, *sizes, SHRINK_ROWS, block, num_warps=8,
                **launch_options(),
            )  # fmt: skip
        return out

    def add(
        self, shrunk: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, pairs: SortedPairs,
        plan: TokenSlots, *, is_gathered: bool,
    ) -> None:  # fmt: skip
        """Add b (a x) to rows of `out`, in tiles."""
        _expand_tiles[(len(pairs.order) // TILE + self.num_experts, cdiv(self.num_rows, ROWS))](
            shrunk, pairs.order, pairs.offsets, pairs.weights, plan.slots, self.b, self.gains,
            self.gains if bias is None else bias, out, self.num_rows, self.num_experts, self.sizes[0], pairs.k,
            len(self.sizes), is_gathered, self.ranks, RANKS, self.has_gains, bias is not None, TILE, ROWS,
        )  # fmt: skip


class TritonLowRankExperts:
    def __init__(
        self, shape: ExpertsShape, num_slots: int, max_rank: int, like: torch.Tensor, *, deterministic: bool
    ) -> None:
        ranks = cdiv(max_rank, RANKS) * RANKS
        parts = (shape.inter,) * (2 if shape.is_gated else 1)
        self._is_gated = shape.is_gated
        self._inner = _ProductAdapters(parts, shape.hidden, shape.num_experts, num_slots, ranks, like)
        self._down = _ProductAdapters((shape.hidden,), shape.inter, shape.num_experts, num_slots, ranks, like)
        self._deterministic = deterministic
        self._is_active = False

    def put(self, slot: int, experts: Sequence[tuple[LowRank | None, LowRank | None, LowRank | None]]) -> bool:
        was = self._is_active, self._inner.has_gains, self._down.has_gains
        self._is_active |= any(part is not None for parts in experts for part in parts)
        if not self._is_active:
            return False
        self._inner.put(slot, [(gate, up) if self._is_gated else (up,) for gate, up, _ in experts])
        self._down.put(slot, [(down,) for _, _, down in experts])
        return was != (self._is_active, self._inner.has_gains, self._down.has_gains)

    @property
    def num_values(self) -> int:
        """Return the number of values in all slots."""
        return sum(held.a.numel() + held.b.numel() for held in (self._inner, self._down))

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        packed: ExpertsWeight,
        activation: Activation,
        plan: TokenSlots,
    ) -> torch.Tensor:
        if not self._is_active or not len(x):
            plain = deterministic_experts if self._deterministic else experts
            return plain(x, weights, ids, packed, activation)
        x, ids = x.contiguous(), ids.contiguous()
        pairs, each = sort_pairs(weights, ids, packed.num_experts), ids.numel() / packed.num_experts
        tile = deterministic_tile(x.dtype) if self._deterministic else pick_grouped_config(each, x.dtype)
        gate_up, down = packed.packed
        inner_bias = None if packed.gate_up_bias is None else packed.gate_up_bias.contiguous()
        down_bias = None if packed.down_bias is None else packed.down_bias.contiguous()
        shrunk = self._inner.shrunk(x, ids, pairs, plan, is_gathered=True)
        product = multiply_pairs(x, gate_up, pairs, tile, inner_bias, is_gathered=True)
        if plan.in_tiles:
            self._inner.add(shrunk, product, inner_bias, pairs, plan, is_gathered=True)
            inner = act_mul(product, activation) if self._is_gated else act(product, activation)
        else:
            inner = self._inner_of_few(product, shrunk, ids, pairs, inner_bias, activation, plan)
        shrunk = self._down.shrunk(inner, ids, pairs, plan, is_gathered=False)
        product = multiply_pairs(inner, down, pairs, tile, down_bias, is_gathered=False)
        if plan.in_tiles:
            self._down.add(shrunk, product, down_bias, pairs, plan, is_gathered=False)
            return add_choices(product.view(*ids.shape, -1))
        return self._down_of_few(product, shrunk, ids, pairs, down_bias, plan)

    def _inner_of_few(
        self,
        product: torch.Tensor,
        shrunk: torch.Tensor,
        ids: torch.Tensor,
        pairs: SortedPairs,
        bias: torch.Tensor | None,
        activation: Activation,
        plan: TokenSlots,
    ) -> torch.Tensor:
        held, inter = self._inner, self._inner.sizes[0]
        inner = product.new_empty(len(product), inter)
        _expand_inner[(len(product), cdiv(inter, EXPAND_ROWS))](
            product, shrunk, pairs.order, ids, plan.slots, held.b, held.gains, held.gains if bias is None else bias,
            inner, inter, held.num_rows, held.num_experts, pairs.k, held.ranks, RANKS, activation, self._is_gated,
            held.has_gains, bias is not None, EXPAND_ROWS, num_warps=4, **launch_options(),
        )  # fmt: skip
        return inner

    def _down_of_few(
        self,
        product: torch.Tensor,
        shrunk: torch.Tensor,
        ids: torch.Tensor,
        pairs: SortedPairs,
        bias: torch.Tensor | None,
        plan: TokenSlots,
    ) -> torch.Tensor:
        held = self._down
        out = product.new_empty(len(ids), held.num_rows)
        _expand_down[(len(ids), cdiv(held.num_rows, EXPAND_ROWS))](
            product, shrunk, ids, pairs.weights, plan.slots, held.b, held.gains, held.gains if bias is None else bias,
            out, held.num_rows, held.num_experts, pairs.k, held.ranks, RANKS, held.has_gains, bias is not None,
            EXPAND_ROWS, num_warps=4, **launch_options(),
        )  # fmt: skip
        return out
