"""Products of up to some hundred rows with 4-bit matrices, on Hopper: MXFP4 and NVFP4 (`packed_fp4.py`), and table
codes (`packed_table.py`).

As in split-K a program computes a tile of the matrix, which is the left factor, and a range of its columns:

    tile [TILE_N, columns] · inputs [columns, ROWS] → sums [TILE_N, ROWS]

As in `hopper_gemm_int.py` three things overlap: TMA copies inputs to a ring of tiles in shared memory; words and scales
of the next spans are loaded into registers; and while the tensor cores multiply one chunk of columns, the next chunk's
weights are expanded. Words are stored in the order in which the tensor cores expect weights: a thread reads 16 bytes of
a matrix row, and multiplies exactly these values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.arch.packed_formats import FP4_SPAN, NV_GROUP
from tokenmill.ops.triton.gemm.hopper import (
    barrier,
    join_splits,
    launch_dependents,
    new_barriers,
    store_tile,
    wait_for_previous,
)
from tokenmill.ops.triton.gemm.product import MXFP4, GemmKernel, Product
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_options, room_for_splits
from tokenmill.ops.triton.quant.fp4 import ptx_weights
from tokenmill.ops.triton.quant.hopper_gemm_int import HopperIntConfig, copy_tile
from tokenmill.ops.triton.quant.packed_fp4 import MX_SCALE, NV_SCALE, PackedFp4Matrix
from tokenmill.ops.triton.quant.packed_table import BYTE_PLANES, FACTOR, TableMatrix

SPAN = gl.constexpr(FP4_SPAN)  # columns
WORDS = gl.constexpr(FP4_SPAN // 4)  # per span, 16 bits each
CHUNK = gl.constexpr(FP4_SPAN // 2)  # columns per iteration, as many as `copy_tile` copies
GROUPS_OF_16 = gl.constexpr(NV_GROUP)
MX_SHIFT, MX_ADDED = gl.constexpr(MX_SCALE.shift), gl.constexpr(MX_SCALE.added)
NV_SHIFT, NV_ADDED = gl.constexpr(NV_SCALE.shift), gl.constexpr(NV_SCALE.added)
TILES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

# The four values of two neighbouring words ($4), in pairs, times the scale of the first two ($5) and of the others
# ($7), each twice in 32 bits; see `ptx_fp4` of `fp4.py`.
EXPAND = gl.constexpr("{\n" + ptx_weights(("$5", "$5", "$7", "$7")) + "}")
EXPAND_TYPES = gl.constexpr("=r,=r,=r,=r,r,r,r,r,r")


def _picked(number: int) -> str:
    """PTX: the values of four codes as two pairs, times a pair of scales. `sel` has the lower three bits of the codes,
    which select a byte from each half of the table; `pick` selects one of both by the code's fourth bit. Table: lower
    bytes in $9, $11, …, upper ones in $17, $19, …"""
    scale = ("$5", "$7")[number // 2]
    return f"""prmt.b32 below, $9, $11, sel;
