"""Products of dozens to hundreds of rows with packed integers (`packed_int.py`), on Hopper: enough rows to keep the
tensor cores busy, too few to expand the matrix in memory first.

As in split-K a program computes a tile of the matrix, which is the left factor, and a range of its columns:

    tile [TILE_N, columns] · inputs [columns, ROWS] → sums [TILE_N, ROWS]

Three things overlap. TMA copies inputs to a ring of tiles in shared memory; words and scales of the next span are
loaded into registers; and while the tensor cores multiply one chunk of columns, the next chunk's weights are expanded,
in the registers from which the tensor cores read them. The Triton compiler does not schedule that by itself, so this is
written in Gluon, Triton's lower-level language, in which layouts, copies and waits are explicit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.ops.triton.gemm.hopper import (
    barrier,
    copy_to_shared,
    join_splits,
    launch_dependents,
    new_barriers,
    store_tile,
    wait_for_previous,
)
from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_options, room_for_splits
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix

SPAN = gl.constexpr(32)  # words per span, as in all matrices that use this kernel
COLUMNS = gl.constexpr(64)  # per chunk: two values of each word of a span
TILES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _bit_offset(bits, number):
    """Return the bit offset of value `number` in its shifted word, and the shift: 8, 12 or 16 for 4 bits, 8 for 8."""
    if bits == 8:
        return 8, 0
    return (8 + 4 * number, -8) if number < 2 else (4 * number, 0) if number < 5 else (4 * number - 12, 12)


@gluon.constexpr_function
def _excess(bits, number):
    """Return the excess of a value after `_weigh` has turned it into a float32 number."""
    return 2.0 ** (23 - _bit_offset(bits, number)[0]) + 2.0 ** (bits - 1)


@gluon.constexpr_function
def _weigh(bits, number, kind):
    """PTX: value `number` of two neighbouring words, times scale plus rest, as a pair of 16-bit floats. Bits at
    `offset` combined with the upper bits of 2 ** (23 - offset) are a float32 number; scale and rest remove the excess
    exactly."""
    offset, shift = _bit_offset(bits, number)
    made = ""
    for word, value in (("$1", "t"), ("$2", "u")):
        if bits == 8:
            made += f"prmt.b32 {value}, {word}, 0x47000000, 0x74{number}4;\n"
        else:
            source = word if shift == 0 else value
            if shift:
                made += f"{'shr' if shift > 0 else 'shl'}.b32 {value}, {word}, {abs(shift)};\n"
            made += f"lop3.b32 {value}, {source}, {15 << offset}, {(150 - offset) << 23}, 0xEA;\n"
    return f"""{{
.reg .b32 t, u;
.reg .f32 low, high;
{made}mov.b32 low, t;
mov.b32 high, u;
fma.rn.f32 low, low, $3, $5;
fma.rn.f32 high, high, $4, $6;
cvt.rn.{kind}x2.f32 $0, high, low;
}}"""


@gluon.jit
def _scale_and_rest(found, BITS: gl.constexpr, NUMBER: gl.constexpr):
    """Split loaded scales into scale and offset, float32 [rows, 1] each, for value NUMBER of a word."""
    excess: gl.constexpr = _excess(BITS, NUMBER)
    if found.dtype == gl.int32:
        scale = found.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        rest = (found >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32) - scale * excess
    else:
        scale = found.to(gl.float32)
        rest = scale * -excess
    return gl.expand_dims(scale, 1), gl.expand_dims(rest, 1)


@gluon.jit
def _weights(
    words, found, word_ids, NUMBER: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, DTYPE: gl.constexpr
):
    """Dequantise value NUMBER of each word: [TILE_N, SPAN]."""
    first: gl.constexpr = NUMBER * SPAN // GROUP
    scale, rest = _scale_and_rest(found[first], BITS, NUMBER)
    if GROUP < SPAN:  # two groups
        second_scale, second_rest = _scale_and_rest(found[first + 1], BITS, NUMBER)
        is_first = gl.expand_dims(word_ids < GROUP, 0)
        scale, rest = gl.where(is_first, scale, second_scale), gl.where(is_first, rest, second_rest)
    if gl.bfloat16 == DTYPE:
        weights = gl.inline_asm_elementwise(
            _weigh(BITS, NUMBER, "bf16"), "=r,r,r,f,f,f,f", [words, scale, rest], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        weights = gl.inline_asm_elementwise(
            _weigh(BITS, NUMBER, "f16"), "=r,r,r,f,f,f,f", [words, scale, rest], gl.float16, is_pure=True, pack=2
        )
    return weights


@gluon.jit
def _chunk(
    words, found, word_ids, FIRST: gl.constexpr, TILE_N: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Dequantise values FIRST and FIRST + 1 of all words: [TILE_N, COLUMNS]."""
    a = _weights(words, found, word_ids, FIRST, GROUP, BITS, DTYPE)
    b = _weights(words, found, word_ids, FIRST + 1, GROUP, BITS, DTYPE)
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (TILE_N, COLUMNS))


