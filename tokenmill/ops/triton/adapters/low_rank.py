"""Adapters on a GPU: two kernels behind a product, for any mix of adapters in a batch.

    shrink    h = a x          a program for each token and a few ranks
    expand    out += b h       a program for each token and some columns, in place

A program looks up its token's slot and reads that adapter's matrices; tokens without one end at once. So nothing is
sorted, nothing waits for the host, and a captured graph serves whatever adapters its rows have. From some number of
tokens on, tiles of them are multiplied at a time: a tile goes through the adapters of its tokens one after another, and
the tokens of a prompt all have the same. Every sum has one order, so a token's result does not depend on the others;
but both ways add up differently, so where that may not be seen (--deterministic) it is always tiles.

Matrices of a projection lie in one tensor for all slots, with room for the largest rank; an adapter of a smaller rank
is read only as far as it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

RANKS = 16  # ranks are padded to multiples of this
MAX_SINGLE = 64  # tokens that are computed one by one
TILE = 32  # tokens of a tile
# Ranks and columns of a program that shrinks, and its warps; columns of one that expands, and its warps.
SHRINK_TILE, SHRINK_WARPS = (4, 2048), 8
EXPAND_ROWS, EXPAND_WARPS = 128, 4


# ── one token a program ────────────────────────────────────────────────────────────────────────────────


@kernel
def _shrink(
    x, slots, a, ranks, out, columns, max_rank, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHECKS_RANKS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    slot = tl.load(slots + token).to(tl.int64)
    is_used = slot > 0
    if CHECKS_RANKS:
        part = first // max_rank
        is_used = first - part * max_rank < tl.load(ranks + slot * PARTS + part)  # slot 0 has no ranks
    rows, lanes = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = (tl.maximum(slot, 1) - 1) * PARTS * max_rank * columns + rows[:, None].to(tl.int64) * columns + lanes[None, :]
    limit = tl.where(is_used, columns, 0)
    weights = tl.load(a + at, mask=(lanes < limit)[None, :], other=0.0).to(tl.float32)
    if is_used:
        values = tl.load(x + token * columns + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
        sums = weights * values[None, :]
        for start in range(BLOCK, columns, BLOCK):
            inside = start + lanes < columns
            values = tl.load(x + token * columns + start + lanes, mask=inside, other=0.0).to(tl.float32)
            sums += tl.load(a + at + start, mask=inside[None, :], other=0.0).to(tl.float32) * values[None, :]
        tl.store(out + token * PARTS * max_rank + rows, tl.sum(sums, axis=1))


@kernel
def _look_up(
    numbers, slots, a, ranks, out, num_rows, max_rank, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:  # fmt: skip
    """The ranks of an embedding's rows: a is [slots, rows, max_rank]"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slots + token).to(tl.int64)
    if slot > 0:
        inside = lanes < tl.load(ranks + slot)
        row = a + ((slot - 1) * num_rows + tl.load(numbers + token)) * max_rank
        tl.store(out + token * max_rank + lanes, tl.load(row + lanes, mask=inside, other=0.0).to(tl.float32), inside)


@triton.jit
def _part_of(rows, starts, PARTS: tl.constexpr):
    """The number of the stacked matrix that each row belongs to"""
    part = rows * 0
    for other in tl.static_range(1, PARTS):
        part += (rows >= tl.load(starts + other)).to(tl.int32)
    return part


