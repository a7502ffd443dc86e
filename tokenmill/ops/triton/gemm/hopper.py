"""Products of dozens of rows with unquantised or fp8 matrices, on Hopper: few enough rows to be bound by reading the
matrix, too many for split-K, whose programs would read the inputs more often than the matrix.

A program computes a tile of the matrix, which is the left factor, and a range of its columns:

    tile [TILE_N, columns] · inputs [columns, ROWS] → sums [TILE_N, ROWS]

TMA copies both factors to a ring of tiles in shared memory, from which the tensor cores (wgmma) read them. The matrix
does not depend on earlier kernels: the ring is filled with it before the kernel that computes the inputs has ended.
With gates, half of a tile are gate rows and half their up rows, so that the thread that holds a gate also holds its up.

Written in Gluon, Triton's lower-level language, in which layouts, copies and waits are explicit. Gluon can't call
Triton functions, so some functions here duplicate those in `launch/pdl.py` and `gemm/splitk.py`; the kernel for packed
integers shares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.arch.spec import Activation
from tokenmill.ops.triton.elementwise.activation import gated
from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents as triton_launch_dependents
from tokenmill.ops.triton.launch.pdl import launch_options, room_for_splits
from tokenmill.ops.triton.launch.pdl import wait_for_previous as triton_wait_for_previous
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix, Fp8Matrix

# Names in Triton 3.6 and in later versions.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def launch_dependents(OVERLAPS: gl.constexpr):
    if OVERLAPS:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_previous(OVERLAPS: gl.constexpr):
    if OVERLAPS:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def new_barriers(NUM: gl.constexpr):
    """Create one barrier per tile of a ring, which signals that it was copied."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    barrier()
    return barriers


@gluon.jit
def store_split(sums, parts, splits, TILE_N: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Store a program's sums, and return where those of the tile's first split are, and the tile's number."""
    matrix_rows = gl.expand_dims(gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SUMS)), 1)
    tile = matrix_rows * ROWS + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS)), 0)
    slot = gl.program_id(0) + gl.program_id(2) * gl.num_programs(0)
    first = parts + slot.to(gl.int64) * splits * (TILE_N * ROWS) + tile
    gl.store(first + gl.program_id(1) * (TILE_N * ROWS), sums)
    return first, slot


@gluon.jit
def join_splits(sums, parts, arrived, splits, TILE_N: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Return the sums of all splits, and True, in the last program to arrive; in others the program's own sums."""
    first, slot = store_split(sums, parts, splits, TILE_N, ROWS, SUMS)
    barrier()
    is_last = gl.atomic_add(arrived + slot, 1, sem="acq_rel") == splits - 1
    if is_last:
        gl.store(arrived + slot, 0)
        sums = gl.zeros((TILE_N, ROWS), gl.float32, layout=SUMS)
        for split in range(splits):
            sums += gl.load(first + split * (TILE_N * ROWS), cache_modifier=".cg")
    return sums, is_last


@gluon.jit
def store_tile(sums, out, begin, row, num_rows, num_out, TILE_N: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Store sums [TILE_N, ROWS] to out [rows, matrix rows]; one thread stores neighbouring matrix rows."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [TILE_N // 8, 256 // TILE_N], [1, WARPS], [0, 1])
    matrix_rows = gl.expand_dims(begin + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, OUT)), 1)
    rows = gl.expand_dims(row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    result = gl.convert_layout(sums.to(out.dtype.element_ty), OUT)
    gl.store(out + rows.to(gl.int64) * num_out + matrix_rows, result, mask=(rows < num_rows) & (matrix_rows < num_out))


TILES = {
    size: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=2) for size in (1, 2)
}  # by bytes per element
CHUNK = gl.constexpr(128)  # bytes of each matrix row and input per iteration


@gluon.jit
def activate(gate, KIND: gl.constexpr):
    """Duplicate of `elementwise/activation.py`'s."""
    if KIND == "silu":
        return gate / (1.0 + gl.exp(-gate))
    if KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + gl.exp(-2.0 * inner))
    return 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476))


