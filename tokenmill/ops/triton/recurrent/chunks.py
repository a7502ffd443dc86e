"""The recurrence of prompts by chunks of 64 tokens, as products of matrices (`arch/recurrent.py` has the sums).

    solve   all segments side by side: decays G, per head T = (1 + A)⁻¹ with A_tj = β_t e^{G_t - G_j} k_t·k_j, j < t,
            and P_tj = e^{G_t - G_j} q_t·k_j, j <= t. Row t belongs to a token: [T, heads, 64] each
    scan    a row's segments one after another, some values of a head a program: with the state S before the chunk

            U = T β (V - e^G K S)        O = e^G Q S + P U        S' = e^{G_64} S + (e^{G_64 - G} K)ᵀ U

Where a row begins within a chunk, the tokens before it are cells: their keys and updates are known, so their rows of T
are those of 1, and what T multiplies are their updates. Mamba-2 has no T: its updates are dt · v.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.parts import (
    CHUNK,
    everywhere,
    key_head_of,
    step_of,
)
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.sizes import Sizes, step_numbers

SCAN = {"num_warps": 4, "num_stages": 1}
MAX_VALUES = 16  # of a head that a program of `scan` computes
HALF = tl.constexpr(32)


@triton.jit
def _tokens_of(begin, segment, table, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """A part of a segment's chunk, tokens `begin` to `begin + COUNT`: their numbers, which are before the segment (in
    cells), which in it; indices in blocks of cells, blocks, and tokens of the step"""
    position, count, token = segment
    at = position % CHUNK
    numbers = begin + tl.arange(0, COUNT)
    is_before, is_own = numbers < at, (numbers >= at) & (numbers < at + count)
    positions = position - at + numbers
    block = tl.load(table + positions // BLOCK_SIZE, mask=is_before | is_own, other=0).to(tl.int64)
    return numbers, is_before, is_own, positions % BLOCK_SIZE, block, token + numbers - at


@triton.jit
def _load_keys(
    at, part, keys, convolved, key_head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys of a chunk's tokens [N, D], zeros behind the last one"""
    _, is_before, is_own, in_block, block, tokens = part
    columns = tl.arange(0, KEY_DIM)[None, :]
    own = tokens * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM
    found = tl.load(convolved + own[:, None] + columns, mask=is_own[:, None], other=0.0)
    if at > 0:  # the row begins within the chunk
        cells = ((block * KEY_HEADS + key_head) * BLOCK_SIZE + in_block) * KEY_DIM
        found += tl.load(keys + cells[:, None] + columns, mask=is_before[:, None], other=0.0)
    return found


