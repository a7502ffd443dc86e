"""The solve step of `chunks.py` for decays per key channel, for all segments in parallel:

    A_tj = β_t Σ_c e^{G_tc - G_jc} k_tc k_jc, j < t            P_tj = Σ_c e^{G_tc - G_jc} q_tc k_jc, j <= t

Between the halves of a chunk these are matrix products: with R, the decays at the start of the second half,
(e^{G_t - R} ∘ k_t)·(e^{R - G_j} ∘ k_j), in which no factor exceeds 1; likewise between the quarters of a half. Within a
quarter each column is summed separately.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import CHUNK, decays_in_cell, everywhere, key_head_of, step_of
from tokenmill.ops.triton.recurrent.segments import (
    HALF,
    load_keys,
    load_queries,
    store_solution,
    store_tile,
    tokens_of,
)

QUARTER = tl.constexpr(16)


@triton.jit
def _keep_decays(
    part, before, projected, numbers, decays, step_decays, strengths, head, VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute and store the cumulative decays G [32, channels] of a half, given those `before` it [channels]; return
    them with the last token's decays and the strengths [32]."""
    _, is_before, is_own, in_block, block, tokens = part
    channels = tl.arange(0, DECAYS)[None, :]
    rates, step_bias, step_scale, min_step, max_step = numbers
    inputs = projected + tokens * WIDTH + WIDTH - VALUE_HEADS * DECAYS
    own_steps = tl.load(inputs[:, None] + head * DECAYS + channels, mask=is_own[:, None], other=0.0)
    g, _ = step_of(
        own_steps, head, (head * DECAYS + tl.arange(0, DECAYS))[None, :], rates, step_bias, step_scale, min_step,
        max_step,
    )  # fmt: skip
    g = tl.where(is_own[:, None], g, 0.0)
    cells = decays_in_cell(decays, block, in_block, head, VALUE_HEADS, DECAYS, BLOCK_SIZE)[:, None] + channels
    known = tl.load(cells, mask=is_before[:, None], other=0.0)
    decay = tl.where(is_before[:, None], known, before[None, :] + tl.cumsum(g, axis=0))
    tl.store(cells, decay, mask=(is_own & (block > 0))[:, None])
    tl.store(step_decays + ((tokens * VALUE_HEADS + head) * DECAYS)[:, None] + channels, decay, mask=is_own[:, None])
    strength = tl.sigmoid(tl.load(inputs - VALUE_HEADS + head, mask=is_own, other=0.0).to(tl.float32))
    tl.store(strengths + tokens * VALUE_HEADS + head, strength, mask=is_own)
    return decay, before + tl.sum(g, axis=0), strength