@gluon.jit
def _ask_for_matrix(
    matrix, matrix_tiles, copied, number, matrix_row, inter, column, total,
    COLUMNS: gl.constexpr, ROWS: gl.constexpr, TILE_N: gl.constexpr, RING: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """Start to copy chunk `number` of the matrix tile, if it exists, to its place in the ring."""
    slot, is_there = number % RING, number < total
    tile, done, at = matrix_tiles.index(slot), copied.index(slot), column + number * COLUMNS
    mbarrier.expect(done, (TILE_N + ROWS) * CHUNK, pred=is_there)
    if IS_GATED:
        HALF: gl.constexpr = TILE_N // 2
        copy_to_shared(matrix, [matrix_row, at], done, tile.slice(0, HALF), pred=is_there)
        copy_to_shared(matrix, [inter + matrix_row, at], done, tile.slice(HALF, HALF), pred=is_there)
    else:
        copy_to_shared(matrix, [matrix_row, at], done, tile, pred=is_there)


@gluon.jit
def _ask_for_inputs(x, inputs, copied, number, row, column, total, COLUMNS: gl.constexpr, RING: gl.constexpr):
    slot = number % RING
    copy_to_shared(x, [row, column + number * COLUMNS], copied.index(slot), inputs.index(slot), pred=number < total)


@gluon.jit
def _of_matrix_rows(values, matrix_row, num_out, TILE_N: gl.constexpr, IS_GATED: gl.constexpr, SUMS: gl.constexpr):
    """Load one value per matrix row of the tile, float32 [TILE_N]."""
    numbers = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SUMS))
    HALF: gl.constexpr = TILE_N // 2
    if IS_GATED:
        own = matrix_row + numbers % HALF
        return gl.load(values + own + numbers // HALF * num_out, mask=own < num_out, other=0.0).to(gl.float32)
    return gl.load(values + matrix_row + numbers, mask=matrix_row + numbers < num_out, other=0.0).to(gl.float32)


@kernel_unspecialized("num_rows", "splits", jit=gluon.jit)
def _hopper_gemm(
    x, matrix, row_scales, scales, bias, out, parts, arrived, num_rows, num_out, num_in, splits,
    ROWS: gl.constexpr, TILE_N: gl.constexpr, COLUMNS: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr,
    KIND: gl.constexpr, SCALES: gl.constexpr, PLANES: gl.constexpr, HAS_BIAS: gl.constexpr, IS_MERGED: gl.constexpr,
    OVERLAPS: gl.constexpr,
) -> None:  # fmt: skip
    """num_out: rows of the result, half the matrix's rows with gates (KIND). TMA fills zeros beyond the last matrix
    row, input or column. SCALES of an fp8 matrix: "rows" has one per row, [rows]; "groups" one per row and COLUMNS
    columns, [groups, rows], by which their partial sums are multiplied. PLANES: input rows per row of the result
    (`quant/gemm_fp8_split.py`), without gates. IS_MERGED: store the sums of each split for
    `_merge_hopper_splits`."""
    launch_dependents(OVERLAPS)
    IS_GATED: gl.constexpr = KIND != ""
    OWN: gl.constexpr = TILE_N // 2 if IS_GATED else TILE_N  # matrix rows of the result
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, COLUMNS // 4])
    row, matrix_row = gl.program_id(2) * ROWS, gl.program_id(0) * OWN
    split_size = gl.cdiv(num_in, splits * COLUMNS)
    first = gl.program_id(1) * split_size
    total, column = gl.minimum(gl.cdiv(num_in, COLUMNS) - first, split_size), first * COLUMNS

    matrix_tiles = gl.allocate_shared_memory(matrix.dtype, [RING, TILE_N, COLUMNS], matrix.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [RING, ROWS, COLUMNS], x.layout)
    copied = new_barriers(RING)

    for i in gl.static_range(RING - 1):
        _ask_for_matrix(
            matrix, matrix_tiles, copied, i, matrix_row, num_out, column, total, COLUMNS, ROWS, TILE_N, RING, IS_GATED
        )
    wait_for_previous(OVERLAPS)
    for i in gl.static_range(RING - 1):
        _ask_for_inputs(x, inputs, copied, i, row, column, total, COLUMNS, RING)
    sums = gl.zeros((TILE_N, ROWS), gl.float32, layout=SUMS)
    HAS_GROUPS: gl.constexpr = SCALES == "groups"
    if HAS_GROUPS:
        group_stride = 2 * num_out if IS_GATED else num_out
        found = _of_matrix_rows(scales + first * group_stride, matrix_row, num_out, TILE_N, IS_GATED, SUMS)
        none = gl.zeros((TILE_N, ROWS), gl.float32, layout=SUMS)
    for number in range(total):
        slot = number % RING
        mbarrier.wait(copied.index(slot), (number // RING) & 1)
        if HAS_GROUPS:
            part = warpgroup_mma(
                matrix_tiles.index(slot), inputs.index(slot).permute((1, 0)), none, use_acc=False, is_async=True
            )
            next_group = first + gl.minimum(number + 1, total - 1)
            found_next = _of_matrix_rows(
                scales + next_group * group_stride, matrix_row, num_out, TILE_N, IS_GATED, SUMS
            )
            part = warpgroup_mma_wait(0, deps=[part])
            sums += part * gl.expand_dims(found, 1)
            found = found_next
        else:
            sums = warpgroup_mma(matrix_tiles.index(slot), inputs.index(slot).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
        barrier()  # all threads have multiplied the previous chunk, whose tiles can be reused
        # After the wait for a group's sums this chunk's tiles could be reused too, but are refilled an iteration later.
        following = number + RING - 1
        _ask_for_matrix(
            matrix, matrix_tiles, copied, following, matrix_row, num_out, column, total,
            COLUMNS, ROWS, TILE_N, RING, IS_GATED,
        )  # fmt: skip
        _ask_for_inputs(x, inputs, copied, following, row, column, total, COLUMNS, RING)
    if not HAS_GROUPS:
        sums = warpgroup_mma_wait(0, deps=[sums])

    is_last = splits == 1
    if IS_MERGED:
        store_split(sums, parts, splits, TILE_N, ROWS, SUMS)
    elif splits > 1:
        sums, is_last = join_splits(sums, parts, arrived, splits, TILE_N, ROWS, SUMS)
    if is_last:
        RESULTS: gl.constexpr = ROWS // PLANES
        OF_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, RESULTS, COLUMNS // 4])
        if PLANES == 2:
            high, low = gl.split(gl.reshape(sums, (TILE_N, RESULTS, 2)))
            results = gl.convert_layout(high + low * 0.0625, OF_ROWS)
        else:
            results = sums
        result_row = row // PLANES
        if SCALES != "":
            rows = result_row + gl.arange(0, RESULTS, layout=gl.SliceLayout(0, OF_ROWS))
            results *= gl.expand_dims(gl.load(row_scales + rows, mask=rows < num_rows, other=0.0), 0)
        if SCALES == "rows":
            results *= gl.expand_dims(_of_matrix_rows(scales, matrix_row, num_out, TILE_N, IS_GATED, OF_ROWS), 1)
        if HAS_BIAS:
            results += gl.expand_dims(_of_matrix_rows(bias, matrix_row, num_out, TILE_N, IS_GATED, OF_ROWS), 1)
        if IS_GATED:
            gate, up = gl.split(gl.permute(gl.reshape(results, (2, OWN, RESULTS)), (1, 2, 0)))
            store_tile(activate(gate, KIND) * up, out, matrix_row, result_row, num_rows, num_out, OWN, RESULTS, WARPS)
        else:
            store_tile(results, out, matrix_row, result_row, num_rows, num_out, OWN, RESULTS, WARPS)


@kernel_unspecialized("num_rows", "matrix_tiles")
def _merge_hopper_splits(
    parts, bias, out, num_rows, num_out, matrix_tiles,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """parts [blocks, tiles, SPLITS, TILE_N, ROWS] → out [rows, num_out]; a program adds COLUMNS of a block of rows.
    With many splits, a tile's last program would have to read a megabyte alone."""
    triton_launch_dependents(OVERLAPS)
    triton_wait_for_previous(OVERLAPS)
    first, block = tl.program_id(0) * COLUMNS, tl.program_id(1)
    columns, rows = first + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    tile = (block * matrix_tiles + first // OWN).to(tl.int64) * (SPLITS * TILE_N * ROWS)
    source = parts + tile + (columns % OWN)[:, None] * ROWS + rows[None, :]
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    ups = tl.zeros((COLUMNS, ROWS), tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(source + split * TILE_N * ROWS, cache_modifier=".cg")
        if KIND != "":
            ups += tl.load(source + (split * TILE_N + OWN) * ROWS, cache_modifier=".cg")
    is_column = columns < num_out
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if KIND != "":
            ups += tl.load(bias + num_out + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if KIND != "":
        sums = gated(sums, ups, KIND)
    out_rows = block * ROWS + rows
    target = out + out_rows.to(tl.int64)[None, :] * num_out + columns[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_column[:, None] & (out_rows < num_rows)[None, :])


MERGED_COLUMNS = 8  # per program of `_merge_hopper_splits`: 16 bytes of a row of the result


@dataclass(frozen=True)
class HopperConfig:
    rows: int
    tile_n: int
    splits: int
    ring: int  # tiles per factor
    warps: int = 4
    num_planes: int = 1  # fp8 planes per row
    is_merged: bool = False  # splits are added by a kernel of their own, with many programs per tile


FEW_TILES = 6  # a matrix with tiles for less than 1/6 of the multiprocessors has its columns split further
FEW_CHUNKS = 16  # then a program has at least this many chunks, if a row has four times as many


def pick_hopper_config(product: Product) -> HopperConfig:
    """Return the configuration: two programs per multiprocessor if there are enough, otherwise one with a larger ring.
    Columns are split only if there are so many that the reduction pays, or if most multiprocessors would be idle, as
    with a rank's part of a matrix. Timed on an H200 with 128 rows: if a kernel of its own adds the splits, 1024 × 28672
    takes 22 instead of 29 us, and 7168 × 8192 with gates 37 instead of 55."""
    tuning, is_plain = product.capabilities.tuning, product.form.element_size == 2
    rows = 64 if product.m <= 64 else 128
    chunks = cdiv(product.k * product.form.element_size, 128)
    if product.epilogue == "gated" or product.n >= 128 * 2 * tuning.multiprocessors:
        most = tuning.multiprocessors // cdiv(product.n, 128)
        splits = max(1, min(most, chunks // tuning.gemm_hopper_min_chunks)) if is_plain else 1
        if splits == 1:
            return HopperConfig(rows, 128, 1, 4 if rows == 64 else 3)
        return HopperConfig(rows, 128, splits, 9 if rows == 64 else 6, is_merged=True)
    matrix_tiles = cdiv(product.n, 64)
    are_few = is_plain and matrix_tiles * FEW_TILES <= tuning.multiprocessors and chunks >= 4 * FEW_CHUNKS
    least = FEW_CHUNKS if are_few else tuning.gemm_hopper_min_chunks
    splits = max(1, min(tuning.multiprocessors // matrix_tiles, chunks // least))
    return HopperConfig(rows, 64, splits, 12 if rows == 64 else 8, is_merged=is_plain and splits > 2)


def pick_grouped_config(product: Product) -> HopperConfig:
    """Return the configuration for fp8 matrices with group scales, whose partial sums are added outside of the tensor
    cores. Few rows are two planes each. The fastest on an H200 of 64 and 128 matrix rows, 4 and 8 warps, rings of 3 to
    12 tiles and 1 to 8 splits."""
    multiprocessors = product.capabilities.tuning.multiprocessors
    num_planes = 2 if product.m <= product.capabilities.tuning.fp8_split_max_rows else 1
    rows = num_planes * product.m
    if rows <= 64:
        tiles, padded = cdiv(product.n, 128), next(size for size in (16, 32, 64) if rows <= size)
        splits = max(1, min(multiprocessors // tiles, product.k // 512))
        return HopperConfig(padded, 128, splits, 8 if tiles * splits <= multiprocessors else 4, num_planes=num_planes)
    tiles = cdiv(product.n, 64) * cdiv(rows, 128)
    return HopperConfig(128, 64, max(1, min(2 * multiprocessors // tiles, product.k // 512)), 4)


def hopper_gemm(
    x: torch.Tensor,
    row_scales: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: HopperConfig,
    activation: Activation | None,
) -> torch.Tensor:
    """x [rows, num_in], values [num_out, num_in] → [rows, num_out]. With an activation, values are gate rows above up
    rows, and the result is act(gate) * up [rows, num_out / 2]. fp8: both have scales, and the result has `dtype`."""
    (num_planes, num_in), matrix_rows = x.shape, len(values)
    num_rows = num_planes // config.num_planes
    own, num_out = (config.tile_n // 2, matrix_rows // 2) if activation else (config.tile_n, matrix_rows)
    matrix_tiles, blocks = cdiv(num_out, own), cdiv(num_planes, config.rows)
    out = torch.empty(num_rows, num_out, dtype=dtype, device=x.device)
    parts, arrived = room_for_splits(matrix_tiles * blocks, config.splits, config.tile_n * config.rows, out)
    columns = 128 // x.element_size()
    can_merge = config.splits > 1 and scales is None and config.num_planes == 1
    assert can_merge or not config.is_merged, "only several splits without scales are merged"
    _hopper_gemm[(matrix_tiles, config.splits, blocks)](
        TensorDescriptor.from_tensor(x, [config.rows, columns], TILES[x.element_size()]),
        TensorDescriptor.from_tensor(values, [own, columns], TILES[x.element_size()]),
        row_scales if row_scales is not None else out, scales if scales is not None else out,
        bias if bias is not None else out, out, parts, arrived, num_rows, num_out, num_in, config.splits,
        config.rows, config.tile_n, columns, config.ring, config.warps, activation or "",
        "" if scales is None else "rows" if scales.dim() == 1 else "groups", config.num_planes,
        bias is not None, config.is_merged,
        num_warps=config.warps, **launch_options(),
    )  # fmt: skip
    if config.is_merged:
        merge_splits(parts, bias, out, config, activation)
    return out


def merge_splits(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: HopperConfig,
    activation: Activation | None,
) -> None:
    """parts: the sums of each split, [blocks of rows, tiles, splits, matrix rows of a tile, rows of a block] → out"""
    num_rows, num_out = out.shape
    own = config.tile_n // 2 if activation else config.tile_n
    _merge_hopper_splits[(cdiv(num_out, MERGED_COLUMNS), cdiv(num_rows, config.rows))](
        parts, bias if bias is not None else out, out, num_rows, num_out, cdiv(num_out, own), config.splits,
        config.rows, config.tile_n, own, MERGED_COLUMNS, activation or "", bias is not None,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def _plain_linear(
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    config: HopperConfig,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> torch.Tensor:
    return hopper_gemm(x.contiguous(), None, matrix, None, bias, dtype, config, activation)


def _fp8_linear(
    rows: Fp8Rows,
    matrix: Fp8Matrix | Fp8BlockMatrix,
    bias: torch.Tensor | None,
    config: HopperConfig,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> torch.Tensor:
    x = rows.planes.view(-1, rows.planes.shape[2])
    return hopper_gemm(x, rows.scales, matrix.values, matrix.scales, bias, dtype, config, activation)


HOPPER_GEMM = GemmKernel(pick_hopper_config, _plain_linear)
HOPPER_GEMM_FP8 = GemmKernel(pick_hopper_config, _fp8_linear)
HOPPER_GEMM_FP8_BLOCKS = GemmKernel(pick_grouped_config, _fp8_linear)
