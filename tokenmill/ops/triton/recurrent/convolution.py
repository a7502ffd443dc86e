"""The convolution before the recurrence of prompts: q, k and v of all tokens of a step, one program per segment and
head.

It also caches what later steps read: inputs and keys in cells, and the last inputs before a state in its tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import CHUNK, everywhere, input_rows, silu, unit
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.sizes import Sizes


@triton.jit
def _convolve_head(
    segment, row, sources, taps, channels, convolved, target, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr, TAPS_PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_UNIT: tl.constexpr,
):  # fmt: skip
    """Compute q, k or v of a head, rounded as in the cache, [64, D]; also return the tokens' positions and blocks of
    cells, 0 if nothing is cached."""
    position, count, _ = segment
    weight, bias = taps
    conv_inputs, tails, table, state_table = target
    number = tl.arange(0, CHUNK)
    inside, at = number < count, position + number
    total = tl.zeros((CHUNK, channels.shape[0]), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels)[None, :]
    first, start, _, _ = row
    projected, _, _ = sources
    offsets = ((first + at - start).to(tl.int64) * WIDTH)[:, None] + channels[None, :]
    for tap in tl.static_range(KERNEL):
        back = KERNEL - 1 - tap
        in_step = inside & (at - back >= start)
        value = tl.load(projected + (offsets - back * WIDTH), mask=in_step[:, None], other=0.0)
        if position - back < start:  # the first tokens of a row also read inputs of earlier steps
            before, exists = input_rows(at - back, row, sources, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
            is_earlier = inside & exists & (at - back < start)
            value += tl.load(before[:, None] + channels[None, :], mask=is_earlier[:, None], other=0.0)
        total += tl.load(weight + channels * KERNEL + tap)[None, :] * value.to(tl.float32)
    result = silu(total)
    if IS_UNIT:
        result = unit(result, 1)
    block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    is_kept = inside & (block > 0)
    own = tl.load(projected + offsets, mask=is_kept[:, None], other=0.0)
    cells = conv_inputs + (block * BLOCK_SIZE + at % BLOCK_SIZE) * CHANNELS
    tl.store(cells[:, None] + channels[None, :], own, mask=is_kept[:, None])
    end = position + count
    slot = tl.load(state_table + tl.maximum(end // CHUNK - 1, 0), mask=end % CHUNK == 0, other=0).to(tl.int64)
    if slot > 0:
        numbers = tl.arange(0, TAPS_PADDED)
        in_tail = numbers < KERNEL - 1
        tail_at = end - (KERNEL - 1) + numbers
        last_inputs, is_there = input_rows(tail_at, row, sources, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
        last = tl.load(last_inputs[:, None] + channels[None, :], mask=(in_tail & is_there)[:, None], other=0.0)
        tail = tails + (slot * (KERNEL - 1) + numbers) * CHANNELS
        tl.store(tail[:, None] + channels[None, :], last, mask=in_tail[:, None])
    return result, at, block


@kernel_unspecialized("cell_stride", "state_stride")
def _convolve_segments(
    projected, conv_weight, conv_bias, conv_inputs, keys, tails, cell_tables, state_tables, query_starts, contexts,
    segments, convolved, cell_stride, state_stride, IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, DECAYS: tl.constexpr, TAPS_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * (VALUE_DIM + DECAYS + (1 if IS_DELTA else 0))
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    number, head = tl.program_id(0), tl.program_id(1)
    own = segments + number * 4
    row_number = tl.load(own)
    segment = (tl.load(own + 1), tl.load(own + 2), tl.load(own + 3).to(tl.int64))
    first = tl.load(query_starts + row_number)
    start = tl.load(contexts + row_number) - (tl.load(query_starts + row_number + 1) - first)
    cell_table, state_table = cell_tables + row_number * cell_stride, state_tables + row_number * state_stride
    entry = tl.maximum(start // CHUNK - 1, 0)
    slot = tl.load(state_table + entry, mask=start >= CHUNK, other=0).to(tl.int64)
    row = (first, start, cell_table, slot)
    sources, taps = (projected, conv_inputs, tails), (conv_weight, conv_bias)
    target = (conv_inputs, tails, cell_table, state_table)
    tokens = tl.arange(0, CHUNK)
    out_rows = convolved + (segment[2] + tokens) * CHANNELS
    inside = tokens < segment[1]
    if head < 2 * KEY_HEADS:
        channels = head * KEY_DIM + tl.arange(0, KEY_DIM)
        vectors, at, block = _convolve_head(
            segment, row, sources, taps, channels, convolved, target, WIDTH, CHANNELS, KERNEL, TAPS_PADDED, HAS_BIAS,
            BLOCK_SIZE, IS_DELTA,
        )  # fmt: skip
        if IS_DELTA:
            vectors = tl.where(head < KEY_HEADS, vectors * (KEY_DIM**-0.5), vectors)
        rounded = vectors.to(keys.dtype.element_ty)
        tl.store(out_rows[:, None] + channels[None, :], rounded, mask=inside[:, None])
        is_kept = inside & (block > 0) & everywhere(head >= KEY_HEADS, tokens)
        cells = ((block * KEY_HEADS + head - KEY_HEADS) * BLOCK_SIZE + at % BLOCK_SIZE) * KEY_DIM
        tl.store(keys + cells[:, None] + tl.arange(0, KEY_DIM)[None, :], rounded, mask=is_kept[:, None])
    else:
        value_channels = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        values, _, _ = _convolve_head(
            segment, row, sources, taps, value_channels, convolved, target, WIDTH, CHANNELS, KERNEL, TAPS_PADDED,
            HAS_BIAS, BLOCK_SIZE, False,
        )  # fmt: skip
        rounded_values = values.to(convolved.dtype.element_ty)
        tl.store(out_rows[:, None] + value_channels[None, :], rounded_values, mask=inside[:, None])


def convolve_segments(
    projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentBatch, args: RecurrentArgs
) -> torch.Tensor:
    """Compute q, k and v [T, channels] of the tokens in segments; those of other tokens are not written."""
    spec, sizes, segments = args.spec, Sizes.of(args), plan.segments
    assert segments is not None
    convolved = projected.new_empty(len(projected), spec.conv_size)
    _convolve_segments[(len(segments), 2 * spec.key_heads + spec.value_heads)](
        projected, args.weights.conv, sizes.or_any(args.weights.conv_bias), cache.conv_inputs, cache.keys, cache.tails,
        plan.cells, plan.states, plan.query_starts, plan.contexts, segments, convolved, plan.cells.stride(0),
        plan.states.stride(0), *sizes.shapes, next_power_of_2(max(1, spec.kernel - 1)), plan.block_size,
        num_warps=8, **launch_options(),
    )  # fmt: skip
    return convolved