@triton.jit
def _load_queries(part, convolved, key_head, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    _, _, is_own, _, _, tokens = part
    offsets = (tokens * CHANNELS + key_head * KEY_DIM)[:, None] + tl.arange(0, KEY_DIM)[None, :]
    return tl.load(convolved + offsets, mask=is_own[:, None], other=0.0)


# ── side by side ───────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _steps_of(
    part, projected, numbers, decays, head, VALUE_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Tokens' own decays g (0 where they are of an earlier step), strengths, and decays in cells"""
    _, is_before, is_own, in_block, block, tokens = part
    rates, step_bias, step_scale, min_step, max_step = numbers
    step_inputs = projected + tokens * WIDTH + WIDTH - VALUE_HEADS + head
    own_step = tl.load(step_inputs, mask=is_own, other=0.0)
    g, strength = step_of(own_step, head, rates, step_bias, step_scale, min_step, max_step)
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
    """e^{G_t - G_j} for j <= t, else 0"""
    since = decay_of_rows[:, None] - decay_of_columns[None, :]
    return tl.where(rows[:, None] >= columns[None, :], tl.exp(tl.minimum(since, 0.0)), 0.0)


@triton.jit
def _inverse(matrix):
    """(1 + matrix)⁻¹ of a matrix [32, 32] with numbers below its diagonal only, row by row"""
    number = tl.arange(0, HALF)
    inverse = tl.where(number[:, None] == number[None, :], 1.0, 0.0)
    for row in range(1, HALF):
        is_row = number == row
        factors = tl.sum(tl.where(is_row[:, None], matrix, 0.0), axis=0)
        change = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(is_row[:, None], inverse - change[None, :], inverse)
    return inverse


@triton.jit
def _store_tile(matrix, tile, part, begin, head, VALUE_HEADS: tl.constexpr):
    """Rows of a head's matrix that belong to tokens, columns `begin` to `begin + 32`"""
    _, _, is_own, _, _, tokens = part
    offsets = ((tokens * VALUE_HEADS + head) * CHUNK + begin)[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(matrix + offsets, tile.to(matrix.dtype.element_ty), mask=is_own[:, None])


@kernel_unspecialized("cell_stride")
def _solve(
    projected, rates, step_bias, convolved, keys, decays, cell_tables, segments, solved, mixed, step_decays, strengths,
    cell_stride, step_scale, min_step, max_step, IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, IS_TILED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """A chunk in halves of 32 tokens, by one warp: what its threads sum up needs no shared memory."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + (2 * VALUE_HEADS if IS_DELTA else VALUE_HEADS)
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, own_segment = tl.program_id(0), segments + tl.program_id(1) * 4
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    segment = (tl.load(own_segment + 1), tl.load(own_segment + 2), tl.load(own_segment + 3).to(tl.int64))
    at, table = segment[0] % CHUNK, cell_tables + tl.load(own_segment) * cell_stride
    upper, lower = _tokens_of(0, segment, table, HALF, BLOCK_SIZE), _tokens_of(HALF, segment, table, HALF, BLOCK_SIZE)
    i, j = upper[0], lower[0]
    numbers = (rates, step_bias, step_scale, min_step, max_step)
    g0, strength0, known0 = _steps_of(upper, projected, numbers, decays, head, VALUE_HEADS, WIDTH, BLOCK_SIZE, IS_DELTA)
    g1, strength1, known1 = _steps_of(lower, projected, numbers, decays, head, VALUE_HEADS, WIDTH, BLOCK_SIZE, IS_DELTA)
    last = tl.sum(tl.where(i == at - 1, known0, 0.0), axis=0) + tl.sum(tl.where(j == at - 1, known1, 0.0), axis=0)
    decay0 = tl.where(upper[1], known0, last + tl.cumsum(g0, axis=0))
    decay1 = tl.where(lower[1], known1, last + tl.sum(g0, axis=0) + tl.cumsum(g1, axis=0))
    _keep_steps(upper, decay0, strength0, decays, step_decays, strengths, head, VALUE_HEADS, BLOCK_SIZE)
    _keep_steps(lower, decay1, strength1, decays, step_decays, strengths, head, VALUE_HEADS, BLOCK_SIZE)

    key0 = tl.trans(_load_keys(at, upper, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE))
    key1 = tl.trans(_load_keys(at, lower, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE))
    faded00, faded10 = _faded(i, decay0, i, decay0), _faded(j, decay1, i, decay0)
    faded11 = _faded(j, decay1, j, decay1)
    query = _load_queries(upper, convolved, key_head, KEY_DIM, CHANNELS)
    _store_tile(mixed, tl.dot(query, key0, input_precision=PRECISION) * faded00, upper, 0, head, VALUE_HEADS)
    _store_tile(mixed, tl.zeros((HALF, HALF), tl.float32), upper, HALF, head, VALUE_HEADS)
    query = _load_queries(lower, convolved, key_head, KEY_DIM, CHANNELS)
    _store_tile(mixed, tl.dot(query, key0, input_precision=PRECISION) * faded10, lower, 0, head, VALUE_HEADS)
    _store_tile(mixed, tl.dot(query, key1, input_precision=PRECISION) * faded11, lower, HALF, head, VALUE_HEADS)
    if IS_DELTA:
        # Rows of tokens before the segment are those of 1.
        share0, share1 = tl.where(upper[2], strength0, 0.0)[:, None], tl.where(lower[2], strength1, 0.0)[:, None]
        alike00 = tl.dot(tl.trans(key0), key0, input_precision=PRECISION) * faded00 * share0
        alike10 = tl.dot(tl.trans(key1), key0, input_precision=PRECISION) * faded10 * share1
        alike11 = tl.dot(tl.trans(key1), key1, input_precision=PRECISION) * faded11 * share1
        solved00 = _inverse(tl.where(i[:, None] > i[None, :], alike00, 0.0))
        solved11 = _inverse(tl.where(j[:, None] > j[None, :], alike11, 0.0))
        between = tl.dot(alike10, solved00, input_precision=PRECISION)
        _store_tile(solved, solved00, upper, 0, head, VALUE_HEADS)
        _store_tile(solved, tl.zeros((HALF, HALF), tl.float32), upper, HALF, head, VALUE_HEADS)
        _store_tile(solved, -tl.dot(solved11, between, input_precision=PRECISION), lower, 0, head, VALUE_HEADS)
        _store_tile(solved, solved11, lower, HALF, head, VALUE_HEADS)


# ── one after another ──────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _product(x, matrix, acc, PRECISION: tl.constexpr):
    """x [M, K] float32 times a matrix [K, N], as activations are kept, added to acc; x in two parts of 16 bits each
    where activations have 16"""
    if matrix.dtype == tl.float32:
        return tl.dot(x, matrix, acc, input_precision=PRECISION)
    high = x.to(matrix.dtype)
    low = (x - high.to(tl.float32)).to(matrix.dtype)
    return tl.dot(high, matrix, tl.dot(low, matrix, acc))


@kernel_unspecialized("cell_stride", "state_stride", "first_row")
def _scan(
    convolved, keys, updates, states, skip, cell_tables, state_tables, query_starts, contexts, solved, mixed,
    step_decays, strengths, cell_decays, out, cell_stride, state_stride, first_row, IS_DELTA: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, IS_TILED: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Everything transposed: a state is [own values, key dim], so that it and what is computed from it is the factor
    that products take from registers."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    PARTS: tl.constexpr = VALUE_DIM // OWN
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, row = tl.program_id(0) // PARTS, first_row + tl.program_id(1)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    first, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    context = tl.load(contexts + row)
    start = context - (end - first)
    cell_table, state_table = cell_tables + row * cell_stride, state_tables + row * state_stride
    number, keys_at = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    values_at = tl.program_id(0) % PARTS * OWN + tl.arange(0, OWN)
    slot = tl.load(state_table + tl.maximum(start // CHUNK - 1, 0), mask=start >= CHUNK, other=0).to(tl.int64)
    state_at = head * KEY_DIM * VALUE_DIM + keys_at[None, :] * VALUE_DIM + values_at[:, None]
    state = tl.load(states + slot * STATE + state_at, mask=everywhere(slot > 0, state_at), other=0.0)
    for chunk_start in range(start // CHUNK * CHUNK, context, CHUNK):
        position = tl.maximum(chunk_start, start)
        segment = (
            position,
            tl.minimum(chunk_start + CHUNK, context) - position,
            (first + position - start).to(tl.int64),
        )
        part = _tokens_of(0, segment, cell_table, CHUNK, BLOCK_SIZE)
        _, is_before, is_own, in_block, block, tokens = part
        own_decays = step_decays + tokens * VALUE_HEADS + head
        before = cell_decays + (block * BLOCK_SIZE + in_block) * VALUE_HEADS + head
        decay = tl.load(tl.where(is_own, own_decays, before), mask=is_own | is_before, other=0.0)
        strength = tl.load(strengths + tokens * VALUE_HEADS + head, mask=is_own, other=0.0)
        value_offsets = tokens * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        value = tl.load(convolved + value_offsets[None, :] + values_at[:, None], mask=is_own[None, :], other=0.0)
        value = value.to(tl.float32)
        key = _load_keys(
            position - chunk_start, part, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE
        )
        from_state, nothing = tl.exp(decay)[None, :], tl.zeros((OWN, CHUNK), tl.float32)
        matrix_at = ((tokens * VALUE_HEADS + head) * CHUNK)[:, None] + number[None, :]
        cells = ((block * VALUE_HEADS + head) * BLOCK_SIZE + in_block) * VALUE_DIM
        cells_at = cells[None, :] + values_at[:, None]
        fresh = value
        if IS_DELTA:
            fresh -= _product(state, tl.trans(key), nothing, PRECISION) * from_state
        fresh *= strength[None, :]
        if position > chunk_start:  # of tokens before the row, updates are known
            fresh += tl.load(updates + cells_at, mask=is_before[None, :], other=0.0).to(tl.float32)
        update = fresh
        if IS_DELTA:
            inverse = tl.load(solved + matrix_at, mask=is_own[:, None], other=0.0)
            same = tl.where(number[:, None] == number[None, :], 1.0, 0.0).to(inverse.dtype)
            update = _product(fresh, tl.trans(tl.where(is_own[:, None], inverse, same)), nothing, PRECISION)
        query = _load_queries(part, convolved, key_head, KEY_DIM, CHANNELS)
        products = tl.load(mixed + matrix_at, mask=is_own[:, None], other=0.0)
        result = _product(state, tl.trans(query), nothing, PRECISION) * from_state
        result = _product(update, tl.trans(products), result, PRECISION)
        if not IS_DELTA:
            result += tl.load(skip + head) * value
        out_at = ((tokens * VALUE_HEADS + head) * VALUE_DIM)[None, :] + values_at[:, None]
        tl.store(out + out_at, result, mask=is_own[None, :])
        is_kept = is_own & (block > 0)
        tl.store(updates + cells_at, update.to(updates.dtype.element_ty), mask=is_kept[None, :])
        if chunk_start + CHUNK <= context:
            last = tl.sum(tl.where(number == CHUNK - 1, decay, 0.0), axis=0)
            faded = update * tl.exp(last - decay)[None, :]
            state = _product(faded, key, state * tl.exp(last), PRECISION)
            next_slot = tl.load(state_table + chunk_start // CHUNK).to(tl.int64)
            tl.store(states + next_slot * STATE + state_at, state, mask=everywhere(next_slot > 0, state_at))


def recur_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    cache: RecurrentCache,
    plan: RecurrentBatch,
    args: RecurrentArgs,
    out: torch.Tensor,
) -> None:
    """Compute the rows of several tokens; out: float32 [T, values], neither gated nor normed"""
    spec, sizes, segments, weights = args.spec, Sizes.of(args), plan.segments, args.weights
    assert segments is not None
    precision, heads, num_tokens = precision_of(projected), spec.value_heads, len(projected)
    mixed = projected.new_empty(num_tokens, heads, CHUNK.value)
    solved = torch.empty_like(mixed) if spec.rule == "delta" else mixed
    step_decays, strengths = torch.empty(2, num_tokens, heads, dtype=torch.float32, device=projected.device)
    _solve[(heads, len(segments))](
        projected, weights.rates, weights.step_bias, convolved, cache.keys, cache.decays, plan.cells, segments, solved,
        mixed, step_decays, strengths, plan.cells.stride(0), *step_numbers(spec), *sizes.shapes, plan.block_size,
        precision, spec.is_tiled, num_warps=1, **launch_options(),
    )  # fmt: skip
    own, num_rows = min(spec.value_dim, MAX_VALUES), len(plan.contexts) - plan.num_single
    _scan[(heads * spec.value_dim // own, num_rows)](
        convolved, cache.keys, cache.updates, cache.states, sizes.or_any(weights.skip), plan.cells, plan.states,
        plan.query_starts, plan.contexts, solved, mixed, step_decays, strengths, cache.decays, out,
        plan.cells.stride(0), plan.states.stride(0), plan.num_single, *sizes.shapes, plan.block_size, own, precision,
        spec.is_tiled, **SCAN, **launch_options(),
    )  # fmt: skip
