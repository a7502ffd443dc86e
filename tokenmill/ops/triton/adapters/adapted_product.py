"""Products of a few rows with adapters (LoRA), in one kernel.

The kernel is split-K (`gemm/splitk.py`) with two kinds of programs in one launch:

    programs 0 ..       h = a x: tiles of the `a` of the present adapters, in shorter splits than the matrix has
    programs after it   the matrix; the splits of a tile also share the present adapters, and each adds its b h

Adapters that are present among the rows are numbered by place. To a program of the matrix, `b` of its places is one
matrix of few columns:

    tile [TILE_N, columns] · inputs [columns, ROWS]  +  [b of place 0 | b of place 1 | ...] · h, each row's at its place

so `b` of an adapter is read once for all rows that use it, and adapters that no row uses are not read. A row's h is
zero at other places than its own. So the sums of a row contain products of zero with other adapters' `b`, which must
be finite.

What a program needs beside the matrix, it asks for before it needs it:

    b       into registers, before the previous kernel has ended
    h       in its last iteration, when all columns have long been asked for

The programs of h wait for no others, and a GPU starts programs in the order of their numbers. So whenever a program
waits, those of h have ended or are running, and will end: programs that wait can't keep them from being started, even
if fewer of them fit on the device than the launch has. If that were wrong, the kernel would fail: `wait_for_arrivals`.
Measurements: docs/experiments/gpu-gemm.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.triton.adapters.token_slots import Present
from tokenmill.ops.triton.gemm.product import Product
from tokenmill.ops.triton.gemm.splitk import SplitKConfig, join_split, pick_splitk_config, store_tile
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import (
    MAX_SPLIT_COUNTERS,
    announce_arrival,
    fetch_early,
    launch_dependents,
    launch_options,
    overlaps,
    split_counters,
    wait_for_arrivals,
    wait_for_previous,
)

MIN_ROWS = 16  # inputs of a product by matrix units
MAX_ROWS = 32
MATRIX_TILE = 64  # rows; parts must begin at whole tiles
MAX_HELD_RANKS = 256  # columns of `b` that a program holds at once: 64 registers of each thread
MAX_PRODUCTS = 1024  # of a plan
H_SHARE = 3  # a program of h has at most a third of the columns of one of the matrix, so h is there when it is needed


@dataclass(frozen=True)
class Factors:
    """The `b` of all slots of one projection."""

    b: torch.Tensor  # [slots, rows, ranks]
    starts: torch.Tensor  # int32: first row of each part, which is a multiple of MATRIX_TILE
    num_parts: int

    @property
    def num_ranks(self) -> int:
        """Return the number of rows of `a` per slot."""
        return self.num_parts * self.b.shape[2]

    @property
    def rows(self) -> int:
        return self.b.shape[1]


def has_adapted_products(device: torch.device) -> bool:
    """Return whether this kernel has been timed on GPUs like the device; the interpreter runs it too."""
    return overlaps() or device.type == "cpu"


def padded_rows(num_rows: int) -> int:
    return max(MIN_ROWS, next_power_of_2(num_rows))


# ── adapters by place ──────────────────────────────────────────────────────────────────────────────────


@kernel_unspecialized("num_rows")
def _find_present(
    slots, present, places, ready, num_rows, ROWS: tl.constexpr, PRODUCTS: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:
    """See `Present`."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    tl.store(ready + tl.arange(0, PRODUCTS), tl.zeros((PRODUCTS,), tl.int32))
    numbers = tl.arange(0, ROWS)
    across = tl.load(slots + numbers, mask=numbers < num_rows, other=0)
    down = tl.reshape(across, (ROWS, 1))
    is_same = (down == across[None, :]) & (down > 0)
    is_first = (tl.sum((is_same & (numbers[None, :] < numbers[:, None])).to(tl.int32), axis=1) == 0) & (across > 0)
    place = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    # A row's place is that of the only first row with the same slot.
    is_leader = is_same & tl.reshape(is_first, (1, ROWS))
    found = tl.sum(tl.where(is_leader, tl.reshape(place, (1, ROWS)), 0), axis=1)
    tl.store(places + numbers, tl.where(across > 0, found, -1), mask=numbers < num_rows)
    at_place = tl.reshape(is_first, (1, ROWS)) & (tl.reshape(place, (1, ROWS)) == numbers[:, None])
    slot = tl.sum(tl.where(at_place, across[None, :] - 1, 0), axis=1)
    tl.store(present + 1 + numbers, slot, mask=numbers < num_rows)
    tl.store(present, tl.sum(is_first.to(tl.int32), axis=0))