prmt.b32 above, $13, $15, sel;
prmt.b32 low, below, above, pick;
prmt.b32 below, $17, $19, sel;
prmt.b32 above, $21, $23, sel;
prmt.b32 high, below, above, pick;
prmt.b32 below, low, high, 0x5140;
prmt.b32 above, low, high, 0x7362;
fma.rn.bf16x2 ${number}, below, {scale}, zero;
fma.rn.bf16x2 ${number + 1}, above, {scale}, zero;
"""


# The values of the eight codes of two words ($4), in their order: the same four pairs.
PICK = gl.constexpr(
    f"""{{
.reg .b32 sel, pick, below, above, low, high, zero;
mov.b32 zero, 0x80008000;
and.b32 sel, $4, 0x77777777;
shr.u32 pick, $4, 1;
lop3.b32 pick, pick, 0x44444444, 0x32103210, 0xEA;
{_picked(0)}shr.u32 sel, sel, 16;
shr.u32 pick, pick, 16;
{_picked(2)}}}"""
)
PICK_TYPES = gl.constexpr(",".join(["=r"] * 4 + ["r"] * (5 + 2 * BYTE_PLANES)))
FACTOR_PLACE = gl.constexpr(FACTOR)


@gluon.constexpr_function
def _bases(warps, tile_n, own, quarters, numbers):
    """Return a layout in which threads hold the values that the tensor cores expect of them: every eighth matrix row,
    and of such a row the part of one quarter of the lanes. `own`: bases of the registers; `quarters`: bases of the two
    lane bits that select the part of a row; `numbers`: number of dimensions after the matrix rows."""
    rows = [[1 << i, *[0] * numbers] for i in range(12)]
    below = [rows[i] for i in range(6, 12) if 1 << i < tile_n]  # tiles of 64 matrix rows, one per warp group
    groups = warps // 4
    spread, kept = below[: groups.bit_length() - 1], below[groups.bit_length() - 1 :]
    return [*own, rows[3], *kept], [*quarters, *rows[:3]], [rows[4], rows[5], *spread]


@gluon.constexpr_function
def _word_layout(warps, tile_n):
    """[TILE_N, WORDS]: 16 bytes of a matrix row per thread"""
    regs, lanes, of_warps = _bases(warps, tile_n, [[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], 1)
    return gl.DistributedLinearLayout(regs, lanes, of_warps, [], [tile_n, FP4_SPAN // 4])


@gluon.constexpr_function
def _scale_layout(warps, tile_n, count):
    """[TILE_N, count]: all scales of a matrix row per thread"""
    own = [[0, 1 << i] for i in range(count.bit_length() - 1)]
    regs, lanes, of_warps = _bases(warps, tile_n, own, [[0, 0], [0, 0]], 1)
    return gl.DistributedLinearLayout(regs, lanes, of_warps, [], [tile_n, count])


@gluon.constexpr_function
def _chunk_layout(warps, tile_n):
    """[TILE_N, 4, 2, 2]: the words of a chunk, by lanes, groups of 32 columns, neighbours"""
    own, quarters = [[0, 0, 0, 1], [0, 0, 1, 0]], [[0, 1, 0, 0], [0, 2, 0, 0]]
    regs, lanes, of_warps = _bases(warps, tile_n, own, quarters, 3)
    return gl.DistributedLinearLayout(regs, lanes, of_warps, [], [tile_n, 4, 2, 2])


@gluon.jit
def _pair(scales, GROUP: gl.constexpr):
    """Convert scales to bfloat16, twice in 32 bits."""
    if scales.dtype != gl.uint8:
        rounded = scales.to(gl.float32).to(gl.bfloat16).to(gl.int16, bitcast=True)
        return (rounded.to(gl.int32) & 0xFFFF) * 0x10001
    if GROUP == GROUPS_OF_16:
        return ((scales.to(gl.int32) << NV_SHIFT) + NV_ADDED) * 0x10001
    return ((scales.to(gl.int32) << MX_SHIFT) + MX_ADDED) * 0x10001


@gluon.jit
def _of_groups(pairs, CHUNKS: gl.constexpr):
    """[TILE_N, 2] → in the layout of a chunk's words, [TILE_N, 1, 2, 1]"""
    own: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, CHUNKS))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(pairs, own, assert_trivial=True), 1), 3)


@gluon.jit
def _of_chunk(pairs, CHUNKS: gl.constexpr):
    """[TILE_N] → the same for all words of a chunk, [TILE_N, 1, 1, 1]"""
    own: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, CHUNKS)))
    pairs = gl.convert_layout(pairs, own, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(pairs, 1), 2), 3)


@gluon.jit
def _halves(scales, TILE_N: gl.constexpr, GROUP: gl.constexpr, CHUNKS: gl.constexpr):
    """Split the scales of a span for its two chunks: those of the first two values of each word, and of the others."""
    pairs = _pair(scales, GROUP)
    if GROUP == GROUPS_OF_16:
        low, high = gl.split(gl.permute(gl.reshape(pairs, (TILE_N, 2, 2, 2)), (0, 2, 3, 1)))
        a, b = gl.split(low)
        c, d = gl.split(high)
        first, second = (_of_groups(a, CHUNKS), _of_groups(b, CHUNKS)), (_of_groups(c, CHUNKS), _of_groups(d, CHUNKS))
    elif GROUP == CHUNK:
        low, high = gl.split(pairs)
        a, c = _of_chunk(low, CHUNKS), _of_chunk(high, CHUNKS)
        first, second = (a, a), (c, c)
    elif GROUP == SPAN:
        a = _of_chunk(gl.reshape(pairs, (TILE_N,)), CHUNKS)
        first, second = (a, a), (a, a)
    else:
        low, high = gl.split(gl.permute(gl.reshape(pairs, (TILE_N, 2, 2)), (0, 2, 1)))
        a, c = _of_groups(low, CHUNKS), _of_groups(high, CHUNKS)
        first, second = (a, a), (c, c)
    return first, second