@gluon.jit
def _span(matrix, scales, start, num_out, GROUPS: gl.constexpr):
    """Load a span's words, from word `start` of each matrix row, and their scales."""
    pointers = scales + start // SPAN * GROUPS * num_out
    found = (gl.load(pointers),)
    for i in gl.static_range(1, GROUPS):
        found = found + (gl.load(pointers + i * num_out),)  # type: ignore[assignment]
    return gl.load(matrix + start), found


@gluon.jit
def copy_tile(x, tiles, copied, number, row, column, total, ROWS: gl.constexpr, RING: gl.constexpr):
    """Start to copy chunk `number` of the inputs, if it exists, to its tile of the ring."""
    slot = number % RING
    mbarrier.expect(copied.index(slot), ROWS * COLUMNS * 2, pred=number < total)
    copy_to_shared(x, [row, column + number * COLUMNS], copied.index(slot), tiles.index(slot), pred=number < total)


@gluon.jit
def _store(
    sums, bias, out, row, num_rows, num_out, HAS_BIAS: gl.constexpr, TILE_N: gl.constexpr, ROWS: gl.constexpr,
    SUMS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    begin = gl.program_id(0) * TILE_N
    if HAS_BIAS:
        ours = begin + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SUMS))
        sums += gl.expand_dims(gl.load(bias + ours, mask=ours < num_out, other=0.0).to(gl.float32), 1)
    store_tile(sums, out, begin, row, num_rows, num_out, TILE_N, ROWS, WARPS)