def find_present(slots: torch.Tensor) -> Present:
    """Number the adapters among the rows by place, in one program."""
    present, places, ready = slots.new_empty(1 + len(slots)), torch.empty_like(slots), slots.new_empty(MAX_PRODUCTS)
    rows = padded_rows(len(slots))
    _find_present[(1,)](slots, present, places, ready, len(slots), rows, MAX_PRODUCTS, **launch_options())
    return Present(present, places, ready, iter(range(MAX_PRODUCTS)))


@triton.jit
def _part_at(row, starts, PARTS: tl.constexpr):
    """Return the index of the stacked matrix to which a row belongs."""
    part = row * 0
    for other in tl.static_range(1, PARTS):
        part += (row >= tl.load(starts + other)).to(tl.int32)
    return part


@triton.jit
def _factors_of(b, present, first, stop, matrix_rows, num_out, PLACES: tl.constexpr, RANKS: tl.constexpr):
    """Return the `b` of PLACES places from `first` on, zero from `stop` on: [rows, PLACES * RANKS]"""
    numbers, lanes = first + tl.arange(0, PLACES), tl.arange(0, RANKS)
    is_wanted = numbers < stop
    slots = tl.load(present + 1 + numbers, mask=is_wanted, other=0).to(tl.int64)
    at = (slots[None, :, None] * num_out + (matrix_rows % num_out)[:, None, None]) * RANKS + lanes[None, None, :]
    factors = tl.load(b + at, mask=is_wanted[None, :, None], other=0.0)
    return tl.reshape(factors, (matrix_rows.shape[0], PLACES * RANKS))


@triton.jit
def _arrived(factors, OVERLAPS: tl.constexpr):
    """Return `factors`. Otherwise the compiler would arrange them for matrix units where they are loaded, and so wait
    for them there."""
    if OVERLAPS:
        factors = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [factors], dtype=factors.dtype, is_pure=False, pack=2
        )
    return factors


# ── h, which some programs compute for others ──────────────────────────────────────────────────────────


