"""The gated short convolution of a step in one kernel.

A program computes some channels of one token. It writes the token's input b * x to the cache and sums the inputs of the
last tokens. Those of this step are recomputed from the projection, rounded as in the cache; those of earlier steps are
read from the cache. So no program reads what another one writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

_BLOCK = 512


@dataclass(frozen=True)
class ShortConvPlan:
    tables: torch.Tensor  # int32 [R, max_blocks]
    slots: torch.Tensor  # int64 [T]
    query_starts: torch.Tensor  # int32 [R + 1]
    contexts: torch.Tensor  # int32 [R]
    num_single: int  # rows [0, num_single) have one token each
    block_size: int


def plan_short_conv(batch: ForwardBatch, group: int, kernel: int) -> ShortConvPlan:
    num_rows = batch.context_lens.shape[0]
    return ShortConvPlan(
        tables=batch.groups[group].block_tables,
        slots=batch.groups[group].slots,
        query_starts=batch.query_starts,
        contexts=batch.context_lens,
        num_single=num_rows if batch.max_query_len == 1 else batch.num_single,
        block_size=batch.block_size,
    )


@triton.jit
def _gated_input(projected, token, columns, inside, WIDTH: tl.constexpr):
    """Compute a token's b * x in float32, rounded as in the cache."""
    start = projected + token * 3 * WIDTH + columns
    b = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(start + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)
    return (b * x).to(projected.dtype.element_ty)


@kernel_unspecialized("slots", "table_stride", "num_single", "num_rows", "search_steps")
def _short_conv(
    projected, inputs, weight, bias, tables, slots, query_starts, contexts, out, table_stride, num_single, num_rows,
    search_steps, WIDTH: tl.constexpr, KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    # The token's row: the last one that does not begin after it.
    low = tl.minimum(token, num_single).to(tl.int32)
    high = tl.where(token < num_single, low, num_rows - 1)
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        begins_before = tl.load(query_starts + middle) <= token
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle - 1)
    first, end = tl.load(query_starts + low), tl.load(query_starts + low + 1)
    position = tl.load(contexts + low) - (end - token)
    own = _gated_input(projected, token, columns, inside, WIDTH)
    slot = tl.load(slots + token)
    tl.store(inputs + slot * WIDTH + columns, own, mask=inside)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    table = tables + low.to(tl.int64) * table_stride
    steps_back = (token - first) + tl.zeros((BLOCK,), tl.int64)  # tokens of this step before it
    all_back = position + tl.zeros((BLOCK,), tl.int64)  # tokens of its sequence before it
    for tap in tl.static_range(KERNEL - 1):
        back = KERNEL - 1 - tap
        in_step = steps_back >= back
        in_cache = (steps_back < back) & (all_back >= back)
        here = _gated_input(projected, token - back, columns, inside & in_step, WIDTH)
        at = tl.maximum(position - back, 0)
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        line = inputs + (block * BLOCK_SIZE + at % BLOCK_SIZE) * WIDTH
        before = tl.load(line + columns, mask=inside & in_cache, other=0.0)
        value = tl.where(in_step, here.to(tl.float32), before.to(tl.float32))
        total += tl.load(weight + columns * KERNEL + tap, mask=inside, other=0.0) * value
    total += tl.load(weight + columns * KERNEL + KERNEL - 1, mask=inside, other=0.0) * own.to(tl.float32)
    c = tl.load(projected + token * 3 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, (c * total).to(out.dtype.element_ty), mask=inside)


def short_conv(
    projected: torch.Tensor,
    inputs: torch.Tensor,
    plan: ShortConvPlan,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, width = projected.shape[0], inputs.shape[-1]
    num_rows = plan.contexts.shape[0]
    out = projected.new_empty(num_tokens, width)
    if num_tokens:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _short_conv[(num_tokens, cdiv(width, block))](
            projected, inputs, weight, weight if bias is None else bias, plan.tables, plan.slots, plan.query_starts,
            plan.contexts, out, plan.tables.stride(0), plan.num_single, num_rows,
            (num_rows - plan.num_single).bit_length(), width, weight.shape[1], bias is not None, plan.block_size,
            block, num_warps=4, **launch_options(),
        )  # fmt: skip
    return out
