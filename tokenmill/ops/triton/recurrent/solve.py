"""The solve step of `chunks.py` for one decay per value head, for all segments in parallel."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import CHUNK, key_head_of, step_of
from tokenmill.ops.triton.recurrent.segments import (
    HALF,
    load_keys,
    load_queries,
    store_solution,
    store_tile,
    tokens_of,
)


@triton.jit
def _steps_of(
    part, projected, numbers, decays, head, VALUE_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Return the tokens' decays g (0 for tokens of earlier steps), strengths, and decays from cells."""
    _, is_before, is_own, in_block, block, tokens = part
    rates, step_bias, step_scale, min_step, max_step = numbers
    step_inputs = projected + tokens * WIDTH + WIDTH - VALUE_HEADS + head
    own_step = tl.load(step_inputs, mask=is_own, other=0.0)
    g, strength = step_of(own_step, head, head, rates, step_bias, step_scale, min_step, max_step)
    if IS_DELTA:
        strength = tl.sigmoid(tl.load(step_inputs - VALUE_HEADS, mask=is_own, other=0.0).to(tl.float32))
    cells = decays + (block * BLOCK_SIZE + in_block) * VALUE_HEADS + head
    return tl.where(is_own, g, 0.0), strength, tl.load(cells, mask=is_before, other=0.0)


@triton.jit
def _keep_steps(
    part, decay, strength, decays, step_decays, strengths, head, VALUE_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    _, _, is_own, in_block, block, tokens = part
    cells = decays + (block * BLOCK_SIZE + in_block) * VALUE_HEADS + head
    tl.store(cells, decay, mask=is_own & (block > 0))
    tl.store(step_decays + tokens * VALUE_HEADS + head, decay, mask=is_own)
    tl.store(strengths + tokens * VALUE_HEADS + head, strength, mask=is_own)


@triton.jit
def _faded(rows, decay_of_rows, columns, decay_of_columns):
    """Return e^{G_t - G_j} for j <= t, else 0."""
    since = decay_of_rows[:, None] - decay_of_columns[None, :]
    return tl.where(rows[:, None] >= columns[None, :], tl.exp(tl.minimum(since, 0.0)), 0.0)


@kernel_unspecialized("cell_stride")
def solve(
    projected, rates, step_bias, convolved, keys, decays, cell_tables, segments, solved, mixed, step_decays, strengths,
    cell_stride, step_scale, min_step, max_step, IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    IS_TILED: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Solve a chunk in halves of 32 tokens, by one warp, whose reductions need no shared memory."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + (2 * VALUE_HEADS if IS_DELTA else VALUE_HEADS)
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, own_segment = tl.program_id(0), segments + tl.program_id(1) * 4
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    segment = (tl.load(own_segment + 1), tl.load(own_segment + 2), tl.load(own_segment + 3).to(tl.int64))
    at, table = segment[0] % CHUNK, cell_tables + tl.load(own_segment) * cell_stride
    upper, lower = tokens_of(0, segment, table, HALF, BLOCK_SIZE), tokens_of(HALF, segment, table, HALF, BLOCK_SIZE)
    i, j = upper[0], lower[0]
    numbers = (rates, step_bias, step_scale, min_step, max_step)
    g0, strength0, known0 = _steps_of(upper, projected, numbers, decays, head, VALUE_HEADS, WIDTH, BLOCK_SIZE, IS_DELTA)
    g1, strength1, known1 = _steps_of(lower, projected, numbers, decays, head, VALUE_HEADS, WIDTH, BLOCK_SIZE, IS_DELTA)
    last = tl.sum(tl.where(i == at - 1, known0, 0.0), axis=0) + tl.sum(tl.where(j == at - 1, known1, 0.0), axis=0)
    decay0 = tl.where(upper[1], known0, last + tl.cumsum(g0, axis=0))
    decay1 = tl.where(lower[1], known1, last + tl.sum(g0, axis=0) + tl.cumsum(g1, axis=0))
    _keep_steps(upper, decay0, strength0, decays, step_decays, strengths, head, VALUE_HEADS, BLOCK_SIZE)
    _keep_steps(lower, decay1, strength1, decays, step_decays, strengths, head, VALUE_HEADS, BLOCK_SIZE)

    key0 = tl.trans(load_keys(at, upper, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE))
    key1 = tl.trans(load_keys(at, lower, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE))
    faded00, faded10 = _faded(i, decay0, i, decay0), _faded(j, decay1, i, decay0)
    faded11 = _faded(j, decay1, j, decay1)
    query = load_queries(upper, convolved, key_head, KEY_DIM, CHANNELS)
    store_tile(mixed, tl.dot(query, key0, input_precision=PRECISION) * faded00, upper, 0, head, VALUE_HEADS)
    store_tile(mixed, tl.zeros((HALF, HALF), tl.float32), upper, HALF, head, VALUE_HEADS)
    query = load_queries(lower, convolved, key_head, KEY_DIM, CHANNELS)
    store_tile(mixed, tl.dot(query, key0, input_precision=PRECISION) * faded10, lower, 0, head, VALUE_HEADS)
    store_tile(mixed, tl.dot(query, key1, input_precision=PRECISION) * faded11, lower, HALF, head, VALUE_HEADS)
    if IS_DELTA:
        alike = (
            tl.dot(tl.trans(key0), key0, input_precision=PRECISION) * faded00,
            tl.dot(tl.trans(key1), key0, input_precision=PRECISION) * faded10,
            tl.dot(tl.trans(key1), key1, input_precision=PRECISION) * faded11,
        )
        store_solution(solved, alike, (strength0, strength1), (upper, lower), head, VALUE_HEADS, PRECISION)