@triton.jit
def _load_tokens(
    numbers, segment, table, fields, head, key_head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load keys and decays [N, KEY_DIM] of tokens of the segment's chunk, zeros after the last one."""
    position, count, first = segment
    keys, convolved, decays, step_decays = fields
    at, columns = position % CHUNK, tl.arange(0, KEY_DIM)[None, :]
    is_before, is_there = at > numbers, (at + count > numbers)[:, None]
    places = position - at + numbers
    block = tl.load(table + places // BLOCK_SIZE, mask=is_before, other=0).to(tl.int64)
    tokens, in_block = first + numbers - at, places % BLOCK_SIZE
    key_cell = keys + ((block * KEY_HEADS + key_head) * BLOCK_SIZE + in_block) * KEY_DIM
    cell = decays_in_cell(decays, block, in_block, head, VALUE_HEADS, KEY_DIM, BLOCK_SIZE)
    key = tl.where(is_before, key_cell, convolved + tokens * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM)
    decay = tl.where(is_before, cell, step_decays + (tokens * VALUE_HEADS + head) * KEY_DIM)
    found = tl.load(key[:, None] + columns, mask=is_there, other=0.0).to(tl.float32)
    return found, tl.load(decay[:, None] + columns, mask=is_there, other=0.0)


@triton.jit
def _row_of(matrix, row):
    return tl.sum(tl.where((tl.arange(0, HALF) == row)[:, None], matrix, 0.0), axis=0)[None, :]


@triton.jit
def _within(
    begin, key, query, decay, segment, table, fields, head, key_head, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a half's keys and queries [32, KEY_DIM], float32, by its keys: [32, 32] each. Between its quarters these
    are matrix products, within a quarter they are computed by column."""
    number = tl.arange(0, HALF)
    border = _row_of(decay, QUARTER)
    faded = tl.trans(key * tl.exp(tl.minimum(border - decay, 0.0)))
    later = tl.exp(tl.minimum(decay - border, 0.0))
    alike = tl.dot(key * later, faded, input_precision=PRECISION)
    products = tl.dot(query * later, faded, input_precision=PRECISION)
    for other in tl.range(0, QUARTER, loop_unroll_factor=4):
        columns = number // QUARTER * QUARTER + other
        k, since = _load_tokens(
            columns + begin, segment, table, fields, head, key_head, KEY_HEADS, VALUE_HEADS, KEY_DIM, CHANNELS,
            BLOCK_SIZE,
        )  # fmt: skip
        k *= tl.exp(tl.minimum(decay - since, 0.0))
        is_column = number[None, :] == columns[:, None]
        alike = tl.where(is_column, tl.sum(key * k, axis=1)[:, None], alike)
        products = tl.where(is_column, tl.sum(query * k, axis=1)[:, None], products)
    return alike, tl.where(number[:, None] >= number[None, :], products, 0.0)


@kernel_unspecialized("cell_stride")
def solve_channels(
    projected, rates, step_bias, convolved, keys, decays, cell_tables, segments, solved, mixed, step_decays, strengths,
    cell_stride, step_scale, min_step, max_step, IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    IS_TILED: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Solve a chunk in halves of 32 tokens."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * (VALUE_DIM + DECAYS + 1)
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, own_segment = tl.program_id(0), segments + tl.program_id(1) * 4
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    segment = (tl.load(own_segment + 1), tl.load(own_segment + 2), tl.load(own_segment + 3).to(tl.int64))
    at, table = segment[0] % CHUNK, cell_tables + tl.load(own_segment) * cell_stride
    upper, lower = tokens_of(0, segment, table, HALF, BLOCK_SIZE), tokens_of(HALF, segment, table, HALF, BLOCK_SIZE)
    numbers, channels = (rates, step_bias, step_scale, min_step, max_step), tl.arange(0, DECAYS)
    last = tl.maximum(segment[0] - 1, 0)
    block = tl.load(table + last // BLOCK_SIZE, mask=at > 0, other=0).to(tl.int64)
    cell = decays_in_cell(decays, block, last % BLOCK_SIZE, head, VALUE_HEADS, DECAYS, BLOCK_SIZE)
    before = tl.load(cell + channels, mask=everywhere(at > 0, channels), other=0.0)
    decay0, before, strength0 = _keep_decays(
        upper, before, projected, numbers, decays, step_decays, strengths, head, VALUE_HEADS, WIDTH, DECAYS, BLOCK_SIZE
    )
    decay1, _, strength1 = _keep_decays(
        lower, before, projected, numbers, decays, step_decays, strengths, head, VALUE_HEADS, WIDTH, DECAYS, BLOCK_SIZE
    )
    tl.debug_barrier()  # threads read what others have stored
    fields = (keys, convolved, decays, step_decays)

    key0 = load_keys(at, upper, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE).to(tl.float32)
    query = load_queries(upper, convolved, key_head, KEY_DIM, CHANNELS).to(tl.float32)
    alike00, products = _within(
        0, key0, query, decay0, segment, table, fields, head, key_head, KEY_HEADS, VALUE_HEADS, KEY_DIM, CHANNELS,
        BLOCK_SIZE, PRECISION,
    )  # fmt: skip
    store_tile(mixed, products, upper, 0, head, VALUE_HEADS)
    store_tile(mixed, tl.zeros((HALF, HALF), tl.float32), upper, HALF, head, VALUE_HEADS)

    key1 = load_keys(at, lower, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE).to(tl.float32)
    query = load_queries(lower, convolved, key_head, KEY_DIM, CHANNELS).to(tl.float32)
    alike11, products = _within(
        HALF, key1, query, decay1, segment, table, fields, head, key_head, KEY_HEADS, VALUE_HEADS, KEY_DIM, CHANNELS,
        BLOCK_SIZE, PRECISION,
    )  # fmt: skip
    store_tile(mixed, products, lower, HALF, head, VALUE_HEADS)
    border = _row_of(decay1, 0)
    faded0, faded1 = key0 * tl.exp(tl.minimum(border - decay0, 0.0)), tl.exp(tl.minimum(decay1 - border, 0.0))
    between = tl.dot(query * faded1, tl.trans(faded0), input_precision=PRECISION)
    store_tile(mixed, between, lower, 0, head, VALUE_HEADS)
    alike10 = tl.dot(key1 * faded1, tl.trans(faded0), input_precision=PRECISION)
    alike = (alike00, alike10, alike11)
    store_solution(solved, alike, (strength0, strength1), (upper, lower), head, VALUE_HEADS, PRECISION)
