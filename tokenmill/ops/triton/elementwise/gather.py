"""Gathers: rows of tables by token ids or positions, at the start of a step; and reordered columns of activations, for
matrices with act order. Unlike torch's kernels these take part in programmatic dependent launch (`launch/pdl.py`)."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.arch.unproven import is_chosen
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix, rows_of

MAX_SCATTERED = 16  # up to this many rows, single values are read from memory
MAX_WHOLE = 32768  # most columns of a row that is reordered in shared memory


@kernel_unspecialized("num_tokens")
def _pick(tables, numbers, out, num_tokens, length, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token, table = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    source = tables + (table * length + tl.load(numbers + token)) * width
    values = tl.load(source + columns, mask=inside)
    tl.store(out + (table * num_tokens + token) * width + columns, values, mask=inside)


def gather_rows(tables: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    (num_tables, length, width), num_tokens = tables.shape, len(numbers)
    out = tables.new_empty(num_tables, num_tokens, width)
    block = next_power_of_2(width)
    warps = 1 if block <= 256 else 4
    _pick[(num_tokens, num_tables)](
        tables, numbers, out, num_tokens, length, width, block, num_warps=warps, **launch_options()
    )
    return out


@kernel
def _reorder(x, order, out, num_columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    sources = tl.load(order + columns, mask=inside, other=0)  # constant, so it may be read before the wait
    wait_for_previous(OVERLAPS)
    begin = tl.program_id(0).to(tl.int64) * num_columns
    tl.store(out + begin + columns, tl.load(x + begin + sources, mask=inside), mask=inside)


@kernel
def _reorder_whole(x, order, out, num_columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    sources = tl.load(order + columns, mask=inside, other=0)
    wait_for_previous(OVERLAPS)
    begin = tl.program_id(0).to(tl.int64) * num_columns
    row = tl.load(x + begin + columns, mask=inside, other=0.0)
    tl.store(out + begin + columns, tl.gather(row, sources, 0), mask=inside)


def reorder_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [T, columns], order int32 [columns] → x[:, order]. For a few rows each value is read from memory in the new
    order; for more, whole rows are read and reordered in shared memory."""
    x, num_columns = x.contiguous(), x.shape[1]
    out = torch.empty_like(x)
    if len(x) <= MAX_SCATTERED or num_columns > MAX_WHOLE or not is_chosen("gpu_reorder"):
        _reorder[(len(x), cdiv(num_columns, 1024))](x, order, out, num_columns, 1024, num_warps=4, **launch_options())
    else:
        block = next_power_of_2(num_columns)
        _reorder_whole[(len(x),)](x, order, out, num_columns, block, num_warps=8, **launch_options())
    return out


def embed(token_ids: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    if isinstance(weight.packed, PackedIntMatrix):
        return rows_of(weight.packed, token_ids)
    return gather_rows(weight.packed[None], token_ids).squeeze(0)