@triton.jit
def _rows_of_a(numbers, present, num_shrunk, num_out, RANKS_EACH: tl.constexpr):
    """Return the rows of the stacked matrix that hold the `a` of the places' adapters, the last one repeated."""
    own = tl.minimum(numbers, tl.maximum(num_shrunk, 1) - 1)
    return num_out + tl.load(present + 1 + own // RANKS_EACH) * RANKS_EACH + own % RANKS_EACH


@triton.jit
def _store_shrunk(
    sums, tile, split, own_places, shrunk, num_shrunk, num_rows, ROWS: tl.constexpr, TILE_N: tl.constexpr,
    RANKS_EACH: tl.constexpr,
):  # fmt: skip
    """Store a split's products of the rows with the `a` of their own adapters: `sums` has those with all adapters."""
    numbers, rows = tile * TILE_N + tl.arange(0, TILE_N), tl.arange(0, ROWS)
    is_own = (own_places[None, :] == (numbers // RANKS_EACH)[:, None]) & (numbers < num_shrunk)[:, None]
    at = (split * num_rows + rows)[None, :] * RANKS_EACH + (numbers % RANKS_EACH)[:, None]
    tl.store(shrunk + at, sums, mask=is_own)


@triton.jit
def _shrunk_rows(
    shrunk, ready, num_arrivals, own_places, part, first, stop, num_rows, ROWS: tl.constexpr, PARTS: tl.constexpr,
    RANKS: tl.constexpr, H_SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Wait for h, and return that of the rows whose places are in [first, stop): [RANKS, ROWS]"""
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, RANKS)
    if OVERLAPS:
        shrunk += wait_for_arrivals(ready, num_arrivals) * RANKS  # still aligned
    is_wanted = ((own_places >= first) & (own_places < stop))[None, :]
    at = shrunk + rows[None, :] * (PARTS * RANKS) + part * RANKS + lanes[:, None]
    sums = tl.zeros((RANKS, ROWS), tl.float32)
    for split in tl.static_range(H_SPLITS):
        here = at + split * num_rows * (PARTS * RANKS)
        sums += tl.load(here, mask=is_wanted, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _at_places(held, own_places, first, PLACES: tl.constexpr):
    """Return each row's h at its own place, zero at others: [PLACES * RANKS, ROWS]"""
    is_own = (first + tl.arange(0, PLACES))[:, None] == own_places[None, :]
    placed = tl.where(is_own[:, None, :], held[None, :, :], 0.0)
    return tl.reshape(placed, (PLACES * held.shape[0], held.shape[1]))


# ── the product ────────────────────────────────────────────────────────────────────────────────────────


@kernel_unspecialized("num_rows", "number")
def _adapted_splitk(
    x, weight, b, bias, starts, present, places, ready, shrunk, out, parts, arrived, number, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr, H_TILES: tl.constexpr,
    H_SPLITS: tl.constexpr, SPLIT_COLUMNS: tl.constexpr, H_COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    RANKS: tl.constexpr, PLACES: tl.constexpr, THREADS: tl.constexpr, FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a matrix with `a` stacked below it, and add b h. `ready` counts the splits of h that are stored, and
    `number` is the product's among those of the plan. No split is empty."""
    launch_dependents(OVERLAPS)
    program, matrix_tiles, ranks_each = tl.program_id(0), tl.cdiv(num_out, TILE_N), PARTS * RANKS
    num_h: tl.constexpr = H_TILES * H_SPLITS
    chunks: tl.constexpr = THREADS // TILE_N
    is_shrinking = program < num_h
    rows, tile_rows, thread = tl.arange(0, ROWS), tl.arange(0, TILE_N), tl.arange(0, THREADS)
    # The adapters of the rows are known since long, see `settle`.
    own_places = tl.load(places + rows, mask=rows < num_rows, other=-1)
    count = tl.load(present)
    num_shrunk = count * ranks_each
    tiles_shrunk = tl.cdiv(num_shrunk, TILE_N)
    if is_shrinking:
        tile, split = program % H_TILES, program // H_TILES
        matrix_rows = _rows_of_a(tile * TILE_N + tile_rows, present, num_shrunk, num_out, ranks_each)
        fetched_rows = _rows_of_a(tile * TILE_N + thread // chunks, present, num_shrunk, num_out, ranks_each)
        low = split * H_COLUMNS
        high = tl.where(tile < tiles_shrunk, tl.minimum(low + H_COLUMNS, num_in), low)
        part, first, stop = tile * 0, count, count
    else:
        tile, split = (program - num_h) % matrix_tiles, (program - num_h) // matrix_tiles
        matrix_rows = (tile * TILE_N + tile_rows) % num_out
        fetched_rows = (tile * TILE_N + thread // chunks) % num_out
        low = split * SPLIT_COLUMNS
        high = tl.minimum(low + SPLIT_COLUMNS, num_in)
        part = _part_at(tile * TILE_N, starts, PARTS)
        # The last split, which may have fewer columns, has the first places: all, if only one adapter is present.
        places_each = tl.cdiv(count, SPLITS)
        first = tl.minimum((SPLITS - 1 - split) * places_each, count)
        stop = tl.minimum(first + places_each, count)
    if FETCHED and OVERLAPS:
        begins = weight.to(tl.int64) + (fetched_rows.to(tl.int64) * num_in + low) * 2
        wanted = tl.maximum(tl.minimum(FETCHED // chunks, (high - low) * 2 - thread % chunks * (FETCHED // chunks)), 0)
        fetch_early(begins + thread % chunks * (FETCHED // chunks), wanted)
    factors = _factors_of(b, present, first, stop, tile * TILE_N + tile_rows, num_out, PLACES, RANKS)
    held = tl.zeros((RANKS, ROWS), tl.float32)
    # In the last iteration. Two earlier, one adapter on all matrices adds 5.3 % to a step instead of 4.9.
    asks_at = tl.where(first < stop, high - STRIDE, -1)
    columns = tl.arange(0, STRIDE)
    matrix = weight + matrix_rows.to(tl.int64)[:, None] * num_in + columns[None, :]
    inputs = x + (rows % num_rows)[:, None] * num_in + columns[None, :]
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, ROWS), tl.float32)
    for start in range(low, high, STRIDE):
        sums = tl.dot(tl.load(matrix + start), tl.trans(tl.load(inputs + start)), sums)
        if start == asks_at:
            held = _shrunk_rows(
                shrunk, ready + number, tiles_shrunk * H_SPLITS, own_places, part, first, stop, num_rows, ROWS, PARTS,
                RANKS, H_SPLITS, OVERLAPS,
            )  # fmt: skip
    if is_shrinking:
        if tile < tiles_shrunk:
            _store_shrunk(sums, tile, split, own_places, shrunk, num_shrunk, num_rows, ROWS, TILE_N, ranks_each)
            announce_arrival(ready + number)
    else:
        if first < stop:
            rounded = held.to(x.dtype.element_ty)
            sums = tl.dot(_arrived(factors, OVERLAPS), _at_places(rounded, own_places, first, PLACES), sums)
            for further in tl.range(first + PLACES, stop, PLACES, num_stages=1):
                factors = _factors_of(b, present, further, stop, tile * TILE_N + tile_rows, num_out, PLACES, RANKS)
                sums = tl.dot(factors, _at_places(rounded, own_places, further, PLACES), sums)
        is_last = True
        if SPLITS > 1:
            sums, is_last = join_split(sums, split, parts, arrived, tile, TILE_N, ROWS, SPLITS)
        if is_last:
            store_tile(sums, bias, out, tile * TILE_N + tile_rows, rows, num_rows, num_out, HAS_BIAS)


@dataclass(frozen=True)
class ColumnCut:
    """How the programs of `_adapted_splitk` share the columns."""

    tiles: int  # of the matrix
    config: SplitKConfig
    h_tiles: int
    h_splits: int
    split_columns: int
    h_columns: int
    fetched: int

    @property
    def num_programs(self) -> int:
        return self.tiles * self.config.splits + self.h_tiles * self.h_splits


def cut_columns(product: Product, num_shrunk: int) -> ColumnCut:
    """Return a cut whose programs run all at once if that is possible; `num_shrunk`: rows of `a` of the most adapters
    that can be present."""
    config, at_once = pick_splitk_config(product), 2 * product.capabilities.tuning.multiprocessors
    strides, tiles, h_tiles = product.k // config.stride, cdiv(product.n, MATRIX_TILE), cdiv(num_shrunk, MATRIX_TILE)

    def splits_of_h(splits: int) -> int:
        return cdiv(strides, max(1, cdiv(strides, splits) // H_SHARE))

    splits = config.splits
    num_h_splits = splits_of_h(splits)
    if tiles * splits <= at_once:
        while tiles * splits + h_tiles * splits_of_h(splits) > at_once and tiles * (splits - 1) >= at_once // 2:
            splits -= 1
        num_h_splits = min(splits_of_h(splits), max(2, (at_once - tiles * splits) // h_tiles))
    each, h_each = cdiv(strides, splits), cdiv(strides, num_h_splits)
    splits, num_h_splits = cdiv(strides, each), cdiv(strides, h_each)  # none is empty
    fetched = config.fetched if min(each, h_each) * config.stride * 2 >= config.fetched else 0
    cut = replace(config, tile_n=MATRIX_TILE, splits=splits)
    return ColumnCut(tiles, cut, h_tiles, num_h_splits, each * config.stride, h_each * config.stride, fetched)


def adapted_product(
    x: torch.Tensor, joined: LinearWeight, factors: Factors, present: Present, number: int, product: Product
) -> torch.Tensor:
    """x [rows, num_in], `joined`: the matrix with `a` of all slots below it → [rows, rows of the matrix], adapted;
    `number`: of those that `present` has, this product's own"""
    x = x.contiguous()
    (num_rows, num_in), num_out, ranks = x.shape, factors.rows, factors.b.shape[2]
    padded = padded_rows(num_rows)
    most = min(padded, len(factors.b))  # so that graphs of several sizes have the same kernel
    cut = cut_columns(product, most * factors.num_ranks)
    config = cut.config
    held_places = min(MAX_HELD_RANKS // ranks, next_power_of_2(cdiv(most, config.splits)))
    assert config.splits == 1 or cut.tiles <= MAX_SPLIT_COUNTERS
    out = x.new_empty(num_rows, num_out)
    shrunk = torch.empty(cut.h_splits, num_rows, factors.num_ranks, dtype=torch.float32, device=x.device)
    num_joined = cut.tiles * config.splits if config.splits > 1 else 0
    parts = torch.empty(num_joined * MATRIX_TILE * padded, dtype=torch.float32, device=x.device)
    _adapted_splitk[(cut.num_programs,)](
        x, joined.packed, factors.b, x if joined.bias is None else joined.bias, factors.starts, present.slots,
        present.places, present.ready, shrunk, out, parts, split_counters(x.device), number, num_rows, num_out, num_in,
        padded, MATRIX_TILE, config.stride, config.splits, cut.h_tiles, cut.h_splits, cut.split_columns, cut.h_columns,
        factors.num_parts, ranks, held_places, 32 * config.warps, cut.fetched, joined.bias is not None,
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out