@gluon.jit
def _weights(
    words, scales, planes, TILE_N: gl.constexpr, CHUNKS: gl.constexpr, LEFT: gl.constexpr, HAS_TABLE: gl.constexpr
):
    """Expand a chunk's weights: [TILE_N, CHUNK]."""
    own = gl.convert_layout(words, CHUNKS, assert_trivial=True)
    if HAS_TABLE:
        a, b, c, d = gl.inline_asm_elementwise(
            PICK, PICK_TYPES,
            [own, scales[0], scales[1], planes[0], planes[1], planes[2], planes[3], planes[4], planes[5], planes[6],
             planes[7]],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            EXPAND, EXPAND_TYPES, [own, scales[0], scales[1]],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    every = gl.join(gl.join(a, b), gl.join(c, d))  # [TILE_N, lanes, groups, neighbours, a or b, ab or cd]
    return gl.convert_layout(
        gl.reshape(gl.permute(every, (0, 2, 5, 4, 1, 3)), (TILE_N, CHUNK)), LEFT, assert_trivial=True
    )


@gluon.jit
def _load_spans(matrix, scales, first, last, GROUP: gl.constexpr, AHEAD: gl.constexpr):
    """Load words and scales of AHEAD spans from span `first` on; beyond the last span, that of the last."""
    EACH: gl.constexpr = SPAN // GROUP
    at = gl.minimum(first, last)
    words, found = (gl.load(matrix + at * WORDS),), (gl.load(scales + at * EACH),)
    for i in gl.static_range(1, AHEAD):
        at = gl.minimum(first + i, last)
        words = words + (gl.load(matrix + at * WORDS),)  # type: ignore[assignment]
        found = found + (gl.load(scales + at * EACH),)  # type: ignore[assignment]
    return words, found


@gluon.jit
def _load_planes(table):
    """Load a table's values as 16 lower and 16 upper bytes, in eight words."""
    found = (gl.load(table),)
    for i in gl.static_range(1, 8):
        found = found + (gl.load(table + i),)  # type: ignore[assignment]
    return found


@kernel_unspecialized("num_rows", "splits", jit=gluon.jit, is_large=True)
def _hopper_gemm_fp4(
    x, weight, scales, factors, bias, out, parts, arrived, num_rows, num_out, num_spans, splits,
    ROWS: gl.constexpr, TILE_N: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, HAS_TABLE: gl.constexpr, OVERLAPS: gl.constexpr,
) -> None:  # fmt: skip
    """Matrix rows beyond the last are clamped; TMA fills zeros beyond the last input row or column. A split is a
    multiple of AHEAD spans. `factors`: of rows, or a table."""
    launch_dependents(OVERLAPS)
    planes = _load_planes(factors) if HAS_TABLE else ()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_WORDS: gl.constexpr = _word_layout(WARPS, TILE_N)
    OF_SCALES: gl.constexpr = _scale_layout(WARPS, TILE_N, SPAN // GROUP)
    CHUNKS: gl.constexpr = _chunk_layout(WARPS, TILE_N)
    EACH: gl.constexpr = SPAN // GROUP
    row, split_size = gl.program_id(2) * ROWS, gl.cdiv(num_spans, splits * AHEAD) * AHEAD
    low = gl.program_id(1) * split_size
    high = gl.minimum(low + split_size, num_spans)
    turns = gl.cdiv(gl.maximum(high - low, 0), AHEAD)
    total, column = turns * (2 * AHEAD), low * SPAN

    tiles = gl.allocate_shared_memory(x.dtype, [RING, ROWS, CHUNK], x.layout)
    copied = new_barriers(RING)

    begin = gl.program_id(0) * TILE_N
    word_rows = (begin + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, OF_WORDS))) % num_out
    word_ids = gl.arange(0, WORDS, layout=gl.SliceLayout(0, OF_WORDS))
    matrix = weight + gl.expand_dims(word_rows.to(gl.int64) * (num_spans * WORDS), 1) + gl.expand_dims(word_ids, 0)
    scale_rows = (begin + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, OF_SCALES))) % num_out
    scale_ids = gl.arange(0, EACH, layout=gl.SliceLayout(0, OF_SCALES))
    own = scales + gl.expand_dims(scale_rows * (num_spans * EACH), 1) + gl.expand_dims(scale_ids, 0)
    words, found = _load_spans(matrix, own, low, num_spans - 1, GROUP, AHEAD)
    wait_for_previous(OVERLAPS)

    for i in gl.static_range(RING - 1):
        copy_tile(x, tiles, copied, i, row, column, total, ROWS, RING)
    sums = gl.zeros((TILE_N, ROWS), gl.float32, layout=SUMS)
    number = 0
    for turn in range(turns):
        words_then, found_then = _load_spans(matrix, own, low + (turn + 1) * AHEAD, num_spans - 1, GROUP, AHEAD)
        for i in gl.static_range(AHEAD):
            of_chunks = _halves(found[i], TILE_N, GROUP, CHUNKS)
            chunks = gl.split(gl.permute(gl.reshape(words[i], (TILE_N, 4, 2, 2, 2)), (0, 1, 3, 4, 2)))
            for chunk in gl.static_range(2):
                left = _weights(chunks[chunk], of_chunks[chunk], planes, TILE_N, CHUNKS, LEFT, HAS_TABLE)
                mbarrier.wait(copied.index(number % RING), (number // RING) & 1)
                sums = warpgroup_mma(left, tiles.index(number % RING).permute((1, 0)), sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[sums])
                barrier()  # all threads have multiplied the previous chunk, whose tile can be reused
                copy_tile(x, tiles, copied, number + RING - 1, row, column, total, ROWS, RING)
                number += 1
        words, found = words_then, found_then
    sums = warpgroup_mma_wait(0, deps=[sums])

    is_last = splits == 1
    if splits > 1:
        sums, is_last = join_splits(sums, parts, arrived, splits, TILE_N, ROWS, SUMS)
    if is_last:
        ours = begin + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SUMS))
        if HAS_TABLE:
            sums *= gl.load(factors + FACTOR_PLACE).to(gl.float32, bitcast=True)
        if GROUP == GROUPS_OF_16:
            sums *= gl.expand_dims(gl.load(factors + ours, mask=ours < num_out, other=0.0), 1)
        if HAS_BIAS:
            sums += gl.expand_dims(gl.load(bias + ours, mask=ours < num_out, other=0.0).to(gl.float32), 1)
        store_tile(sums, out, begin, row, num_rows, num_out, TILE_N, ROWS, WARPS)


