"""Split-K products of a few rows with matrices of table codes (`packed_table.py`), where the Hopper kernel
(`hopper_gemm_fp4.py`) is not available: the matrix is the left factor, its values are looked up in registers, and
columns are split until every multiprocessor has work."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.gemm.product import GemmKernel
from tokenmill.ops.triton.gemm.splitk import SplitKConfig, join_splits, split_of_tile, store_tile
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, room_for_splits, wait_for_previous
from tokenmill.ops.triton.quant.gemm_fp4 import pick_fp4_config
from tokenmill.ops.triton.quant.packed_table import SPAN_WORDS, TableMatrix, code_columns, scale_columns, value_of


@kernel_unspecialized("num_rows")
def _splitk_table(
    x, weight, scales, table, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one span per iteration."""
    launch_dependents(OVERLAPS)
    row_words = num_in // 8
    matrix_tile, matrix_rows, low, high = split_of_tile(row_words, TILE_N, SPAN_WORDS, SPLITS)
    rows, read = tl.arange(0, ROWS), (matrix_rows % num_out).to(tl.int64)[:, None]
    matrix = weight + read * row_words + tl.arange(0, SPAN_WORDS)[None, :]
    own = scales + read * (num_in // GROUP) + scale_columns(GROUP)[None, :]
    inputs = x + (rows % num_rows)[:, None] * num_in + code_columns()[None, :]
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TILE_N, ROWS), tl.float32)
    for start in range(low, high, SPAN_WORDS):
        words, scale = tl.load(matrix + start), tl.load(own + 8 * start // GROUP).to(tl.float32)
        for i in tl.static_range(8):
            right = tl.trans(tl.load(inputs + 8 * start + i // 2 * 8 + i % 2))
            left = (value_of(words, table, i) * scale).to(right.dtype)
            sums = tl.dot(left, right, sums, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        sums, is_last = join_splits(sums, parts, arrived, matrix_tile, TILE_N, ROWS, SPLITS)
    if is_last:
        store_tile(sums, bias, out, matrix_rows, rows, num_rows, num_out, HAS_BIAS)


def splitk_table_linear(
    x: torch.Tensor, matrix: TableMatrix, bias: torch.Tensor | None, config: SplitKConfig, _dtype: object = None
) -> torch.Tensor:
    """x [rows, num_in], matrix [num_out, num_in] → [rows, num_out]"""
    x = x.contiguous()
    (num_rows, num_in), num_out = x.shape, len(matrix.words)
    padded, matrix_tiles = max(16, next_power_of_2(num_rows)), cdiv(num_out, config.tile_n)
    out = x.new_empty(num_rows, num_out)
    parts, arrived = room_for_splits(matrix_tiles, config.splits, config.tile_n * padded, out)
    _splitk_table[(matrix_tiles, config.splits)](
        x, matrix.words, matrix.scales, matrix.table, bias if bias is not None else x, out, parts, arrived,
        num_rows, num_out, num_in, padded, config.tile_n, config.splits, bias is not None, matrix.group,
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out


SPLITK_TABLE = GemmKernel(pick_fp4_config, splitk_table_linear)
