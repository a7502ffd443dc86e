"""Rows of tables, by the tokens' ids or positions: what a step begins with. Torch's own kernels would wait until the
one before them has ended, and hold up the one behind."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix, rows_of


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


def embed(token_ids: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    if isinstance(weight.packed, PackedIntMatrix):
        return rows_of(weight.packed, token_ids)
    return gather_rows(weight.packed[None], token_ids).squeeze(0)