@kernel_unspecialized("num_rows", "splits", jit=gluon.jit, is_large=True)
def _hopper_gemm_int(
    x, weight, scales, bias, out, parts, arrived, num_rows, num_out, num_in, splits,
    ROWS: gl.constexpr, TILE_N: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, OVERLAPS: gl.constexpr,
) -> None:  # fmt: skip
    """Matrix rows beyond the last are clamped; TMA fills zeros beyond the last input row."""
    launch_dependents(OVERLAPS)
    EACH: gl.constexpr = 32 // BITS
    GROUPS: gl.constexpr = SPAN * EACH // GROUP
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row, row_words = gl.program_id(2) * ROWS, num_in // EACH
    split_size = gl.cdiv(row_words, splits * SPAN) * SPAN
    low = gl.program_id(1) * split_size
    high = gl.minimum(low + split_size, row_words)
    total, column = gl.maximum(high - low, 0) * EACH // COLUMNS, low * EACH

    tiles = gl.allocate_shared_memory(x.dtype, [RING, ROWS, COLUMNS], x.layout)
    copied = new_barriers(RING)

    matrix_rows = (gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, LEFT))) % num_out
    word_ids = gl.arange(0, SPAN, layout=gl.SliceLayout(0, LEFT))
    matrix = weight + gl.expand_dims(matrix_rows.to(gl.int64) * row_words, 1) + gl.expand_dims(word_ids, 0)
    first, last = gl.minimum(low, row_words - SPAN), gl.maximum(high - SPAN, 0)  # a split may be empty
    words, found = _span(matrix, scales + matrix_rows, first, num_out, GROUPS)
    if AHEAD == 2:
        words_next, found_next = _span(matrix, scales + matrix_rows, gl.minimum(first + SPAN, last), num_out, GROUPS)
    wait_for_previous(OVERLAPS)

    for i in gl.static_range(RING - 1):
        copy_tile(x, tiles, copied, i, row, column, total, ROWS, RING)
    sums = gl.zeros((TILE_N, ROWS), gl.float32, layout=SUMS)
    number = 0
    for start in range(low, high, SPAN):
        following = gl.minimum(start + AHEAD * SPAN, last)
        words_then, found_then = _span(matrix, scales + matrix_rows, following, num_out, GROUPS)
        for i in gl.static_range(0, EACH, 2):
            chunk = _chunk(words, found, word_ids, i, TILE_N, GROUP, BITS, x.dtype)
            left = gl.convert_layout(chunk, LEFT, assert_trivial=True)  # no data moves
            mbarrier.wait(copied.index(number % RING), (number // RING) & 1)
            sums = warpgroup_mma(left, tiles.index(number % RING).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            barrier()  # all threads have multiplied the previous chunk, whose tile can be reused
            copy_tile(x, tiles, copied, number + RING - 1, row, column, total, ROWS, RING)
            number += 1
        if AHEAD == 2:
            words, found = words_next, found_next
            words_next, found_next = words_then, found_then
        else:
            words, found = words_then, found_then
    sums = warpgroup_mma_wait(0, deps=[sums])

    is_last = splits == 1
    if splits > 1:
        sums, is_last = join_splits(sums, parts, arrived, splits, TILE_N, ROWS, SUMS)
    if is_last:
        _store(sums, bias, out, row, num_rows, num_out, HAS_BIAS, TILE_N, ROWS, SUMS, WARPS)


@dataclass(frozen=True)
class HopperIntConfig:
    """The tile configuration of a product."""

    rows: int
    splits: int
    tile_n: int = 64
    warps: int = 4
    ahead: int = 1  # spans loaded ahead
    ring: int = 6  # tiles of inputs


# Time of 256 columns per program, roughly in microseconds, with one, two or three programs per multiprocessor, measured
# on an H200.
COSTS = {64: (1.5, 2.0, 2.6), 128: (1.5, 2.0), 256: (2.6,)}
BEGINNING, JOINING = 1.5, 1.5  # start and reduction of a program, in multiples of 256 columns


def _cost(config: HopperIntConfig, product: Product) -> float:
    multiprocessors = product.capabilities.tuning.multiprocessors
    costs = COSTS[config.rows]
    programs = cdiv(product.n, config.tile_n) * cdiv(product.m, config.rows) * config.splits
    full, others = divmod(programs, multiprocessors * len(costs))
    turns = cdiv(product.k, 256 * config.splits) + BEGINNING + (JOINING if config.splits > 1 else 0)
    return turns * (full * costs[-1] + (costs[cdiv(others, multiprocessors) - 1] if others else 0))


def pick_hopper_int_config(product: Product) -> HopperIntConfig:
    """Return the cheapest configuration. A matrix with few tiles is split by columns, but not for 256 rows, which have
    too many sums; spans of 8 bits are short, so two are loaded ahead unless there are many programs."""
    rows, ahead = (64, 1) if product.m <= 64 else (128, product.form.bits // 4)
    splits = range(1, min(8, cdiv(product.k, 256)) + 1)
    configs = [HopperIntConfig(rows, number, ahead=ahead) for number in splits]
    if product.m > 128:
        configs.append(HopperIntConfig(256, 1, tile_n=128, warps=8))
    return min(configs, key=lambda config: _cost(config, product))


def hopper_int_linear(
    x: torch.Tensor,
    matrix: PackedIntMatrix,
    bias: torch.Tensor | None,
    config: HopperIntConfig,
    _dtype: object = None,
) -> torch.Tensor:
    """x [rows, num_in] times a matrix [num_out, num_in] of integers, interleaved by 32 words → [rows, num_out]"""
    x = x.contiguous()
    (num_rows, num_in), num_out = x.shape, len(matrix.words)
    matrix_tiles, blocks = cdiv(num_out, config.tile_n), cdiv(num_rows, config.rows)
    out = x.new_empty(num_rows, num_out)
    parts, arrived = room_for_splits(matrix_tiles * blocks, config.splits, config.tile_n * config.rows, out)
    inputs = TensorDescriptor.from_tensor(x, [config.rows, 64], TILES)
    _hopper_gemm_int[(matrix_tiles, config.splits, blocks)](
        inputs, matrix.words, matrix.scales, bias if bias is not None else x, out, parts, arrived,
        num_rows, num_out, num_in, config.splits,
        config.rows, config.tile_n, config.ring, config.warps, config.ahead, bias is not None, matrix.group,
        matrix.bits, num_warps=config.warps, **launch_options(),
    )  # fmt: skip
    return out


HOPPER_GEMM_INT = GemmKernel(pick_hopper_int_config, hopper_int_linear)
