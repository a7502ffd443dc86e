"""Adapters on a GPU: low-rank updates of a product, for any mix of adapters in a batch.

    shrink    h = a x          one program per token and a few ranks
    expand    out += b h       one program per token and some columns

A program looks up its token's slot and reads that adapter's matrices. So nothing is sorted, nothing waits for the host,
and a captured graph works for any adapters of its rows. Many tokens are computed in tiles, which loop over the adapters
of their tokens (the tokens of a prompt share one). Every sum has a fixed order, so a token's result does not depend on
the others; but the two ways have different orders, so --deterministic always uses tiles.

For a few tokens either kernel takes a few microseconds whatever it reads; the number of launches matters. So if the `a`
of all slots have few rows compared with an unquantised matrix, they are stacked below it. Where it is possible, one
kernel then computes the product, h and b h (`adapted_product.py`):

    2 to 32 tokens, on Hopper and later GPUs, without --deterministic
    matrices of 16 bits, each with a multiple of 64 rows, of 128 columns; ranks that are padded to a power of two
    no DoRA, and no infinite values in a slot

Otherwise one product computes h of every slot; `expand` then reads those of the token's slot. It also applies the
activation if gate rows are stacked above up rows. It prefetches from the slots before the product has ended.

A projection's matrices are one tensor for all slots, sized for the largest rank; of an adapter with a smaller rank only
its own ranks are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.triton.adapters.adapted_product import MATRIX_TILE, Factors, adapted_product
from tokenmill.ops.triton.adapters.token_slots import RANKS, TokenSlots
from tokenmill.ops.triton.elementwise.activation import act_mul, gated
from tokenmill.ops.triton.gemm.product import PLAIN
from tokenmill.ops.triton.gemm.select import choose
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

TILE = 32  # tokens per tile
MAX_JOINED = 0.25  # `a` of all slots are stacked below the matrix if they have at most this fraction of its rows
# Ranks and columns per program of `_shrink`, and its warps; columns per program of `_expand`, and its warps.
SHRINK_TILE, SHRINK_WARPS = (4, 2048), 8
EXPAND_ROWS, EXPAND_WARPS = 256, 4


# ── one token per program ──────────────────────────────────────────────────────────────────────────────


@kernel
def _shrink(
    x, slots, a, ranks, out, columns, max_rank, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHECKS_RANKS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    slot = tl.load(slots + token).to(tl.int64)  # which is known since long, see `settle`
    is_used = slot > 0
    if CHECKS_RANKS:
        part = first // max_rank
        is_used = first - part * max_rank < tl.load(ranks + slot * PARTS + part)  # slot 0 has no ranks
    rows, lanes = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = (tl.maximum(slot, 1) - 1) * PARTS * max_rank * columns + rows[:, None].to(tl.int64) * columns + lanes[None, :]
    limit = tl.where(is_used, columns, 0)
    weights = tl.load(a + at, mask=(lanes < limit)[None, :], other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
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
    """Look up the ranks of an embedding's rows: `a` is [slots, rows, max_rank]."""
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
    """Return the index of the stacked matrix to which each row belongs."""
    part = rows * 0
    for other in tl.static_range(1, PARTS):
        part += (rows >= tl.load(starts + other)).to(tl.int32)
    return part


@triton.jit
def _first_ranks(
    slot, begin, rows, b, ranks, starts, num_rows, max_rank, PARTS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, CHECKS_RANKS: tl.constexpr,
):  # fmt: skip
    """Return for some rows of b the index of their part, its rank, their offsets and their first WIDTH values. If parts
    begin at whole blocks (IS_ALIGNED) the first two are scalars, otherwise [rows, 1]."""
    part = _part_of(begin, starts, PARTS) if IS_ALIGNED else _part_of(rows, starts, PARTS)[:, None]
    used = part * 0 + max_rank
    if CHECKS_RANKS:
        used = tl.load(ranks + slot * PARTS + part)
    used = tl.where(slot > 0, used, 0)
    lanes = tl.arange(0, WIDTH)[None, :]
    at = ((tl.maximum(slot, 1) - 1) * num_rows + rows[:, None]) * max_rank + lanes
    return part, used, at, tl.load(b + at, mask=(rows < num_rows)[:, None] & (lanes < used), other=0.0)


