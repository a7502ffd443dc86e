"""Recurrent mixers token by token: one program computes a head of a row, from the joint projection to its output.

The state stays in registers. Of the tokens since the last multiple of 64 a program reads cells; of those that are of
this step, what it left beside the cache itself, in the precision of the cells. So the result of a token is computed in
the same order whatever step it is in: decoding steps take this way, and deterministic ones for prompts too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import CHUNK, everywhere, gated, input_lines, silu, step_of, unit
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.sizes import Sizes, gate_numbers, step_numbers

OPTIONS = {"num_warps": 8}
TILE = tl.constexpr(32)  # tokens of the chunk that are looked at together
AT_ONCE = tl.constexpr(4)  # tokens that are added to a state before the next ones are loaded


@triton.jit
def _convolved(
    position, row, sources, taps, channels, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at one position, float32"""
    weight, bias = taps
    total = tl.zeros(channels.shape, tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels)
    for tap in tl.static_range(KERNEL):
        line, exists = input_lines(position - (KERNEL - 1 - tap), row, sources, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
        value = tl.load(line + channels, mask=everywhere(exists, channels), other=0.0).to(tl.float32)
        total += tl.load(weight + channels * KERNEL + tap) * value
    return silu(total)


@triton.jit
def _keep_inputs(
    position, row, sources, channels, target, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the inputs at a position into its cell, and the last ones before a state into that state's tail."""
    conv_inputs, tails, block, slot = target
    line, _ = input_lines(position, row, sources, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
    cell = conv_inputs + (block * BLOCK_SIZE + position % BLOCK_SIZE) * CHANNELS
    tl.store(cell + channels, tl.load(line + channels), mask=everywhere(block > 0, channels))
    if slot > 0:
        for number in tl.static_range(KERNEL - 1):
            back = KERNEL - 2 - number
            last, exists = input_lines(position - back, row, sources, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
            value = tl.load(last + channels, mask=everywhere(exists, channels), other=0.0)
            tl.store(tails + (slot * (KERNEL - 1) + number) * CHANNELS + channels, value)


@triton.jit
def _cells(at, row, BLOCK_SIZE: tl.constexpr):
    """Positions of a row: whether they are of this step, the step's tokens, blocks of cells and places in them"""
    first, start, table, _ = row
    in_step = at >= start
    block = tl.load(table + at // BLOCK_SIZE, mask=at < start, other=0).to(tl.int64)
    return in_step, (first + at - start).to(tl.int64), block, at % BLOCK_SIZE


@triton.jit
def _vectors(places, fields, head, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where keys or updates of a head begin; `fields` are those of this step, and those in cells"""
    in_step, token, block, at = places
    of_step, in_cells = fields
    cells = in_cells + ((block * HEADS + head) * BLOCK_SIZE + at) * DIM
    return tl.where(in_step, of_step + (token * HEADS + head) * DIM, cells)


@triton.jit
def _load_vectors(
    places, fields, head, seen, columns, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_PROMPTS: tl.constexpr,
):  # fmt: skip
    """Keys or updates of a head, float32, zeros where nothing is seen"""
    in_step, token, block, at = places
    of_step, in_cells = fields
    cells = ((block * HEADS + head) * BLOCK_SIZE + at) * DIM
    found = tl.load(in_cells + cells[:, None] + columns[None, :], mask=(seen & (in_step == 0))[:, None], other=0.0)
    if HAS_PROMPTS:
        own = (token * HEADS + head) * DIM
        found += tl.load(of_step + own[:, None] + columns[None, :], mask=(seen & in_step)[:, None], other=0.0)
    return found.to(tl.float32)


@triton.jit
def _decays(places, fields, head, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where decays of a head are"""
    in_step, token, block, at = places
    of_step, in_cells = fields
    return tl.where(in_step, of_step + token * HEADS + head, in_cells + (block * BLOCK_SIZE + at) * HEADS + head)


@kernel_unspecialized("cell_stride", "state_stride")
def _recur_tokens(
    projected, conv_weight, conv_bias, rates, step_bias, skip, norm_weight, conv_inputs, keys, updates, decays, states,
    tails, cell_tables, state_tables, query_starts, contexts, step_queries, step_keys, step_values, step_updates,
    step_decays, out, cell_stride, state_stride, eps, step_scale, min_step, max_step, gate_scale, out_scale,
    IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    NORM_IS_SHARED: tl.constexpr, GATES: tl.constexpr, HAS_PROMPTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUES + (2 * VALUE_HEADS if IS_DELTA else VALUE_HEADS)
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, row_number = tl.program_id(0), tl.program_id(1)
    key_head = head // REPEATS
    first, end = tl.load(query_starts + row_number), tl.load(query_starts + row_number + 1)
    context = tl.load(contexts + row_number)
    count = end - first
    start = context - count
    cell_table, state_table = cell_tables + row_number * cell_stride, state_tables + row_number * state_stride
    keys_at, values_at = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    if context == 0:  # a row that fills up a graph
        tl.store(out + (first * VALUES + head * VALUE_DIM) + values_at, tl.zeros((VALUE_DIM,), out.dtype.element_ty))
        count = 0
    slot = tl.load(state_table + tl.maximum(start // CHUNK - 1, 0), mask=start >= CHUNK, other=0).to(tl.int64)
    state_at = head * KEY_DIM * VALUE_DIM + keys_at[:, None] * VALUE_DIM + values_at[None, :]
    state = tl.load(states + slot * STATE + state_at, mask=everywhere(slot > 0, state_at), other=0.0)
    row = (first, start, cell_table, slot)
    sources, taps = (projected, conv_inputs, tails), (conv_weight, conv_bias)
    all_keys, all_updates, all_decays = (step_keys, keys), (step_updates, updates), (step_decays, decays)
    query_channels = key_head * KEY_DIM + keys_at
    key_channels = KEY_HEADS * KEY_DIM + query_channels
    value_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values_at
    for number in range(count):
        position, token = start + number, (first + number).to(tl.int64)
        at = position % CHUNK
        query = _convolved(position, row, sources, taps, query_channels, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE, HAS_BIAS)
        key = _convolved(position, row, sources, taps, key_channels, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE, HAS_BIAS)
        value = _convolved(position, row, sources, taps, value_channels, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE, HAS_BIAS)
        if IS_DELTA:
            query, key = unit(query, 0) * (KEY_DIM**-0.5), unit(key, 0)
        # Through memory, so that every thread gets the numbers it needs and none is computed more than once.
        own_keys, own_values = (token * KEY_HEADS + key_head) * KEY_DIM + keys_at, token * VALUES + head * VALUE_DIM
        tl.store(step_queries + own_keys, query)
        tl.store(step_keys + own_keys, key.to(keys.dtype.element_ty))
        tl.store(step_values + own_values + values_at, value)
        tl.debug_barrier()
        query, value = tl.load(step_queries + own_keys), tl.load(step_values + own_values + values_at)
        kept_key = tl.load(step_keys + own_keys)
        key = kept_key.to(tl.float32)
        line = projected + token * WIDTH
        a = tl.load(line + WIDTH - VALUE_HEADS + head)
        g, dt = step_of(a, head, rates, step_bias, step_scale, min_step, max_step)

        # The tokens before it in its chunk
        chunk_start = position - at
        last = _decays(_cells(tl.maximum(position - 1, 0), row, BLOCK_SIZE), all_decays, head, VALUE_HEADS, BLOCK_SIZE)
        decay = g + tl.load(last, mask=at > 0, other=0.0)
        by_key, by_query = tl.zeros((VALUE_DIM,), tl.float32), tl.zeros((VALUE_DIM,), tl.float32)
        for tile in range(0, at, TILE):
            numbers = tile + tl.arange(0, TILE)
            seen = numbers < at
            places = _cells(chunk_start + numbers, row, BLOCK_SIZE)
            k = _load_vectors(places, all_keys, key_head, seen, keys_at, KEY_HEADS, KEY_DIM, BLOCK_SIZE, HAS_PROMPTS)
            u = _load_vectors(
                places, all_updates, head, seen, values_at, VALUE_HEADS, VALUE_DIM, BLOCK_SIZE, HAS_PROMPTS
            )
            decays_there = tl.load(_decays(places, all_decays, head, VALUE_HEADS, BLOCK_SIZE), mask=seen, other=0.0)
            weights = tl.where(seen, tl.exp(decay - decays_there), 0.0)
            by_query += tl.sum((weights * tl.sum(k * query[None, :], axis=1))[:, None] * u, axis=0)
            if IS_DELTA:
                by_key += tl.sum((weights * tl.sum(k * key[None, :], axis=1))[:, None] * u, axis=0)
        from_state = tl.exp(decay)
        if IS_DELTA:
            recalled = tl.sum(key[:, None] * state, axis=0) * from_state
            strength = tl.sigmoid(tl.load(line + WIDTH - 2 * VALUE_HEADS + head).to(tl.float32))
            update = (value - recalled - by_key) * strength
        else:
            update = value * dt
        kept_update = update.to(updates.dtype.element_ty)
        update = kept_update.to(tl.float32)
        result = tl.sum(query[:, None] * state, axis=0) * from_state + by_query + tl.sum(query * key, axis=0) * update
        if not IS_DELTA:
            result += tl.load(skip + head) * value

        # What later tokens read
        block, in_block = tl.load(cell_table + position // BLOCK_SIZE).to(tl.int64), position % BLOCK_SIZE
        key_cell = keys + ((block * KEY_HEADS + key_head) * BLOCK_SIZE + in_block) * KEY_DIM
        update_cell = updates + ((block * VALUE_HEADS + head) * BLOCK_SIZE + in_block) * VALUE_DIM
        tl.store(key_cell + keys_at, kept_key, mask=everywhere(block > 0, keys_at))
        tl.store(update_cell + values_at, kept_update, mask=everywhere(block > 0, values_at))
        tl.store(decays + (block * BLOCK_SIZE + in_block) * VALUE_HEADS + head, decay, mask=block > 0)
        next_slot = tl.load(state_table + position // CHUNK, mask=at == CHUNK - 1, other=0).to(tl.int64)
        target = (conv_inputs, tails, block, next_slot)
        _keep_inputs(position, row, sources, value_channels, target, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
        if head % REPEATS == 0:
            _keep_inputs(position, row, sources, query_channels, target, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
            _keep_inputs(position, row, sources, key_channels, target, WIDTH, CHANNELS, KERNEL, BLOCK_SIZE)
        if (count > 1) | (at == CHUNK - 1):
            tl.store(step_updates + own_values + values_at, kept_update)
            tl.store(step_decays + token * VALUE_HEADS + head, decay)
            tl.debug_barrier()  # other threads read what these stored
        if at == CHUNK - 1:
            state = state * from_state
            for begin in range(0, CHUNK, AT_ONCE):
                for one in tl.static_range(AT_ONCE):
                    place = _cells(chunk_start + begin + one, row, BLOCK_SIZE)
                    k_at = _vectors(place, all_keys, key_head, KEY_HEADS, KEY_DIM, BLOCK_SIZE) + keys_at
                    u_at = _vectors(place, all_updates, head, VALUE_HEADS, VALUE_DIM, BLOCK_SIZE) + values_at
                    faded = tl.exp(decay - tl.load(_decays(place, all_decays, head, VALUE_HEADS, BLOCK_SIZE)))
                    state += (tl.load(k_at).to(tl.float32) * faded)[:, None] * tl.load(u_at).to(tl.float32)[None, :]
            tl.store(states + next_slot * STATE + state_at, state, mask=everywhere(next_slot > 0, state_at))

        if GATES:
            z = tl.load(line + CHANNELS + head * VALUE_DIM + values_at).to(tl.float32) * gate_scale
            weight_at = values_at if NORM_IS_SHARED else head * VALUE_DIM + values_at
            weight = tl.load(norm_weight + weight_at) if NORM else 1.0
            result = gated(result, z, weight, eps, NORM, VALUE_DIM) * out_scale
        tl.store(out + own_values + values_at, result.to(out.dtype.element_ty))


def recur_tokens(
    projected: torch.Tensor,
    cache: RecurrentCache,
    plan: RecurrentBatch,
    args: RecurrentArgs,
    out: torch.Tensor,
    num_rows: int,
) -> None:
    """Compute the tokens of the first rows; out [T, values] is gated and normed where heads are groups of the norm."""
    spec, sizes, weights = args.spec, Sizes.of(args), args.weights
    num_tokens = num_rows if num_rows == plan.num_single else len(projected)
    step_keys = projected.new_empty(num_tokens, spec.keys_size)
    step_updates = projected.new_empty(num_tokens, spec.values_size)
    step_queries, step_values, step_decays = (
        torch.empty(num_tokens, size, dtype=torch.float32, device=projected.device)
        for size in (spec.keys_size, spec.values_size, spec.value_heads)
    )
    _recur_tokens[(spec.value_heads, num_rows)](
        projected, weights.conv, sizes.or_any(weights.conv_bias), weights.rates, weights.step_bias,
        sizes.or_any(weights.skip), sizes.or_any(weights.norm), cache.conv_inputs, cache.keys, cache.updates,
        cache.decays, cache.states, cache.tails, plan.cells, plan.states, plan.query_starts, plan.contexts,
        step_queries, step_keys, step_values, step_updates, step_decays, out, plan.cells.stride(0),
        plan.states.stride(0), weights.eps, *step_numbers(spec), *gate_numbers(spec), *sizes.shapes, plan.block_size,
        sizes.norm, sizes.norm_is_shared, sizes.gates_by_head, num_rows > plan.num_single, **OPTIONS,
        **launch_options(),
    )  # fmt: skip
