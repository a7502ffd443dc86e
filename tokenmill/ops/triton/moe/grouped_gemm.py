"""Routed experts for any number of tokens, without the host knowing which experts were chosen.

For a few tokens each (token, expert) pair streams its expert's matrices. For more tokens, pairs are sorted by expert
and multiplied in tiles: a grouped GEMM (`moe/pairs.py`).

Floats of 4 and 8 bits have their own kernels (`moe/small_floats.py`). Packed integers are expanded in registers, as in
split-K; if experts have very many pairs, the matrices of some experts at a time are expanded in memory first
(`moe/select.py`). `deterministic_experts` uses one tile configuration and adds a token's experts in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight
from tokenmill.ops.triton.elementwise.activation import act, act_mul
from tokenmill.ops.triton.gemm.cublas import expanded_rows
from tokenmill.ops.triton.gemm.splitk import packed_tile_sums
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, precision_of
from tokenmill.ops.triton.moe.gemv import kind_of, moe_gemv_chosen
from tokenmill.ops.triton.moe.pairs import SortedPairs, expert_of_tile, sort_pairs
from tokenmill.ops.triton.moe.select import num_expanded, streams_experts
from tokenmill.ops.triton.moe.small_floats import grouped_fp4, grouped_fp8
from tokenmill.ops.triton.quant.fp4 import Fp4Matrix
from tokenmill.ops.triton.quant.packed_int import has_ptx
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix, PackedIntMatrix


class GroupedConfig(NamedTuple):
    """The tile configuration: sorted pairs, matrix rows, and columns per iteration."""

    pairs: int
    columns: int
    stride: int
    warps: int
    stages: int


@kernel
def _moe_grouped_gemm_int(
    x, words, scales, bias, out, order, offsets, weights, num_out, num_in, num_experts,
    K: tl.constexpr, TILE: tl.constexpr, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, IS_GATHERED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PTX: tl.constexpr,
) -> None:  # fmt: skip
    """IS_GATHERED: rows of x are tokens, rows of out sorted pairs; else x has sorted pairs, and out weighted pairs.
    Rows and pairs beyond the last are clamped, so that loads need no mask."""
    expert, first, end = expert_of_tile(offsets, num_experts, TILE)
    if first < end:
        row_words = num_in * BITS // 32
        indices = first + tl.arange(0, TILE)
        is_pair = indices < end
        clamped = tl.minimum(indices, end - 1)
        pairs = tl.load(order + clamped)
        sources = pairs // K if IS_GATHERED else clamped
        columns = tl.arange(0, WORDS)
        matrix_rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        rows = tl.cast(expert, tl.int64) * num_out + matrix_rows % num_out
        sums = packed_tile_sums(
            words + rows[:, None] * row_words + columns[None, :],
            x + sources.to(tl.int64)[:, None] * num_in + columns[None, :],
            scales + rows, num_experts * num_out, 0, row_words, TILE, BLOCK_ROWS, WORDS, GROUP, BITS, HAS_PTX,
        )  # fmt: skip
        if HAS_BIAS:
            sums += tl.load(bias + rows)[:, None]
        if IS_GATHERED:
            targets = indices
        else:
            sums *= tl.load(weights + pairs)[None, :]
            targets = pairs
        out_ptrs = out + targets.to(tl.int64)[None, :] * num_out + matrix_rows[:, None]
        tl.store(out_ptrs, sums.to(out.dtype.element_ty), mask=is_pair[None, :] & (matrix_rows < num_out)[:, None])


def moe_grouped_gemm_int(
    x: torch.Tensor, matrix: PackedIntMatrix, pairs: SortedPairs, *, is_gathered: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply pairs by a matrix of all experts' rows, stacked → [pairs, num_out]."""
    num_experts, num_pairs = pairs.num_experts, len(pairs.order)
    num_out = len(matrix.words) // num_experts
    tile, block_rows, warps, stages = pick_grouped_int_config(num_pairs / num_experts)
    out = x.new_empty(num_pairs, num_out)
    _moe_grouped_gemm_int[(num_pairs // tile + num_experts, cdiv(num_out, block_rows))](
        x, matrix.words, matrix.scales, x if bias is None else bias, out, pairs.order, pairs.offsets, pairs.weights,
        num_out, matrix.num_columns, num_experts, pairs.k, tile, block_rows, matrix.interleave, matrix.group,
        matrix.bits, is_gathered, bias is not None, has_ptx(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def pick_grouped_int_config(pairs_each: float) -> tuple[int, int, int, int]:
    """Return pairs, matrix rows, warps and stages: mostly one tile per expert, so that its matrices are expanded
    once."""
    if pairs_each <= 4:
        return 8, 64, 4, 3
    return (32, 64, 4, 3) if pairs_each <= 16 else (64, 128, 8, 2)


@kernel_unspecialized("num_experts")
def _grouped(
    x, matrices, bias, out, order, offsets, weights, num_out, num_in, num_experts,
    K: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    IS_GATHERED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, IS_PART: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply tiles of sorted pairs by their expert's matrix [num_out, num_in].

    IS_GATHERED: rows of x are tokens, rows of out sorted pairs; else x has sorted pairs, and out weighted pairs.
    """
    expert, first, end = expert_of_tile(offsets, num_experts, TILE, IS_PART)
    if first < end:
        indices = first + tl.arange(0, TILE)
        is_pair = indices < end
        pairs = tl.load(order + indices, mask=is_pair, other=0)
        sources = pairs // K if IS_GATHERED else indices
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < num_out
        strides = tl.arange(0, STRIDE)
        matrix = matrices + tl.cast(expert, tl.int64) * num_out * num_in
        x_ptrs = x + sources.to(tl.int64)[:, None] * num_in + strides[None, :]
        matrix_rows = matrix + columns[:, None] * num_in + strides[None, :]
        sums = tl.zeros((TILE, COLUMNS), tl.float32)
        for start in range(0, num_in, STRIDE):
            inside = (start + strides < num_in)[None, :]
            left = tl.load(x_ptrs + start, mask=is_pair[:, None] & inside, other=0.0)
            right = tl.load(matrix_rows + start, mask=is_column[:, None] & inside, other=0.0)
            sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
        if HAS_BIAS:
            own = bias + tl.cast(expert, tl.int64) * num_out
            sums += tl.load(own + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATHERED:
            targets = indices
        else:
            sums *= tl.load(weights + pairs, mask=is_pair, other=0.0)[:, None]
            targets = pairs
        out_ptrs = out + targets.to(tl.int64)[:, None] * num_out + columns[None, :]
        tl.store(out_ptrs, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    is_few = packed.is_gated and packed.gather_inner is None
    is_few = is_few and streams_experts(len(x), kind_of(packed), capabilities_of(x.device), is_fused=False)
    if is_few:
        return moe_gemv_chosen(x.contiguous(), weights, ids, packed, activation)
    tile = pick_grouped_config(ids.numel() / packed.num_experts, x.dtype)
    return sorted_experts(x.contiguous(), weights, ids, packed, activation, tile).sum(dim=1)


def sorted_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: ExpertsWeight,
    activation: Activation,
    tile: GroupedConfig,
) -> torch.Tensor:
    """Return the weighted result of each choice, [T, k, H]."""
    gate_up, down = packed.packed
    pairs = sort_pairs(weights, ids, packed.num_experts)
    if not packed.is_gated:
        inner = act(multiply_pairs(x, gate_up, pairs, tile, packed.gate_up_bias, is_gathered=True), activation)
    elif isinstance(gate_up, Fp8BlockMatrix):
        inner = grouped_fp8(x, gate_up, pairs, is_gathered=True, bias=packed.gate_up_bias, activation=activation)
    elif isinstance(gate_up, Fp4Matrix) and not _num_expanded(x, gate_up, pairs):
        inner = grouped_fp4(x, gate_up, pairs, is_gathered=True, bias=packed.gate_up_bias, activation=activation)
    else:
        inner = act_mul(multiply_pairs(x, gate_up, pairs, tile, packed.gate_up_bias, is_gathered=True), activation)
    inner = inner if packed.gather_inner is None else packed.gather_inner(inner)
    result = multiply_pairs(inner, down, pairs, tile, packed.down_bias, is_gathered=False)
    return (result if packed.gather_out is None else packed.gather_out(result)).view(*ids.shape, -1)


Packed = PackedIntMatrix | Fp4Matrix
Matrices = torch.Tensor | Packed | Fp8BlockMatrix | tuple[torch.Tensor | Packed | Fp8BlockMatrix, ...]
"""The matrices of all experts: unquantised [experts, num_out, num_in]; packed, with their rows stacked; or a tuple of
gate and up, if their forms differ"""


def multiply_pairs(
    x: torch.Tensor,
    matrices: Matrices,
    pairs: SortedPairs,
    tile: GroupedConfig,
    bias: torch.Tensor | None,
    *,
    is_gathered: bool,
) -> torch.Tensor:
    """→ [pairs, num_out], sorted by expert if tokens are gathered, else in the original order; bias [experts,
    num_out]"""
    if isinstance(matrices, tuple):
        biases = (None,) * len(matrices) if bias is None else bias.chunk(len(matrices), dim=1)
        parts = zip(matrices, biases, strict=True)
        return torch.cat(
            [multiply_pairs(x, one, pairs, tile, own, is_gathered=is_gathered) for one, own in parts], dim=1
        )
    bias = None if bias is None else bias.contiguous()
    if isinstance(matrices, Fp8BlockMatrix):
        return grouped_fp8(x, matrices, pairs, is_gathered=is_gathered, bias=bias)
    if not isinstance(matrices, torch.Tensor):
        if count := _num_expanded(x, matrices, pairs):
            return _multiply_expanded(x, matrices, pairs, tile, bias, count, is_gathered=is_gathered)
        if isinstance(matrices, Fp4Matrix):
            return grouped_fp4(x, matrices, pairs, is_gathered=is_gathered, bias=bias)
        return moe_grouped_gemm_int(x, matrices, pairs, is_gathered=is_gathered, bias=bias)
    out = x.new_empty(len(pairs.order), matrices.shape[1])
    _launch(x, matrices, out, pairs, tile, bias, is_gathered=is_gathered)
    return out


def _num_expanded(x: torch.Tensor, matrix: Packed, pairs: SortedPairs) -> int:
    expert_bytes = len(matrix.words) // pairs.num_experts * matrix.num_columns * x.element_size()
    is_fp4, gpu = isinstance(matrix, Fp4Matrix), capabilities_of(x.device)
    return num_expanded(len(pairs.order), pairs.num_experts, expert_bytes, gpu, is_fp4=is_fp4)


def _multiply_expanded(
    x: torch.Tensor,
    matrix: Packed,
    pairs: SortedPairs,
    tile: GroupedConfig,
    bias: torch.Tensor | None,
    count: int,
    *,
    is_gathered: bool,
) -> torch.Tensor:
    num_out = len(matrix.words) // pairs.num_experts
    out = x.new_empty(len(pairs.order), num_out)
    for first in range(0, pairs.num_experts, count):
        matrix_rows = slice(first * num_out, (first + count) * num_out)
        some = expanded_rows(matrix, matrix_rows, x.dtype).view(-1, num_out, matrix.num_columns)
        own = None if bias is None else bias[first:]
        _launch(x, some, out, pairs._replace(offsets=pairs.offsets[first:]), tile, own, is_gathered=is_gathered)
    return out


def _launch(
    x: torch.Tensor,
    matrices: torch.Tensor,
    out: torch.Tensor,
    pairs: SortedPairs,
    tile: GroupedConfig,
    bias: torch.Tensor | None,
    *,
    is_gathered: bool,
) -> None:
    """Compute the rows of `out` of the experts whose matrices these are, the first of `pairs.offsets`."""
    num_experts, num_out, num_in = matrices.shape
    grid = (len(pairs.order) // tile.pairs + num_experts, cdiv(num_out, tile.columns))
    _grouped[grid](
        x, matrices, x if bias is None else bias, out, pairs.order, pairs.offsets, pairs.weights, num_out, num_in,
        num_experts, pairs.k, tile.pairs, tile.columns, tile.stride, is_gathered, bias is not None, precision_of(x),
        num_experts < pairs.num_experts,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def pick_grouped_config(pairs_per_expert: float, dtype: torch.dtype) -> GroupedConfig:
    if dtype == torch.float32:
        return GroupedConfig(16, 32, 32, 4, 2)
    if pairs_per_expert <= 16:
        return GroupedConfig(16, 64, 128, 4, 4)
    return GroupedConfig(64, 128, 64, 4, 4) if pairs_per_expert <= 128 else GroupedConfig(128, 128, 64, 8, 3)


DETERMINISTIC_TILE = GroupedConfig(64, 128, 64, 4, 4)
DETERMINISTIC_TILE_F32 = GroupedConfig(16, 32, 32, 4, 2)


@kernel
def _add_choices(pairs, out, size, K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        total += tl.load(pairs + (token * K + choice) * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


def deterministic_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    tile = deterministic_tile(x.dtype)
    return add_choices(sorted_experts(x.contiguous(), weights, ids, packed, activation, tile))


def deterministic_tile(dtype: torch.dtype) -> GroupedConfig:
    return DETERMINISTIC_TILE_F32 if dtype == torch.float32 else DETERMINISTIC_TILE


def add_choices(pairs: torch.Tensor) -> torch.Tensor:
    """Sum the results of the choices, [T, k, H] → [T, H], in a fixed order."""
    num_tokens, k, size = pairs.shape
    out = pairs.new_empty(num_tokens, size)
    _add_choices[(num_tokens, cdiv(size, 1024))](pairs, out, size, k, 1024, num_warps=4)
    return out
