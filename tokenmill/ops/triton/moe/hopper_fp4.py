"""Grouped GEMM of sorted pairs and MXFP4 or NVFP4 experts, on Hopper (`quant/fp4.py`, `moe/pairs.py`).

A program computes a tile of an expert's matrix rows, which is the left factor, and a tile of its pairs:

    tile [TILE_N, columns] · tokens [columns, ROWS] → sums [TILE_N, ROWS]

With gates, the first half of the tile are gate rows and the second their up rows, so that the thread that holds a gate
also holds its up. As in `quant/hopper_gemm_int.py` three things overlap: TMA copies tokens to a ring of tiles in shared
memory; words and scales of the next chunks are loaded into registers; and while the tensor cores multiply one chunk,
the next chunk's weights are expanded, in the registers from which the tensor cores read them. TMA can't gather, so
tokens are sorted by pair before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.arch.packed_formats import NV_GROUP
from tokenmill.arch.spec import Activation
from tokenmill.ops.triton.gemm.hopper import activate, barrier, copy_to_shared, new_barriers
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized
from tokenmill.ops.triton.moe.pairs import SortedPairs, gather_tokens
from tokenmill.ops.triton.quant.fp4 import NV_EXPONENT, PTX_FP4_TYPES, PTX_NVFP4_TYPES, Fp4Matrix, ptx_fp4

CHUNK = gl.constexpr(64)  # columns
WORDS = gl.constexpr(16)  # per chunk
PTX, PTX_TYPES = gl.constexpr(ptx_fp4()), gl.constexpr(PTX_FP4_TYPES.value)
NV_PTX, NV_TYPES = gl.constexpr(ptx_fp4(NV_GROUP)), gl.constexpr(PTX_NVFP4_TYPES.value)
EXPONENT, GROUPS_OF_16 = gl.constexpr(NV_EXPONENT.value), gl.constexpr(NV_GROUP)
TILES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class HopperFp4Config(NamedTuple):
    """The tile configuration."""

    rows: int  # pairs
    ahead: int = 2  # chunks loaded ahead; an even number, since two are multiplied alternately
    ring: int = 6  # tiles of tokens
    warps: int = 4

    @property
    def tile_n(self) -> int:
        """Return the matrix rows per tile: twice as many as the warps multiply at a time, gates and ups."""
        return 32 * self.warps


def pick_hopper_fp4_config(pairs_each: float) -> HopperFp4Config:
    """Return the fastest configuration on an H200; most experts have one or two tiles, so that weights are expanded at
    most twice."""
    return HopperFp4Config(next((rows for rows, most in ((16, 8), (32, 48), (64, 160)) if pairs_each <= most), 128))


@gluon.jit
def _expert_of_tile(offsets, num_experts, TILE: gl.constexpr):
    """Duplicate of `moe/pairs.py`'s."""
    tile = gl.program_id(0)
    low, high = 0, num_experts
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(offsets + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    begin, end = gl.load(offsets + low).to(gl.int32), gl.load(offsets + low + 1).to(gl.int32)
    return low, begin + (tile - begin // TILE - low) * TILE, end


@gluon.jit
def _weights(words, scales, TILE_N: gl.constexpr, GROUP: gl.constexpr):
    """Expand a chunk's weights [TILE_N, CHUNK] from its words [TILE_N, WORDS] and scales [TILE_N]."""
    if GROUP == GROUPS_OF_16:  # as `scale_pairs` of `quant/fp4.py`
        pairs = (((scales & 0xFF) << 4) | ((scales & 0xFF00) << 12)) + EXPONENT
        more = (((scales >> 12) & 0xFF0) | ((scales >> 4) & 0x0FF00000)) + EXPONENT
        a, b, c, d = gl.inline_asm_elementwise(
            NV_PTX, NV_TYPES, [words, gl.expand_dims(pairs, 1), gl.expand_dims(more, 1)],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            PTX, PTX_TYPES, [words, gl.expand_dims(scales, 1)],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    low = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (TILE_N, CHUNK // 2))
    high = gl.reshape(gl.permute(gl.join(c, d), (0, 2, 1)), (TILE_N, CHUNK // 2))
    return gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (TILE_N, CHUNK))


@gluon.jit
def _load_chunks(matrix, scales, first, num_chunks, scale_stride, AHEAD: gl.constexpr):
    """Load words and scales of AHEAD chunks from chunk `first` on; beyond the last chunk, that of the last."""
    at = gl.minimum(first, num_chunks - 1)
    words, found = (gl.load(matrix + at * WORDS),), (gl.load(scales + at * scale_stride),)
    for i in gl.static_range(1, AHEAD):
        at = gl.minimum(first + i, num_chunks - 1)
        words = words + (gl.load(matrix + at * WORDS),)  # type: ignore[assignment]
        found = found + (gl.load(scales + at * scale_stride),)  # type: ignore[assignment]
    return words, found


@gluon.jit
def _copy_tile(x, tiles, copied, number, row, total, ROWS: gl.constexpr, RING: gl.constexpr):
    """Start to copy chunk `number` of the tokens, if it exists, to its tile of the ring."""
    slot = number % RING
    mbarrier.expect(copied.index(slot), ROWS * CHUNK * 2, pred=number < total)
    copy_to_shared(x, [row, number * CHUNK], copied.index(slot), tiles.index(slot), pred=number < total)


@gluon.jit
def _gated(gate, up, KIND: gl.constexpr):
    if KIND == "swiglu_oai":
        gate, up = gl.minimum(gate, 7.0), gl.minimum(gl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + gl.exp(-1.702 * gate)) * (up + 1.0)
    if KIND == "silu_to_10":
        gate, up = gl.minimum(gate, 10.0), gl.minimum(gl.maximum(up, -10.0), 10.0)
        return gate / (1.0 + gl.exp(-gate)) * up
    return activate(gate, KIND) * up


@kernel_unspecialized("num_experts", jit=gluon.jit, is_large=True)
def _hopper_grouped_fp4(
    x, words, scales, factors, bias, out, order, offsets, weights, num_out, num_in, num_experts, scale_stride,
    ROWS: gl.constexpr, TILE_N: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    KIND: gl.constexpr, IS_SHARED_OUT: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """num_out: rows of the result, half an expert's matrix rows with gates (KIND). IS_SHARED_OUT: results are
    multiplied by their weights and stored in the original order of the pairs, not sorted by expert."""
    expert, row, end = _expert_of_tile(offsets, num_experts, ROWS)
    if row < end:
        IS_GATED: gl.constexpr = KIND != ""
        OWN: gl.constexpr = TILE_N // 2 if IS_GATED else TILE_N
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        num_chunks, first_row = num_in // CHUNK, gl.program_id(1) * OWN
        tiles = gl.allocate_shared_memory(x.dtype, [RING, ROWS, CHUNK], x.layout)
        copied = new_barriers(RING)
        total = gl.cdiv(num_chunks, AHEAD) * AHEAD  # tokens are zero beyond their last column
        for i in gl.static_range(RING - 1):
            _copy_tile(x, tiles, copied, i, row, total, ROWS, RING)

        numbers = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, LEFT))
        if IS_GATED:  # rows beyond the last are clamped
            rows = expert.to(gl.int64) * 2 * num_out + (first_row + numbers % OWN) % num_out + numbers // OWN * num_out
        else:
            rows = expert.to(gl.int64) * num_out + (first_row + numbers) % num_out
        word_ids = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LEFT))
        matrix = words + gl.expand_dims(rows * (num_in // 4), 1) + gl.expand_dims(word_ids, 0)
        here, found = _load_chunks(matrix, scales + rows, 0, num_chunks, scale_stride, AHEAD)
        sums = gl.zeros((TILE_N, ROWS), gl.float32, layout=SUMS)
        for first in range(0, num_chunks, AHEAD):
            then, found_then = _load_chunks(matrix, scales + rows, first + AHEAD, num_chunks, scale_stride, AHEAD)
            for i in gl.static_range(AHEAD):
                number = first + i
                left = gl.convert_layout(_weights(here[i], found[i], TILE_N, GROUP), LEFT, assert_trivial=True)
                mbarrier.wait(copied.index(number % RING), (number // RING) & 1)
                sums = warpgroup_mma(left, tiles.index(number % RING).permute((1, 0)), sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[sums])
                barrier()  # all threads have multiplied the previous chunk, whose tile can be reused
                _copy_tile(x, tiles, copied, number + RING - 1, row, total, ROWS, RING)
            here, found = then, found_then
        sums = warpgroup_mma_wait(0, deps=[sums])

        own = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SUMS))
        if IS_GATED:
            indices = expert * 2 * num_out + (first_row + own % OWN) % num_out + own // OWN * num_out
        else:
            indices = expert * num_out + (first_row + own) % num_out
        if GROUP == GROUPS_OF_16:
            sums *= gl.expand_dims(gl.load(factors + indices), 1)
        if HAS_BIAS:
            sums += gl.expand_dims(gl.load(bias + indices).to(gl.float32), 1)
        if IS_GATED:
            gate, up = gl.split(gl.permute(gl.reshape(sums, (2, OWN, ROWS)), (1, 2, 0)))
            sums = _gated(gate, up, KIND)
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [OWN // 8, 256 // OWN], [1, WARPS], [0, 1])
        columns = gl.expand_dims(first_row + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT)), 1)
        positions = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
        is_pair = positions < end
        targets = positions.to(gl.int64)
        result = gl.convert_layout(sums, OUT)
        if IS_SHARED_OUT:
            targets = gl.load(order + positions, mask=is_pair, other=0)
            result *= gl.expand_dims(gl.load(weights + targets, mask=is_pair, other=0.0), 0)
        place = out + gl.expand_dims(targets * num_out, 0) + columns
        gl.store(place, result.to(out.dtype.element_ty), mask=gl.expand_dims(is_pair, 0) & (columns < num_out))


def hopper_grouped_fp4(
    x: torch.Tensor,
    matrix: Fp4Matrix,
    pairs: SortedPairs,
    *,
    is_gathered: bool,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    config: HopperFp4Config | None = None,
) -> torch.Tensor:
    """See `grouped_fp4`."""
    num_experts, num_pairs = pairs.num_experts, len(pairs.order)
    num_out = len(matrix.words) // num_experts // (2 if activation else 1)
    config = config or pick_hopper_fp4_config(num_pairs / num_experts)
    tokens = gather_tokens(x, pairs) if is_gathered else x
    out = x.new_empty(num_pairs, num_out)
    own = config.tile_n // 2 if activation else config.tile_n
    _hopper_grouped_fp4[(num_pairs // config.rows + num_experts, cdiv(num_out, own))](
        TensorDescriptor.from_tensor(tokens, [config.rows, 64], TILES), matrix.words, matrix.scales,
        matrix.factors, x if bias is None else bias, out, pairs.order, pairs.offsets, pairs.weights, num_out,
        matrix.num_columns, num_experts, matrix.scales.stride(0), config.rows, config.tile_n, config.ring, config.warps,
        config.ahead, activation or "", not is_gathered, bias is not None, matrix.group,
        num_warps=config.warps,
    )  # fmt: skip
    return out