@triton.jit
def _adapted(
    before, found, slot, rows, shrunk, b, gains, bias, num_rows, max_rank, HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return `before` plus the adapter's update; `found`: see `_first_ranks`; `shrunk`: h of the first part."""
    part, used, at, weights = found
    inside, lanes = rows < num_rows, tl.arange(0, WIDTH)[None, :]
    held = shrunk + part * max_rank + lanes
    sums = tl.sum(weights.to(tl.float32) * tl.load(held, mask=lanes < used, other=0.0).to(tl.float32), axis=1)
    for start in range(WIDTH, used if IS_ALIGNED else tl.max(used), WIDTH):
        is_used = start + lanes < used
        more = tl.load(b + at + start, mask=inside[:, None] & is_used, other=0.0).to(tl.float32)
        sums += tl.sum(more * tl.load(held + start, mask=is_used, other=0.0).to(tl.float32), axis=1)
    if HAS_GAIN:
        product = before
        if HAS_BIAS:
            product -= tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        there = rows < tl.where(slot > 0, num_rows, 0)
        sums += product * tl.load(gains + (tl.maximum(slot, 1) - 1) * num_rows + rows, mask=there, other=0.0)
    return before + sums


@kernel
def _expand(
    shrunk, product, slots, b, ranks, starts, gains, bias, out, num_rows, max_rank, shrunk_size, shrunk_step,
    product_size, inter, PARTS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHECKS_RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """`shrunk_size` is the stride of h between tokens, `shrunk_step` that between slots, `product_size` that of the
    product between tokens. With an activation (KIND) rows from `inter` on are ups."""
    launch_dependents(OVERLAPS)
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    rows = begin + tl.arange(0, BLOCK)
    slot = tl.load(slots + token).to(tl.int64)  # which is known since long, see `settle`
    first = _first_ranks(
        slot, begin, rows, b, ranks, starts, num_rows, max_rank, PARTS, IS_ALIGNED, WIDTH, CHECKS_RANKS
    )
    if KIND != "":
        second = _first_ranks(
            slot, begin + inter, rows + inter, b, ranks, starts, num_rows, max_rank, PARTS, IS_ALIGNED, WIDTH,
            CHECKS_RANKS,
        )  # fmt: skip
    wait_for_previous(OVERLAPS)
    num_out = inter if KIND != "" else num_rows
    inside = rows < num_out
    own = shrunk + token * shrunk_size + (tl.maximum(slot, 1) - 1) * shrunk_step
    before = tl.load(product + token * product_size + rows, mask=inside, other=0.0).to(tl.float32)
    if KIND != "":
        up = tl.load(product + token * product_size + inter + rows, mask=inside, other=0.0).to(tl.float32)
        up = _adapted(
            up, second, slot, rows + inter, own, b, gains, bias, num_rows, max_rank, HAS_GAIN, HAS_BIAS, IS_ALIGNED,
            WIDTH,
        )  # fmt: skip
        # Rounded as by the separate activation kernel.
        up = up.to(out.dtype.element_ty).to(tl.float32)
    result = _adapted(
        before, first, slot, rows, own, b, gains, bias, num_rows, max_rank, HAS_GAIN, HAS_BIAS, IS_ALIGNED, WIDTH
    )
    if KIND != "":
        result = gated(result.to(out.dtype.element_ty).to(tl.float32), up, KIND)
    tl.store(out + token * num_out + rows, result.to(out.dtype.element_ty), mask=inside)


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


# ── a projection's adapters ────────────────────────────────────────────────────────────────────────────


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
        self._gains = like.new_zeros(1, dtype=torch.float32)  # [slots, rows] once a DoRA adapter is loaded
        self._infinite: set[int] = set()  # slots with infinite values or NaN in `b`, which other tokens must not touch
        self._joined: LinearWeight | None = None  # the projection's matrix with `a` of all slots stacked below it
        # If parts begin at whole blocks of rows, a program has rows of one part only.
        self._is_aligned = not any(start % EXPAND_ROWS for start in self._starts[:-1])
        is_tiled = not is_embedding and not any(start % MATRIX_TILE for start in self._starts)
        self._fits_inside = is_tiled and self._max_rank in (16, 32, 64, 128) and like.dtype != torch.float32

    @property
    def num_values(self) -> int:
        """Return the number of values in all slots."""
        return self._a.numel() + self._b.numel()

    def adopt(self, weight: LinearWeight) -> LinearWeight:
        matrix, num_ranks = weight.packed, self._a.numel() // self._columns
        if self._is_embedding or not isinstance(matrix, torch.Tensor) or num_ranks > weight.rows * MAX_JOINED:
            return weight
        both = torch.cat((matrix, self._a.view(num_ranks, self._columns)))
        self._a = both[weight.rows :].view(self._a.shape)
        bias = None if weight.bias is None else torch.cat((weight.bias, weight.bias.new_zeros(num_ranks)))
        self._joined = replace(weight, rows=len(both), packed=both, bias=bias)
        return replace(weight, packed=both[: weight.rows])

    def matrix(self, weight: LinearWeight, plan: TokenSlots) -> LinearWeight:
        return weight if self._joined is None or plan.in_tiles or not self.is_active else self._joined

    def product(self, x: torch.Tensor, weight: LinearWeight, plan: TokenSlots) -> torch.Tensor | None:
        present = plan.present
        if present is None or self._joined is None or not self._can_add_inside:
            return None
        choice = choose(len(x), weight.rows, weight.columns, PLAIN[x.dtype], capabilities_of(x.device))
        if choice is None or choice.name != "splitk" or (number := next(present.numbers, None)) is None:
            return None
        return adapted_product(x, self._joined, self._factors, present, number, choice.product)

    @property
    def _can_add_inside(self) -> bool:
        return self._fits_inside and self.is_active and not self._has_gains and not self._infinite

    @property
    def _factors(self) -> Factors:
        return Factors(self._b, self._part_starts, len(self._starts) - 1)

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> bool:
        was = self.is_active, self._has_gains, bool(self._infinite)
        self.is_active |= any(part is not None for part in parts)
        if not self.is_active:
            return False
        self._ranks[slot] = torch.tensor([0 if part is None else part.rank for part in parts], dtype=torch.int32)
        if any(part is not None and part.gain is not None for part in parts) and not self._has_gains:
            self._gains = self._gains.new_zeros(self._b.shape[:2])
        if self._has_gains:
            self._gains[slot - 1] = 0.0
        self._a[slot - 1] = 0.0  # also clears ranks that this adapter does not have, which small kernels read too
        self._b[slot - 1] = 0.0
        for number, part in enumerate(parts):
            if part is not None:
                self._put_part(slot - 1, number, part)
        self._infinite.discard(slot)
        if not bool(self._b[slot - 1].isfinite().all()):
            self._infinite.add(slot)
        return was != (self.is_active, self._has_gains, bool(self._infinite))

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
        rows = self._starts[-1]
        if not self.is_active or not len(x):
            return out[:, :rows]
        return self._expanded(self._shrunk(x, out, plan), out, bias, plan)

    def add_gated(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: TokenSlots, activation: Activation
    ) -> torch.Tensor:
        if plan.in_tiles or not self.is_active or not len(x):
            return act_mul(self.add(x, out, bias, plan), activation)
        return self._expanded(self._shrunk(x, out, plan), out, bias, plan, activation)

    def _shrunk(self, x: torch.Tensor, out: torch.Tensor, plan: TokenSlots) -> Shrunk:
        rows, parts = self._starts[-1], len(self._starts) - 1
        num_ranks = parts * self._max_rank
        if out.shape[1] > rows:
            return Shrunk(out[:, rows:], num_ranks)
        x = x.contiguous()
        shrunk = torch.empty(len(x), num_ranks, dtype=torch.float32, device=x.device)
        args = (x, plan.slots, self._a, self._ranks, shrunk)
        if plan.in_tiles:
            grid = (cdiv(len(x), TILE), num_ranks // RANKS)
            _shrink_tiles[grid](
                *args, len(x), self._columns, self._max_rank, parts, TILE, RANKS, 64, **launch_options()
            )
        else:
            rows, block = SHRINK_TILE[0], min(SHRINK_TILE[1], next_power_of_2(self._columns))
            grid = (len(x), num_ranks // rows)
            sizes, kinds = (self._columns, self._max_rank), (parts, rows, block, self._max_rank > RANKS)
            _shrink[grid](*args, *sizes, *kinds, num_warps=SHRINK_WARPS, **launch_options())
        return Shrunk(shrunk, 0)

    def add_rows(self, numbers: torch.Tensor, out: torch.Tensor, plan: TokenSlots) -> torch.Tensor:
        if not self.is_active or not len(numbers):
            return out
        shrunk = torch.empty(len(numbers), self._max_rank, dtype=torch.float32, device=out.device)
        block = next_power_of_2(self._max_rank)
        _look_up[(len(numbers),)](
            numbers, plan.slots, self._a, self._ranks, shrunk, self._columns, self._max_rank, block, **launch_options()
        )
        return self._expanded(Shrunk(shrunk, 0), out, None, plan)

    def _expanded(
        self,
        shrunk: Shrunk,
        product: torch.Tensor,
        bias: torch.Tensor | None,
        plan: TokenSlots,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        product, parts, rows = product.contiguous(), len(self._starts) - 1, self._starts[-1]
        tables = (plan.slots, self._b, self._ranks, self._part_starts, self._gains)
        given = self._gains if bias is None else bias
        kinds = (parts, self._has_gains, bias is not None)
        if plan.in_tiles:
            grid = (cdiv(len(product), TILE), cdiv(rows, 64))
            sizes = (len(product), rows, self._max_rank)
            _expand_tiles[grid](
                shrunk.ranks, *tables, given, product, *sizes, *kinds, TILE, 64, RANKS, **launch_options()
            )
            return product
        num_out = rows if activation is None else rows // 2
        out = product if product.shape[1] == num_out else product.new_empty(len(product), num_out)
        _expand[(len(product), cdiv(num_out, EXPAND_ROWS))](
            shrunk.ranks, product, *tables, given, out, rows, self._max_rank, shrunk.ranks.stride(0), shrunk.step,
            product.shape[1], num_out, *kinds, activation or "", self._is_aligned, EXPAND_ROWS, RANKS,
            self._max_rank > RANKS, num_warps=EXPAND_WARPS, **launch_options(),
        )  # fmt: skip
        return out


class Shrunk(NamedTuple):
    """h of a step's tokens: [T, parts * max_rank], of the token's slot or of all slots, concatenated."""

    ranks: torch.Tensor
    step: int  # stride between slots; 0: only the token's own slot
