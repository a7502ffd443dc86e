"""Routed experts with matrices of 4-bit or 8-bit floats: MXFP4 and NVFP4 (`quant/fp4.py`), expanded in registers, and
fp8 with a scale per 128 columns (`quant/quantized.py`).

    a few tokens    each (token, expert) pair streams rows of its expert's matrices
    more tokens     pairs sorted by expert, in tiles; a tile of gate rows and their up rows are multiplied by the same
                    tokens, and act(gate) * up is stored

Weights are the left factor, as in split-K, so that only an expert's tokens are padded to a tile. Hopper GPUs have a
separate kernel for 4 bits and more tokens (`moe/hopper_fp4.py`). fp8 matrices are multiplied by tokens that are
quantised to fp8 too, as two values each if there are few (`quant/gemm_fp8_split.py`).

Kernels distinguish the forms by GROUP, the columns that share a scale: 32 for MXFP4, 16 for NVFP4, 128 for fp8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.packed_formats import FP8_GROUP, MX_GROUP, NV_GROUP
from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight
from tokenmill.ops.triton.elementwise.activation import FUSED_KINDS, LIMITED_KINDS, gated
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.moe.pairs import SortedPairs, expert_of_tile
from tokenmill.ops.triton.quant.fp4 import GROUPS_OF_16, LANES, Fp4Matrix, add_chunk, expand_fp4
from tokenmill.ops.triton.quant.gemm_fp8_split import num_planes_for, quantize_rows
from tokenmill.ops.triton.quant.packed_int import has_ptx
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix

DOWN_ROWS = 2  # rows of down per program, for few tokens
ROWS_TOGETHER = 8  # a program has a multiple of this many gate and up rows: their scales are neighbours
FP8_LANES = tl.constexpr(FP8_GROUP)  # values per chunk of fp8
SmallFloats = Fp4Matrix | Fp8BlockMatrix


@triton.jit
def _end_of_tile(
    sums, ups, bias, weights, out, rows, own, indices, pairs, is_pair, num_out,
    KIND: tl.constexpr, IS_GATHERED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Epilogue: apply biases, gates and routing weights, and store the tile [rows, pairs]."""
    IS_GATED: tl.constexpr = KIND != ""
    if HAS_BIAS:
        sums += tl.load(bias + rows)[:, None].to(tl.float32)
        if IS_GATED:
            ups += tl.load(bias + rows + num_out)[:, None].to(tl.float32)
    if IS_GATED:
        sums = gated(sums, ups, KIND)
    if IS_GATHERED:
        targets = indices
    else:
        sums *= tl.load(weights + pairs)[None, :]
        targets = pairs
    out_rows = out + targets.to(tl.int64)[None, :] * num_out + own[:, None]
    tl.store(out_rows, sums.to(out.dtype.element_ty), mask=is_pair[None, :] & (own < num_out)[:, None])