@dataclass(frozen=True)
class DenseFp4Config(HopperIntConfig):
    ahead: int = 2


def pick_dense_fp4_config(product: Product) -> DenseFp4Config:
    """Return the fastest configuration on an H200 of 8 to 256 rows, 1 to 8 splits, 1, 2 and 4 spans loaded ahead and
    rings of 4 to 8 tiles. Columns are split until a multiprocessor has three programs; four or five with MXFP4 and
    tables, whose scales take fewer registers; two of 128 rows. 256 rows are one tile only with few splits."""
    multiprocessors, m, n = product.capabilities.tuning.multiprocessors, product.m, product.n
    if m > 128:
        tall = cdiv(m, 256)
        if cdiv(n, 128) * tall > 2 * multiprocessors // 3:
            return DenseFp4Config(256, 1, tile_n=128, warps=8, ring=4)
        return DenseFp4Config(256, max(1, multiprocessors // (cdiv(n, 64) * tall)), ring=4)
    is_large = cdiv(n, 64) >= 3 * multiprocessors
    rows = next((size for size in (8, 16, 32, 64) if m <= size and (size > 8 or is_large)), 128)
    is_light = product.form.kind == "table" or product.form == MXFP4[torch.bfloat16]
    each = 2 if rows == 128 else 4.5 if rows <= 32 and is_light else 3
    spans = product.k // FP4_SPAN
    splits = max(1, min(int(each * multiprocessors) // cdiv(n, 64), spans // 4))
    turns = cdiv(spans, 2 * splits)  # iterations per program, two spans each
    return DenseFp4Config(rows, cdiv(spans, 2 * turns))


def hopper_fp4_linear(
    x: torch.Tensor,
    matrix: PackedFp4Matrix | TableMatrix,
    bias: torch.Tensor | None,
    config: DenseFp4Config,
    _dtype: object = None,
) -> torch.Tensor:
    """x [rows, num_in], matrix [num_out, num_in] → [rows, num_out]"""
    x = x.contiguous()
    num_rows, num_out = len(x), len(matrix.words)
    matrix_tiles, blocks = cdiv(num_out, config.tile_n), cdiv(num_rows, config.rows)
    out = x.new_empty(num_rows, num_out)
    parts, arrived = room_for_splits(matrix_tiles * blocks, config.splits, config.tile_n * config.rows, out)
    has_table = isinstance(matrix, TableMatrix)
    factors = matrix.table if isinstance(matrix, TableMatrix) else matrix.factors
    _hopper_gemm_fp4[(matrix_tiles, config.splits, blocks)](
        TensorDescriptor.from_tensor(x, [config.rows, FP4_SPAN // 2], TILES), matrix.words.view(torch.int16),
        matrix.scales, factors, bias if bias is not None else x, out, parts, arrived,
        num_rows, num_out, matrix.num_columns // FP4_SPAN, config.splits,
        config.rows, config.tile_n, config.ring, config.warps, config.ahead, bias is not None, matrix.group,
        has_table, num_warps=config.warps, **launch_options(),
    )  # fmt: skip
    return out


HOPPER_GEMM_FP4 = GemmKernel(pick_dense_fp4_config, hopper_fp4_linear)
HOPPER_GEMM_TABLE = GemmKernel(pick_dense_fp4_config, hopper_fp4_linear)
