"""Recurrent mixers token by token: decode steps, and prompts with --deterministic.

    prepare   one program per token and head: convolution, q, k, v, decay and step; caches inputs and keys
    recur     one program per row and some values of a head: its tokens sequentially, with the state in registers

Tokens since the last multiple of 64 are read from cells, or, if they belong to this step, from buffers with the cells'
precision. So a token's result is computed in the same order whatever step it belongs to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import (
    CHUNK,
    decays_in_cell,
    decays_of,
    everywhere,
    input_rows,
    key_head_of,
    silu,
    step_of,
)
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.sizes import Sizes, step_numbers

RECUR = {"num_warps": 4}
MAX_VALUES = 64  # values of a head per program of `recur`
TILE = tl.constexpr(32)  # tokens of the chunk per iteration
AT_ONCE = tl.constexpr(4)  # tokens that are added to a state before the next ones are loaded


# ── before the recurrence ──────────────────────────────────────────────────────────────────────────────


@triton.jit
def _convolve_token(
    position, row, sources, taps, channels, target, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute silu of the convolution at a position, float32. Cache its input in its cell, and, if a state is written
    after it, the last inputs in that state's tail."""
    weight, bias = taps
    conv_inputs, tails, block, slot = target
    total = tl.zeros(channels.shape, tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels)
    for tap in tl.static_range(KERNEL):
        inputs, exists = input_rows(position - (KERNEL - 1 - tap), row, sources, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
        value = tl.load(inputs + channels, mask=everywhere(exists, channels), other=0.0)
        total += tl.load(weight + channels * KERNEL + tap) * value.to(tl.float32)
        if tap == KERNEL - 1:
            cell = conv_inputs + (block * BLOCK_SIZE + position % BLOCK_SIZE) * CHANNELS
            tl.store(cell + channels, value, mask=everywhere(block > 0, channels))
        if tap > 0:
            tail = tails + (slot * (KERNEL - 1) + tap - 1) * CHANNELS
            tl.store(tail + channels, value, mask=everywhere(slot > 0, channels))
    return silu(total)


@kernel_unspecialized("cell_stride", "state_stride")
def _prepare_tokens(
    projected, conv_weight, conv_bias, rates, step_bias, conv_inputs, keys, tails, cell_tables, state_tables,
    query_starts, contexts, owners, step_queries, step_keys, step_values, steps, strengths, cell_stride, state_stride,
    step_scale, min_step, max_step, IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_PROMPTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * (VALUE_DIM + DECAYS + (1 if IS_DELTA else 0))
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, number = tl.program_id(0), tl.program_id(1)
    row_number = tl.load(owners + number) if HAS_PROMPTS else number
    first, context = tl.load(query_starts + row_number), tl.load(contexts + row_number)
    start = context - (tl.load(query_starts + row_number + 1) - first)
    if context > 0:  # other rows are padding
        cell_table, state_table = cell_tables + row_number * cell_stride, state_tables + row_number * state_stride
        position, token = start + number - first, number.to(tl.int64)
        before = tl.load(state_table + tl.maximum(start // CHUNK - 1, 0), mask=start >= CHUNK, other=0).to(tl.int64)
        block = tl.load(cell_table + position // BLOCK_SIZE).to(tl.int64)
        is_last = position % CHUNK == CHUNK - 1
        behind = tl.load(state_table + position // CHUNK, mask=is_last, other=0).to(tl.int64)
        row, sources, taps = (
            (first, start, cell_table, before),
            (projected, conv_inputs, tails),
            (conv_weight, conv_bias),
        )
        target = (conv_inputs, tails, block, behind)
        if head < 2 * KEY_HEADS:
            keys_at = tl.arange(0, KEY_DIM)
            vector = _convolve_token(
                position, row, sources, taps, head * KEY_DIM + keys_at, target, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE,
                HAS_BIAS,
            )  # fmt: skip
            if IS_DELTA:
                vector = vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + 1e-6)
            if head < KEY_HEADS:
                scaled = vector * (KEY_DIM**-0.5) if IS_DELTA else vector
                tl.store(step_queries + (token * KEY_HEADS + head) * KEY_DIM + keys_at, scaled)
            else:
                key_head = head - KEY_HEADS
                kept = vector.to(keys.dtype.element_ty)
                cell = keys + ((block * KEY_HEADS + key_head) * BLOCK_SIZE + position % BLOCK_SIZE) * KEY_DIM
                tl.store(step_keys + (token * KEY_HEADS + key_head) * KEY_DIM + keys_at, kept)
                tl.store(cell + keys_at, kept, mask=everywhere(block > 0, keys_at))
        else:
            value_head = head - 2 * KEY_HEADS
            values_at = value_head * VALUE_DIM + tl.arange(0, VALUE_DIM)
            values = _convolve_token(
                position, row, sources, taps, 2 * KEY_HEADS * KEY_DIM + values_at, target, WIDTH, CHANNELS, KERNEL,
                BLOCK_SIZE, HAS_BIAS,
            )  # fmt: skip
            tl.store(step_values + token * (VALUE_HEADS * VALUE_DIM) + values_at, values)
            step_inputs, numbers = (
                projected + token * WIDTH + WIDTH - VALUE_HEADS * DECAYS,
                decays_of(value_head, DECAYS),
            )
            g, strength = step_of(
                tl.load(step_inputs + numbers), value_head, numbers, rates, step_bias, step_scale, min_step, max_step
            )
            if IS_DELTA:
                strength = tl.sigmoid(tl.load(step_inputs - VALUE_HEADS + value_head).to(tl.float32))
            tl.store(steps + token * (VALUE_HEADS * DECAYS) + numbers, g)
            tl.store(strengths + token * VALUE_HEADS + value_head, strength)


# ── the recurrence ─────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _cells(at, row, BLOCK_SIZE: tl.constexpr):
    """Return for positions of a row whether they belong to this step, their tokens, blocks of cells, and offsets."""
    first, start, table = row
    in_step = at >= start
    block = tl.load(table + at // BLOCK_SIZE, mask=at < start, other=0).to(tl.int64)
    return in_step, (first + at - start).to(tl.int64), block, at % BLOCK_SIZE


@triton.jit
def _vector(index, fields, head, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return a pointer to a key or update of a head; `fields` are the buffers of this step and of cells."""
    in_step, token, block, at = index
    of_step, in_cells = fields
    cell = in_cells + ((block * HEADS + head) * BLOCK_SIZE + at) * DIM
    return tl.where(in_step, of_step + (token * HEADS + head) * DIM, cell)


@triton.jit
def _load_vectors(
    indices, fields, head, seen, columns, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_PROMPTS: tl.constexpr,
):  # fmt: skip
    """Load keys or updates of a head, float32, zeros where masked."""
    in_step, token, block, at = indices
    of_step, in_cells = fields
    cells = ((block * HEADS + head) * BLOCK_SIZE + at) * DIM
    found = tl.load(in_cells + cells[:, None] + columns[None, :], mask=(seen & (in_step == 0))[:, None], other=0.0)
    if HAS_PROMPTS:
        own = (token * HEADS + head) * DIM
        found += tl.load(of_step + own[:, None] + columns[None, :], mask=(seen & in_step)[:, None], other=0.0)
    return found.to(tl.float32)


@triton.jit
def _decays(index, fields, head, HEADS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offset of a head's first decay."""
    in_step, token, block, at = index
    of_step, in_cells = fields
    cell = decays_in_cell(in_cells, block, at, head, HEADS, DECAYS, BLOCK_SIZE)
    return tl.where(in_step, of_step + (token * HEADS + head) * DECAYS, cell)


@triton.jit
def _load_decays(
    indices, fields, head, seen, HEADS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_PROMPTS: tl.constexpr,
):  # fmt: skip
    """Load a head's decays at tokens, one each or [TILE, channels]; zeros where masked."""
    if DECAYS > 1:
        channels = tl.arange(0, DECAYS)
        found = _load_vectors(indices, fields, head, seen, channels, HEADS, DECAYS, BLOCK_SIZE, HAS_PROMPTS)
    else:
        found = tl.load(_decays(indices, fields, head, HEADS, DECAYS, BLOCK_SIZE), mask=seen, other=0.0)
    return found


@triton.jit
def _recalled(k, vector, decay, there, seen, DECAYS: tl.constexpr):
    """Multiply a query or key by keys [TILE, KEY_DIM], with their decay since."""
    if DECAYS > 1:  # masked keys are zeros
        found = tl.sum(k * tl.exp(decay[None, :] - there) * vector[None, :], axis=1)
    else:
        found = tl.where(seen, tl.exp(decay - there), 0.0) * tl.sum(k * vector[None, :], axis=1)
    return found


@triton.jit
def _from_state(vector, state, faded, DECAYS: tl.constexpr):
    """Multiply a query or key by a state, with its decay since the start of the chunk."""
    if DECAYS > 1:
        found = tl.sum((vector * faded)[:, None] * state, axis=0)
    else:
        found = tl.sum(vector[:, None] * state, axis=0) * faded
    return found


@triton.jit
def _add_cells(
    state, decay, chunk_start, row, heads, fields, keys_at, values_at, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return a state after its chunk: decayed, with the chunk's tokens added one after another."""
    key_head, head = heads
    all_keys, all_updates, all_decays = fields
    for begin in range(0, CHUNK, AT_ONCE):
        for one in tl.static_range(AT_ONCE):
            index = _cells(chunk_start + begin + one, row, BLOCK_SIZE)
            k = tl.load(_vector(index, all_keys, key_head, KEY_HEADS, KEY_DIM, BLOCK_SIZE) + keys_at).to(tl.float32)
            u = tl.load(_vector(index, all_updates, head, VALUE_HEADS, VALUE_DIM, BLOCK_SIZE) + values_at)
            there = _decays(index, all_decays, head, VALUE_HEADS, DECAYS, BLOCK_SIZE) + decays_of(0, DECAYS)
            faded = tl.exp(decay - tl.load(there))
            state += (k * faded)[:, None] * u.to(tl.float32)[None, :]
    return state


@kernel_unspecialized("cell_stride", "state_stride")
def _recur_tokens(
    skip, keys, updates, decays, states, cell_tables, state_tables, query_starts, contexts, step_queries, step_keys,
    step_values, step_updates, step_decays, steps, strengths, out, cell_stride, state_stride, IS_DELTA: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, OWN: tl.constexpr,
    HAS_PROMPTS: tl.constexpr, IS_TILED: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    PARTS: tl.constexpr = VALUE_DIM // OWN
    head, row_number = tl.program_id(0) // PARTS, tl.program_id(1)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    keys_at, values_at = tl.arange(0, KEY_DIM), tl.program_id(0) % PARTS * OWN + tl.arange(0, OWN)
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    first, context = tl.load(query_starts + row_number), tl.load(contexts + row_number)
    count = tl.load(query_starts + row_number + 1) - first
    start = context - count
    cell_table, state_table = cell_tables + row_number * cell_stride, state_tables + row_number * state_stride
    slot = tl.load(state_table + tl.maximum(start // CHUNK - 1, 0), mask=start >= CHUNK, other=0).to(tl.int64)
    state_at = head * KEY_DIM * VALUE_DIM + keys_at[:, None] * VALUE_DIM + values_at[None, :]
    state = tl.load(states + slot * STATE + state_at, mask=everywhere(slot > 0, state_at), other=0.0)
    if context == 0:  # a padding row
        tl.store(out + first * VALUES + head * VALUE_DIM + values_at, tl.zeros((OWN,), tl.float32))
        count = 0
    row, heads, channels = (first, start, cell_table), (key_head, head), decays_of(0, DECAYS)
    all_keys, all_updates, all_decays = (step_keys, keys), (step_updates, updates), (step_decays, decays)
    fields = (all_keys, all_updates, all_decays)
    for number in range(count):
        position, token = start + number, (first + number).to(tl.int64)
        at, chunk_start = position % CHUNK, position - position % CHUNK
        own_keys = (token * KEY_HEADS + key_head) * KEY_DIM + keys_at
        own_values = token * VALUES + head * VALUE_DIM + values_at
        query, key = tl.load(step_queries + own_keys), tl.load(step_keys + own_keys).to(tl.float32)
        value, strength = tl.load(step_values + own_values), tl.load(strengths + token * VALUE_HEADS + head)
        own_step = (token * VALUE_HEADS + head) * DECAYS + channels
        before = _cells(tl.maximum(position - 1, 0), row, BLOCK_SIZE)
        last = _decays(before, all_decays, head, VALUE_HEADS, DECAYS, BLOCK_SIZE) + channels
        decay = tl.load(steps + own_step) + tl.load(last, mask=everywhere(at > 0, channels), other=0.0)
        by_key, by_query = tl.zeros((OWN,), tl.float32), tl.zeros((OWN,), tl.float32)
        for tile in range(0, at, TILE):  # earlier tokens of its chunk
            numbers = tile + tl.arange(0, TILE)
            seen = numbers < at
            indices = _cells(chunk_start + numbers, row, BLOCK_SIZE)
            k = _load_vectors(indices, all_keys, key_head, seen, keys_at, KEY_HEADS, KEY_DIM, BLOCK_SIZE, HAS_PROMPTS)
            u = _load_vectors(
                indices, all_updates, head, seen, values_at, VALUE_HEADS, VALUE_DIM, BLOCK_SIZE, HAS_PROMPTS
            )
            there = _load_decays(indices, all_decays, head, seen, VALUE_HEADS, DECAYS, BLOCK_SIZE, HAS_PROMPTS)
            by_query += tl.sum(_recalled(k, query, decay, there, seen, DECAYS)[:, None] * u, axis=0)
            if IS_DELTA:
                by_key += tl.sum(_recalled(k, key, decay, there, seen, DECAYS)[:, None] * u, axis=0)
        faded = tl.exp(decay)
        fresh = value
        if IS_DELTA:
            fresh = value - _from_state(key, state, faded, DECAYS) - by_key
        kept_update = (fresh * strength).to(updates.dtype.element_ty)
        update = kept_update.to(tl.float32)
        result = _from_state(query, state, faded, DECAYS) + by_query + tl.sum(query * key, axis=0) * update
        if not IS_DELTA:
            result += tl.load(skip + head) * value
        tl.store(out + own_values, result)

        block, in_block = tl.load(cell_table + position // BLOCK_SIZE).to(tl.int64), position % BLOCK_SIZE
        cell = updates + ((block * VALUE_HEADS + head) * BLOCK_SIZE + in_block) * VALUE_DIM
        tl.store(cell + values_at, kept_update, mask=everywhere(block > 0, values_at))
        kept_decays = decays_in_cell(decays, block, in_block, head, VALUE_HEADS, DECAYS, BLOCK_SIZE) + channels
        tl.store(kept_decays, decay, mask=everywhere(block > 0, channels))
        is_read = at >= (0 if HAS_PROMPTS else CHUNK - 1)  # by a later token of this step, or by the state's update
        if is_read:
            tl.store(step_updates + own_values, kept_update)
            tl.store(step_decays + own_step, decay)
            tl.debug_barrier()  # other threads read what these stored
        if at == CHUNK - 1:
            state = _add_cells(
                state * (faded if DECAYS == 1 else faded[:, None]), decay, chunk_start, row, heads, fields, keys_at,
                values_at, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, DECAYS, BLOCK_SIZE,
            )  # fmt: skip
            next_slot = tl.load(state_table + position // CHUNK).to(tl.int64)
            tl.store(states + next_slot * STATE + state_at, state, mask=everywhere(next_slot > 0, state_at))


def recur_tokens(
    projected: torch.Tensor,
    cache: RecurrentCache,
    plan: RecurrentBatch,
    args: RecurrentArgs,
    out: torch.Tensor,
    num_rows: int,
) -> None:
    """Compute the tokens of the first rows; out: float32 [T, values], before gate and norm."""
    spec, sizes, weights = args.spec, Sizes.of(args), args.weights
    has_prompts = num_rows > plan.num_single
    num_tokens = len(projected) if has_prompts else num_rows
    step_keys = projected.new_empty(num_tokens, spec.keys_size)
    step_updates = projected.new_empty(num_tokens, spec.values_size)
    step_queries, step_values, step_decays, steps, strengths = (
        torch.empty(num_tokens, size, dtype=torch.float32, device=projected.device)
        for size in (spec.keys_size, spec.values_size, *[spec.num_decays] * 2, spec.value_heads)
    )
    tables = (plan.cells, plan.states, plan.query_starts, plan.contexts)
    strides = plan.cells.stride(0), plan.states.stride(0)
    _prepare_tokens[(2 * spec.key_heads + spec.value_heads, num_tokens)](
        projected, weights.conv, sizes.or_any(weights.conv_bias), weights.rates, weights.step_bias, cache.conv_inputs,
        cache.keys, cache.tails, *tables, plan.query_starts if plan.owners is None else plan.owners, step_queries,
        step_keys, step_values, steps, strengths, *strides, *step_numbers(spec), *sizes.shapes, plan.block_size,
        has_prompts, num_warps=1, **launch_options(),
    )  # fmt: skip
    own = min(spec.value_dim, MAX_VALUES)
    _recur_tokens[(spec.value_heads * spec.value_dim // own, num_rows)](
        sizes.or_any(weights.skip), cache.keys, cache.updates, cache.decays, cache.states, *tables, step_queries,
        step_keys, step_values, step_updates, step_decays, steps, strengths, out, *strides, *sizes.shapes,
        plan.block_size, own, has_prompts, spec.is_tiled, **RECUR, **launch_options(),
    )  # fmt: skip