@kernel
def _expand(
    shrunk, slots, b, ranks, starts, gains, bias, out, num_rows, max_rank, PARTS: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHECKS_RANKS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    slot = tl.load(slots + token).to(tl.int64)
    is_used = slot > 0
    part = _part_of(rows, starts, PARTS)
    used = rows * 0 + max_rank
    if CHECKS_RANKS:
        used = tl.load(ranks + slot * PARTS + part)
    lanes = tl.arange(0, WIDTH)
    at = ((tl.maximum(slot, 1) - 1) * num_rows + rows[:, None]) * max_rank + lanes[None, :]
    used = tl.where(is_used, used, 0)
    there = inside[:, None] & (lanes[None, :] < used[:, None])
    weights = tl.load(b + at, mask=there, other=0.0).to(tl.float32)
    if is_used:
        held = shrunk + token * PARTS * max_rank + part[:, None] * max_rank + lanes[None, :]
        before = tl.load(out + token * num_rows + rows, mask=inside, other=0.0).to(tl.float32)
        sums = tl.sum(weights * tl.load(held, mask=there, other=0.0), axis=1)
        for start in range(WIDTH, tl.max(tl.where(inside, used, 0)), WIDTH):
            there = inside[:, None] & (start + lanes[None, :] < used[:, None])
            weights = tl.load(b + at + start, mask=there, other=0.0).to(tl.float32)
            sums += tl.sum(weights * tl.load(held + start, mask=there, other=0.0), axis=1)
        if HAS_GAIN:
            product = before
            if HAS_BIAS:
                product -= tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
            sums += product * tl.load(gains + (slot - 1) * num_rows + rows, mask=inside, other=0.0)
        tl.store(out + token * num_rows + rows, (before + sums).to(out.dtype.element_ty), mask=inside)


# ── tiles of tokens ────────────────────────────────────────────────────────────────────────────────────


@kernel_unspecialized("num_tokens")
def _shrink_tiles(
    x, slots, a, ranks, out, num_tokens, columns, max_rank, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * ROWS
    part = first // max_rank
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
    rows, lanes = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    left = slot
    present = tl.max(left, axis=0)
    while present > 0:
        mine = slot == present
        if first - part * max_rank < tl.load(ranks + present * PARTS + part):
            own = a + (present - 1).to(tl.int64) * PARTS * max_rank * columns
            sums = tl.zeros((TOKENS, ROWS), tl.float32)
            for start in range(0, columns, BLOCK):
                inside = start + lanes < columns
                at = tokens[:, None].to(tl.int64) * columns + start + lanes[None, :]
                values = tl.load(x + at, mask=mine[:, None] & inside[None, :], other=0.0)
                at = rows[None, :].to(tl.int64) * columns + start + lanes[:, None]
                weights = tl.load(own + at, mask=inside[:, None], other=0.0)
                sums = tl.dot(values, weights, sums, input_precision="ieee")
            at = tokens[:, None].to(tl.int64) * PARTS * max_rank + rows[None, :]
            tl.store(out + at, sums, mask=mine[:, None])
        left = tl.where(mine, 0, left)
        present = tl.max(left, axis=0)


@kernel_unspecialized("num_tokens")
def _expand_tiles(
    shrunk, slots, b, ranks, starts, gains, bias, out, num_tokens, num_rows, max_rank, PARTS: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
    lanes = tl.arange(0, WIDTH)
    part = _part_of(rows, starts, PARTS)
    left = slot
    present = tl.max(left, axis=0)
    while present > 0:
        mine = slot == present
        there = mine[:, None] & inside[None, :]
        own = b + (present - 1).to(tl.int64) * num_rows * max_rank
        sums = tl.zeros((TOKENS, BLOCK), tl.float32)
        for number in tl.static_range(PARTS):
            used = tl.load(ranks + present * PARTS + number)
            belongs = inside & (part == number)
            if tl.max(belongs.to(tl.int32), axis=0) > 0:
                for start in range(0, used, WIDTH):
                    is_used = start + lanes < used
                    at = (tokens[:, None].to(tl.int64) * PARTS + number) * max_rank + start + lanes[None, :]
                    held = tl.load(shrunk + at, mask=mine[:, None] & is_used[None, :], other=0.0)
                    at = rows[None, :].to(tl.int64) * max_rank + start + lanes[:, None]
                    weights = tl.load(own + at, mask=is_used[:, None] & belongs[None, :], other=0.0)
                    sums = tl.dot(held.to(weights.dtype), weights, sums, input_precision="ieee")
        at = out + tokens[:, None].to(tl.int64) * num_rows + rows[None, :]
        before = tl.load(at, mask=there, other=0.0).to(tl.float32)
        if HAS_GAIN:
            product = before
            if HAS_BIAS:
                product -= tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
            gain = tl.load(gains + (present - 1).to(tl.int64) * num_rows + rows, mask=inside, other=0.0)
            sums += product * gain[None, :]
        tl.store(at, (before + sums).to(out.dtype.element_ty), mask=there)
        left = tl.where(mine, 0, left)
        present = tl.max(left, axis=0)


# ── what projections hold ──────────────────────────────────────────────────────────────────────────────


class TokenSlots(NamedTuple):
    """The slots of a step's tokens, and how they are computed"""

    slots: torch.Tensor  # int32 [T]
    in_tiles: bool


class TritonLowRankOps:
    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def plan(self, slots: torch.Tensor) -> TokenSlots:
        return TokenSlots(slots.contiguous(), self._deterministic or len(slots) > MAX_SINGLE)

    def hold(
        self,
        sizes: tuple[int, ...],
        columns: int,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
        *,
        is_embedding: bool = False,
    ) -> TritonLowRank:
        return TritonLowRank(sizes, columns, num_slots, max_rank, like, is_embedding=is_embedding)

    def hold_experts(self, num_experts: int, num_slots: int, like: torch.Tensor) -> None:
        return None


class TritonLowRank:
    def __init__(
        self,
        sizes: tuple[int, ...],
        columns: int,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
        *,
        is_embedding: bool,
    ) -> None:
        self.is_active = False
        self._max_rank = cdiv(max_rank, RANKS) * RANKS
        self._columns = columns
        self._is_embedding = is_embedding
        parts, rows = len(sizes), sum(sizes)
        self._starts = [0, *accumulate(sizes)]
        shape = (num_slots, columns, self._max_rank) if is_embedding else (num_slots, parts * self._max_rank, columns)
        self._a = like.new_zeros(shape)
        self._b = like.new_zeros(num_slots, rows, self._max_rank)
        self._ranks = like.new_zeros(num_slots + 1, parts, dtype=torch.int32)
        self._part_starts = torch.tensor(self._starts, dtype=torch.int32, device=like.device)
        self._gains = like.new_zeros(1, dtype=torch.float32)  # [slots, rows] once an adapter has some

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> bool:
        was = self.is_active, self._has_gains
        self.is_active |= any(part is not None for part in parts)
        if not self.is_active:
            return False
        self._ranks[slot] = torch.tensor([0 if part is None else part.rank for part in parts], dtype=torch.int32)
        if any(part is not None and part.gain is not None for part in parts) and not self._has_gains:
            self._gains = self._gains.new_zeros(self._b.shape[:2])
        if self._has_gains:
            self._gains[slot - 1] = 0.0
        self._a[slot - 1] = 0.0  # ranks that this one does not have, where the largest is too small to look
        self._b[slot - 1] = 0.0
        for number, part in enumerate(parts):
            if part is not None:
                self._put_part(slot - 1, number, part)
        return was != (self.is_active, self._has_gains)

    @property
    def _has_gains(self) -> bool:
        return self._gains.dim() == 2

    def _put_part(self, at: int, number: int, part: LowRank) -> None:
        rows = slice(self._starts[number], self._starts[number + 1])
        if self._is_embedding:
            self._a[at, :, : part.rank] = part.a.t().to(self._a)
        else:
            first = number * self._max_rank
            self._a[at, first : first + part.rank] = part.a.to(self._a)
        self._b[at, rows, : part.rank] = part.b.to(self._b)
        if part.gain is not None:
            self._gains[at, rows] = part.gain.to(self._gains)

    def add(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: TokenSlots) -> torch.Tensor:
        if not self.is_active or not len(x):
            return out
        return self._expanded(self._shrunk(x, plan), out, bias, plan)

    def _shrunk(self, x: torch.Tensor, plan: TokenSlots) -> torch.Tensor:
        x, parts = x.contiguous(), len(self._starts) - 1
        shrunk = torch.empty(len(x), parts * self._max_rank, dtype=torch.float32, device=x.device)
        args = (x, plan.slots, self._a, self._ranks, shrunk)
        if plan.in_tiles:
            grid = (cdiv(len(x), TILE), parts * self._max_rank // RANKS)
            _shrink_tiles[grid](
                *args, len(x), self._columns, self._max_rank, parts, TILE, RANKS, 64, **launch_options()
            )
        else:
            rows, block = SHRINK_TILE[0], min(SHRINK_TILE[1], next_power_of_2(self._columns))
            grid = (len(x), parts * self._max_rank // rows)
            sizes, kinds = (self._columns, self._max_rank), (parts, rows, block, self._max_rank > RANKS)
            _shrink[grid](*args, *sizes, *kinds, num_warps=SHRINK_WARPS, **launch_options())
        return shrunk

    def add_rows(self, numbers: torch.Tensor, out: torch.Tensor, plan: TokenSlots) -> torch.Tensor:
        if not self.is_active or not len(numbers):
            return out
        shrunk = torch.empty(len(numbers), self._max_rank, dtype=torch.float32, device=out.device)
        block = next_power_of_2(self._max_rank)
        _look_up[(len(numbers),)](
            numbers, plan.slots, self._a, self._ranks, shrunk, self._columns, self._max_rank, block, **launch_options()
        )
        return self._expanded(shrunk, out, None, plan)

    def _expanded(
        self, shrunk: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: TokenSlots
    ) -> torch.Tensor:
        out, parts, rows = out.contiguous(), len(self._starts) - 1, self._starts[-1]
        args = (shrunk, plan.slots, self._b, self._ranks, self._part_starts, self._gains)
        given = self._gains if bias is None else bias
        kinds = (parts, self._has_gains, bias is not None)
        if plan.in_tiles:
            grid = (cdiv(len(out), TILE), cdiv(rows, 64))
            sizes = (len(out), rows, self._max_rank)
            _expand_tiles[grid](*args, given, out, *sizes, *kinds, TILE, 64, RANKS, **launch_options())
        else:
            grid = (len(out), cdiv(rows, EXPAND_ROWS))
            sizes = (EXPAND_ROWS, RANKS, self._max_rank > RANKS)
            _expand[grid](
                *args, given, out, rows, self._max_rank, *kinds, *sizes, num_warps=EXPAND_WARPS, **launch_options()
            )
        return out