@kernel
def _grouped_fp4(
    x, words, scales, factors, bias, out, order, offsets, weights, num_out, num_in, num_experts, scale_stride,
    K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, IS_GATHERED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
) -> None:  # fmt: skip
    """KIND: the activation, if the matrix has gate rows above up rows. IS_GATHERED: rows of x are tokens, rows of out
    sorted pairs; else x has sorted pairs, and out pairs times their weights. Rows and pairs beyond the last are
    clamped, so that loads need no mask."""
    expert, first, end = expert_of_tile(offsets, num_experts, TILE)
    if first < end:
        IS_GATED: tl.constexpr = KIND != ""
        indices = first + tl.arange(0, TILE)
        is_pair = indices < end
        clamped = tl.minimum(indices, end - 1)
        pairs = tl.load(order + clamped)
        sources = pairs // K if IS_GATHERED else clamped
        row_words, lanes = num_in // 4, tl.arange(0, LANES)
        own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        num_rows = 2 * num_out if IS_GATED else num_out
        rows = tl.cast(expert, tl.int64) * num_rows + own % num_out
        matrix = words + rows[:, None] * row_words + lanes[None, :]
        inputs = x + sources.to(tl.int64)[:, None] * num_in + lanes[None, :]
        at = scales + rows
        sums = tl.zeros((ROWS, TILE), tl.float32)
        ups = tl.zeros((ROWS, TILE), tl.float32)
        found = tl.load(at)
        up_found = tl.load(at + num_out) if IS_GATED else found
        for start in range(0, row_words, LANES):
            # Scales are loaded one iteration ahead, which the compiler does for the factors of products only.
            turn = at + tl.minimum(start // LANES + 1, row_words // LANES - 1) * scale_stride
            found_next = tl.load(turn)
            rights = (tl.trans(tl.load(inputs + 4 * start)),)
            for i in tl.static_range(1, 4):
                rights = rights + (tl.trans(tl.load(inputs + 4 * start + i * LANES)),)  # type: ignore[assignment]
            sums = add_chunk(sums, tl.load(matrix + start), found, rights, GROUP, HAS_PTX)
            found = found_next
            if IS_GATED:
                up_next = tl.load(turn + num_out)
                up_words = tl.load(matrix + num_out * row_words + start)
                ups = add_chunk(ups, up_words, up_found, rights, GROUP, HAS_PTX)
                up_found = up_next
        if GROUP == GROUPS_OF_16:
            sums *= tl.load(factors + rows)[:, None]
            if IS_GATED:
                ups *= tl.load(factors + rows + num_out)[:, None]
        _end_of_tile(
            sums, ups, bias, weights, out, rows, own, indices, pairs, is_pair, num_out, KIND, IS_GATHERED, HAS_BIAS
        )


def grouped_fp4(
    x: torch.Tensor,
    matrix: Fp4Matrix,
    pairs: SortedPairs,
    *,
    is_gathered: bool,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Multiply pairs by a matrix of all experts' rows, stacked → [pairs, num_out]; with an activation an expert has
    gate rows above as many up rows."""
    has_gate = activation is None or activation in (*FUSED_KINDS, *LIMITED_KINDS)
    if capabilities_of(x.device).has_gluon and x.dtype == torch.bfloat16 and has_gate:
        from tokenmill.ops.triton.moe.hopper_fp4 import hopper_grouped_fp4  # Gluon takes 0.1 s to import

        return hopper_grouped_fp4(x, matrix, pairs, is_gathered=is_gathered, bias=bias, activation=activation)
    num_experts, num_pairs = pairs.num_experts, len(pairs.order)
    num_out = len(matrix.words) // num_experts // (2 if activation else 1)
    pairs_each = num_pairs / num_experts
    tile = 16 if pairs_each <= 8 else 32 if pairs_each <= 24 else 64
    out = x.new_empty(num_pairs, num_out)
    _grouped_fp4[(num_pairs // tile + num_experts, cdiv(num_out, 64))](
        x, matrix.words, matrix.scales, matrix.factors, x if bias is None else bias.contiguous(), out, pairs.order,
        pairs.offsets, pairs.weights, num_out, matrix.num_columns, num_experts, matrix.scales.stride(0),
        pairs.k, tile, 64, activation or "", is_gathered, bias is not None, matrix.group, has_ptx(),
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _scaled_product(sums, matrix, rights, scales):
    """Add 128 columns of a tile's fp8 values times their inputs, times their scales, to the sums."""
    return sums + tl.dot(tl.load(matrix), rights, tl.zeros_like(sums)) * scales[:, None]


@triton.jit
def _joined_planes(sums, ROWS: tl.constexpr, TILE: tl.constexpr, PLANES: tl.constexpr):
    """Join the sums of inputs that are two fp8 values each: [ROWS, TILE * PLANES] → [ROWS, TILE]."""
    if PLANES == 2:
        first, second = tl.split(tl.reshape(sums, (ROWS, TILE, PLANES)))
        sums = first + second * 0.0625
    return sums


@kernel
def _grouped_fp8(
    x, row_scales, values, scales, bias, out, order, offsets, weights, num_out, num_in, num_experts,
    K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr, KIND: tl.constexpr,
    IS_GATHERED: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """See `_grouped_fp4`; x [rows, PLANES, num_in] in fp8, with a scale per row."""
    expert, first, end = expert_of_tile(offsets, num_experts, TILE)
    if first < end:
        IS_GATED: tl.constexpr = KIND != ""
        indices = first + tl.arange(0, TILE)
        is_pair = indices < end
        pairs = tl.load(order + tl.minimum(indices, end - 1))
        planes = tl.arange(0, TILE * PLANES)
        each = tl.minimum(first + planes // PLANES, end - 1)
        sources = tl.load(order + each) // K if IS_GATHERED else each
        lanes = tl.arange(0, FP8_LANES)
        inputs = x + (sources.to(tl.int64) * PLANES + planes % PLANES)[:, None] * num_in + lanes[None, :]
        own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        num_rows = 2 * num_out if IS_GATED else num_out
        rows = tl.cast(expert, tl.int64) * num_rows + own % num_out
        matrix = values + rows[:, None] * num_in + lanes[None, :]
        at, scale_stride = scales + rows, num_experts * num_rows
        sums = tl.zeros((ROWS, TILE * PLANES), tl.float32)
        ups = tl.zeros((ROWS, TILE * PLANES), tl.float32)
        found = tl.load(at)
        up_found = tl.load(at + num_out) if IS_GATED else found
        for start in range(0, num_in, FP8_LANES):
            turn = at + tl.minimum(start // FP8_LANES + 1, num_in // FP8_LANES - 1) * scale_stride
            found_next = tl.load(turn)
            rights = tl.trans(tl.load(inputs + start))
            sums = _scaled_product(sums, matrix + start, rights, found)
            found = found_next
            if IS_GATED:
                up_next = tl.load(turn + num_out)
                ups = _scaled_product(ups, matrix + num_out * num_in + start, rights, up_found)
                up_found = up_next
        of_tokens = tl.load(row_scales + (pairs // K if IS_GATHERED else tl.minimum(indices, end - 1)))[None, :]
        sums = _joined_planes(sums, ROWS, TILE, PLANES) * of_tokens
        ups = _joined_planes(ups, ROWS, TILE, PLANES) * of_tokens
        _end_of_tile(
            sums, ups, bias, weights, out, rows, own, indices, pairs, is_pair, num_out, KIND, IS_GATHERED, HAS_BIAS
        )


class Fp8Tiles(NamedTuple):
    """The tile configuration for fp8 experts."""

    pairs: int
    rows: int  # matrix rows
    warps: int
    stages: int


def pick_fp8_tiles(pairs_each: float, num_planes: int) -> Fp8Tiles:
    """Return the fastest configuration on an H200, by pairs per expert."""
    if num_planes == 2:
        return Fp8Tiles(16 if pairs_each <= 8 else 32 if pairs_each <= 24 else 64, 64, 4, 4)
    if pairs_each <= 8:
        return Fp8Tiles(16, 128 if pairs_each <= 4 else 64, 4, 4)
    return Fp8Tiles(32 if pairs_each <= 24 else 64 if pairs_each <= 48 else 128, 64, 4, 3)


def grouped_fp8(
    x: torch.Tensor,
    matrix: Fp8BlockMatrix,
    pairs: SortedPairs,
    *,
    is_gathered: bool,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    tiles: Fp8Tiles | None = None,
) -> torch.Tensor:
    """See `grouped_fp4`. Tokens are quantised to two fp8 values each if there are few, else to one; the same for all of
    a step."""
    num_experts, num_pairs = pairs.num_experts, len(pairs.order)
    num_out = len(matrix.values) // num_experts // (2 if activation else 1)
    num_planes = num_planes_for(len(pairs.weights), x.device)
    rounded = quantize_rows(x, num_planes)
    tiles = tiles or pick_fp8_tiles(num_pairs / num_experts, num_planes)
    out = x.new_empty(num_pairs, num_out)
    _grouped_fp8[(num_pairs // tiles.pairs + num_experts, cdiv(num_out, tiles.rows))](
        *rounded, matrix.values, matrix.scales, x if bias is None else bias.contiguous(), out, pairs.order,
        pairs.offsets, pairs.weights, num_out, matrix.num_columns, num_experts, pairs.k, tiles.pairs, tiles.rows,
        num_planes, activation or "", is_gathered, bias is not None,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


@triton.jit
def _row_parts(row, chunks, is_chunk, GROUP: tl.constexpr):
    """Load a row's columns in the order of its chunks' words: four float32 tensors [chunks, LANES]; one for fp8, whose
    words are single values."""
    if GROUP == FP8_LANES:
        each = chunks[:, None] * FP8_LANES + tl.arange(0, FP8_LANES)[None, :]
        found = (tl.load(row + each, mask=is_chunk[:, None], other=0.0).to(tl.float32),)
    else:
        columns = chunks[:, None] * (4 * LANES) + tl.arange(0, LANES)[None, :]
        found = (tl.load(row + columns, mask=is_chunk[:, None], other=0.0).to(tl.float32),)
        for i in tl.static_range(1, 4):
            part = tl.load(row + columns + i * LANES, mask=is_chunk[:, None], other=0.0)
            found = found + (part.to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def _products(words, scales, parts, GROUP: tl.constexpr, HAS_PTX: tl.constexpr):
    """Multiply weights by a row's parts, [chunks, LANES]."""
    if GROUP == FP8_LANES:
        total = words.to(tl.float8e4nv, bitcast=True).to(tl.float32) * parts[0] * scales[:, None]
    else:
        a, b, c, d = expand_fp4(words, scales[:, None], GROUP, HAS_PTX)
        total = a.to(tl.float32) * parts[0] + b.to(tl.float32) * parts[1]
        total = total + c.to(tl.float32) * parts[2] + d.to(tl.float32) * parts[3]
    return total


@kernel
def _gemv_up(
    x, ids, words, scales, factors, bias, out, hidden, inter, rows_each, scale_stride,
    K: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T * K, inter] = act(gate x) * up x of the experts `ids` [T, K]"""
    wait_for_previous(OVERLAPS)
    launch_dependents(OVERLAPS)  # only when the ids are ready: the next kernel reads them without waiting
    pair = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    WORDS: tl.constexpr = FP8_LANES if GROUP == FP8_LANES else LANES
    row_words = hidden if GROUP == FP8_LANES else hidden // 4
    is_chunk = chunks * WORDS < row_words
    expert = tl.load(ids + pair)
    parts = _row_parts(x + pair // K * hidden, chunks, is_chunk, GROUP)
    first = tl.program_id(1) * rows_each
    last = tl.minimum(first + rows_each, inter)
    begin = expert * 2 * inter + first
    source = words + begin * row_words + (chunks * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    at = scales + begin + chunks * scale_stride
    to_up = inter * row_words
    gate = tl.load(source, mask=is_chunk[:, None], other=0)
    up = tl.load(source + to_up, mask=is_chunk[:, None], other=0)
    gate_scales, up_scales = tl.load(at, mask=is_chunk, other=0), tl.load(at + inter, mask=is_chunk, other=0)
    for row in range(first, last):
        source += row_words
        at += 1
        is_next = is_chunk & (chunks * 0 + row + 1 < last)
        next_gate = tl.load(source, mask=is_next[:, None], other=0)
        next_up = tl.load(source + to_up, mask=is_next[:, None], other=0)
        next_gate_scales = tl.load(at, mask=is_next, other=0)
        next_up_scales = tl.load(at + inter, mask=is_next, other=0)
        gates = tl.sum(tl.sum(_products(gate, gate_scales, parts, GROUP, HAS_PTX), axis=1), axis=0)
        ups = tl.sum(tl.sum(_products(up, up_scales, parts, GROUP, HAS_PTX), axis=1), axis=0)
        if GROUP == GROUPS_OF_16:
            gates *= tl.load(factors + expert * 2 * inter + row)
            ups *= tl.load(factors + expert * 2 * inter + inter + row)
        if HAS_BIAS:
            gates += tl.load(bias + expert * 2 * inter + row).to(tl.float32)
            ups += tl.load(bias + expert * 2 * inter + inter + row).to(tl.float32)
        tl.store(out + pair * inter + row, gated(gates, ups, KIND).to(out.dtype.element_ty))
        gate, up, gate_scales, up_scales = next_gate, next_up, next_gate_scales, next_up_scales


@kernel
def _gemv_down(
    inner, ids, weights, words, scales, factors, bias, out, hidden, inter, scale_stride,
    K: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, hidden], ROWS of one token per program, consecutively in a tile's chunks. The first expert's rows are
    prefetched before `inner` is ready."""
    launch_dependents(OVERLAPS)
    token = tl.program_id(1)
    all_chunks = tl.arange(0, ROWS * CHUNKS)
    rows, chunks = tl.program_id(0) * ROWS + all_chunks // CHUNKS, all_chunks % CHUNKS
    WORDS: tl.constexpr = FP8_LANES if GROUP == FP8_LANES else LANES
    row_words = inter if GROUP == FP8_LANES else inter // 4
    is_chunk = (chunks * WORDS < row_words) & (rows < hidden)
    source = words + (rows * row_words + chunks * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    at = scales + rows + chunks * scale_stride
    chosen = ids + token * K
    expert = tl.load(chosen, cache_modifier=".cg")
    part = tl.load(source + expert * hidden * row_words, mask=is_chunk[:, None], other=0)
    found = tl.load(at + expert * hidden, mask=is_chunk, other=0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS * CHUNKS, WORDS), tl.float32)
    targets = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    biases = tl.zeros((ROWS,), tl.float32)
    for choice in tl.static_range(K):
        expert_weight = tl.load(weights + token * K + choice, cache_modifier=".cg")
        if HAS_BIAS:
            own = bias + expert * hidden + targets
            biases += expert_weight * tl.load(own, mask=targets < hidden, other=0.0).to(tl.float32)
        part_weight = expert_weight
        if GROUP == GROUPS_OF_16:
            own_factors = tl.load(factors + expert * hidden + rows, mask=rows < hidden, other=0.0)
            part_weight = (expert_weight * own_factors)[:, None]
        next_part, next_found = part, found
        if choice + 1 < K:
            expert = tl.load(chosen + choice + 1, cache_modifier=".cg")
            next_part = tl.load(source + expert * hidden * row_words, mask=is_chunk[:, None], other=0)
            next_found = tl.load(at + expert * hidden, mask=is_chunk, other=0)
        parts = _row_parts(inner + (token * K + choice) * inter, chunks, is_chunk, GROUP)
        sums += _products(part, found, parts, GROUP, HAS_PTX) * part_weight
        part, found = next_part, next_found
    total = tl.sum(tl.reshape(tl.sum(sums, axis=1), (ROWS, CHUNKS)), axis=1) + biases
    tl.store(out + token * hidden + targets, total.to(out.dtype.element_ty), mask=targets < hidden)


class _Streamed(NamedTuple):
    """A matrix in the form that the kernels for few tokens read."""

    words: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    num_columns: int
    group: int

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks per row, rounded up to a power of two."""
        return next_power_of_2(len(self.scales))


def _streamed(matrix: SmallFloats) -> _Streamed:
    if isinstance(matrix, Fp4Matrix):
        return _Streamed(matrix.words, matrix.scales, matrix.factors, matrix.num_columns, matrix.group)
    return _Streamed(matrix.values.view(torch.int8), matrix.scales, matrix.scales, matrix.num_columns, FP8_GROUP)


def stream_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    """x [T, H], experts and their weights [T, k] → weighted sum of the chosen experts [T, H]"""
    gate_up, down = map(_streamed, packed.packed)
    (num_tokens, hidden), k, inter = x.shape, ids.shape[1], down.num_columns
    inner, out, pairs = x.new_empty(num_tokens * k, inter), torch.empty_like(x), num_tokens * k
    programs = capabilities_of(x.device).tuning.moe_gemv_programs
    each = cdiv(cdiv(inter, max(1, programs // pairs)), ROWS_TOGETHER) * ROWS_TOGETHER
    _gemv_up[(pairs, cdiv(inter, each))](
        x, ids, *gate_up[:3], x if packed.gate_up_bias is None else packed.gate_up_bias, inner,
        hidden, inter, each, gate_up.scales.stride(0), k, activation, gate_up.num_chunks,
        packed.has_bias, gate_up.group, has_ptx(),
        num_warps=_warps_for(hidden, gate_up.group), **launch_options(),
    )  # fmt: skip
    _gemv_down[(cdiv(hidden, DOWN_ROWS), num_tokens)](
        inner, ids, weights, *down[:3], x if packed.down_bias is None else packed.down_bias, out,
        hidden, inter, down.scales.stride(0), k, DOWN_ROWS, down.num_chunks, packed.has_bias, down.group, has_ptx(),
        num_warps=_warps_for(inter * DOWN_ROWS, down.group), **launch_options(),
    )  # fmt: skip
    return out


def _warps_for(num_columns: int, group: int) -> int:
    """Return enough warps that a thread's part fits in registers; forms other than MXFP4 were never timed."""
    each = {MX_GROUP: 2048, NV_GROUP: 1024, FP8_GROUP: 512}[group]
    return max(1, min(8, next_power_of_2(num_columns) // each))
