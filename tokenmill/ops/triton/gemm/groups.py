"""Grouped products, one matrix per group: x [T, groups, columns], matrices [groups, rows, columns].

For a few tokens one kernel streams the matrices of all groups; for many it is one batched product of cuBLAS.
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

TOKENS, ROWS, COLUMNS = 16, 32, 128  # per tile
MAX_STREAMED_TOKENS = 32


@kernel_unspecialized("num_tokens")
def _multiply_groups(
    x, matrices, out, num_tokens, num_groups, num_rows, num_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    group = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_token, is_row = tokens < num_tokens, rows < num_rows
    left = x + ((tokens * num_groups + group) * num_columns)[:, None] + columns[None, :]
    right = matrices + ((group * num_rows + rows).to(tl.int64) * num_columns)[:, None] + columns[None, :]
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        inside = (start + columns < num_columns)[None, :]
        factor = tl.load(left + start, mask=is_token[:, None] & inside, other=0.0)
        part = tl.load(right + start, mask=is_row[:, None] & inside, other=0.0)
        sums = tl.dot(factor, tl.trans(part), sums, input_precision=PRECISION)
    target = out + ((tokens * num_groups + group) * num_rows)[:, None] + rows[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


def multiply_groups(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """→ [T, groups * rows]"""
    if len(x) <= MAX_STREAMED_TOKENS:
        return deterministic_multiply_groups(x, matrices)
    return torch.bmm(x.transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1).flatten(1)


def deterministic_multiply_groups(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """The same with an order of summation that does not depend on the number of tokens"""
    (num_tokens, num_groups, num_columns), num_rows = x.shape, matrices.shape[1]
    out = x.new_empty(num_tokens, num_groups * num_rows)
    if num_tokens:
        _multiply_groups[(cdiv(num_rows, ROWS), num_groups, cdiv(num_tokens, TOKENS))](
            x.contiguous(), matrices, out, num_tokens, num_groups, num_rows, num_columns,
            TOKENS, ROWS, COLUMNS, precision_of(x), num_warps=4, num_stages=4, **launch_options(),
        )  # fmt: skip
    return out
