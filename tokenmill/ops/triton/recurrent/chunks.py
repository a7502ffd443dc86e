"""The recurrence of prompts by chunks of 64 tokens, as products of matrices (`arch/recurrent.py` has the sums).

    solve   all pieces side by side: decays G, and per head T = (1 + A)⁻¹ with A_tj = β_t e^{G_t - G_j} k_t·k_j, j < t,
            and P_tj = e^{G_t - G_j} q_t·k_j, j <= t. Row t belongs to a token: [T, heads, 64] each
    scan    a row's pieces one after another, some values of a head a program: with the state S before the chunk

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
from tokenmill.ops.triton.recurrent.parts import CHUNK, everywhere, step_of
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.sizes import Sizes, step_numbers

SCAN = {"num_warps": 4, "num_stages": 1}  # more warps than the 64 rows of a chunk fill would read beyond them
MAX_VALUES = 32  # of a head that a program of `scan` computes


@triton.jit
def _chunk_lines(
    position, count, start, token, table, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Places of the 64 tokens of a piece's chunk: which are before it (in cells), which in it; blocks of the cells and
    tokens of the step"""
    number = tl.arange(0, CHUNK)
    at = position % CHUNK
    is_before, is_own = number < at, (number >= at) & (number < at + count)
    positions = position - at + number
    block = tl.load(table + positions // BLOCK_SIZE, mask=is_before | is_own, other=0).to(tl.int64)
    return is_before, is_own, positions % BLOCK_SIZE, block, token + number - at


@triton.jit
def _keys_of_chunk(
    at, lines, keys, convolved, key_head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """[64, D], zeros behind the last token"""
    is_before, is_own, in_block, block, tokens = lines
    columns = tl.arange(0, KEY_DIM)[None, :]
    own = tokens * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM
    found = tl.load(convolved + own[:, None] + columns, mask=is_own[:, None], other=0.0)
    if at > 0:  # the row begins within the chunk
        cells = ((block * KEY_HEADS + key_head) * BLOCK_SIZE + in_block) * KEY_DIM
        found += tl.load(keys + cells[:, None] + columns, mask=is_before[:, None], other=0.0)
    return found


@triton.jit
def _product(matrix, x, acc, PRECISION: tl.constexpr):
    """matrix [M, K], as activations are kept, times x [K, N] float32, added to acc; x in two parts of 16 bits each
    where activations have 16"""
    if matrix.dtype == tl.float32:
        return tl.dot(matrix, x, acc, input_precision=PRECISION)
    high = x.to(matrix.dtype)
    low = (x - high.to(tl.float32)).to(matrix.dtype)
    return tl.dot(matrix, high, tl.dot(matrix, low, acc))


@kernel_unspecialized("cell_stride")
def _solve(
    projected, rates, step_bias, convolved, keys, decays, cell_tables, pieces, solved, mixed, step_decays, strengths,
    cell_stride, step_scale, min_step, max_step, IS_DELTA: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + (2 * VALUE_HEADS if IS_DELTA else VALUE_HEADS)
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, own_piece = tl.program_id(0), pieces + tl.program_id(1) * 4
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    row, position, count = tl.load(own_piece), tl.load(own_piece + 1), tl.load(own_piece + 2)
    token = tl.load(own_piece + 3).to(tl.int64)
    lines = _chunk_lines(position, count, position, token, cell_tables + row * cell_stride, BLOCK_SIZE)
    is_before, is_own, in_block, block, tokens = lines
    number = tl.arange(0, CHUNK)

    a = tl.load(projected + tokens * WIDTH + WIDTH - VALUE_HEADS + head, mask=is_own, other=0.0)
    g, strength = step_of(a, head, rates, step_bias, step_scale, min_step, max_step)
    if IS_DELTA:
        b = tl.load(projected + tokens * WIDTH + WIDTH - 2 * VALUE_HEADS + head, mask=is_own, other=0.0)
        strength = tl.sigmoid(b.to(tl.float32))
    kept = decays + (block * BLOCK_SIZE + in_block) * VALUE_HEADS + head
    before = tl.load(kept, mask=is_before, other=0.0)
    last = tl.sum(tl.where(number == position % CHUNK - 1, before, 0.0), axis=0)
    decay = tl.where(is_before, before, last + tl.cumsum(tl.where(is_own, g, 0.0), axis=0))
    tl.store(kept, decay, mask=is_own & (block > 0))
    tl.store(step_decays + tokens * VALUE_HEADS + head, decay, mask=is_own)
    tl.store(strengths + tokens * VALUE_HEADS + head, strength, mask=is_own)

    key = _keys_of_chunk(position % CHUNK, lines, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE)
    columns = tl.arange(0, KEY_DIM)
    query_lines = convolved + tokens * CHANNELS + key_head * KEY_DIM
    query = tl.load(query_lines[:, None] + columns[None, :], mask=is_own[:, None], other=0.0)
    since = decay[:, None] - decay[None, :]
    faded = tl.where(number[:, None] >= number[None, :], tl.exp(tl.minimum(since, 0.0)), 0.0)
    out_lines = (tokens * VALUE_HEADS + head) * CHUNK
    out_at = out_lines[:, None] + number[None, :]
    products = tl.dot(query, tl.trans(key), input_precision=PRECISION) * faded
    tl.store(mixed + out_at, products.to(mixed.dtype.element_ty), mask=is_own[:, None])
    if IS_DELTA:
        likeness = tl.dot(key, tl.trans(key), input_precision=PRECISION) * faded * strength[:, None]
        likeness = tl.where((number[:, None] > number[None, :]) & is_own[:, None], likeness, 0.0)
        inverse = tl.where(number[:, None] == number[None, :], 1.0, 0.0)
        for line in range(tl.maximum(position % CHUNK, 1), position % CHUNK + count):
            is_line = number == line
            factors = tl.sum(tl.where(is_line[:, None], likeness, 0.0), axis=0)
            change = tl.sum(factors[:, None] * inverse, axis=0)
            inverse = tl.where(is_line[:, None], inverse - change[None, :], inverse)
        tl.store(solved + out_at, inverse.to(solved.dtype.element_ty), mask=is_own[:, None])


@kernel_unspecialized("cell_stride", "state_stride", "first_row")
def _scan(
    convolved, keys, updates, states, skip, cell_tables, state_tables, query_starts, contexts, solved, mixed,
    step_decays, strengths, cell_decays, out, cell_stride, state_stride, first_row, IS_DELTA: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    PARTS: tl.constexpr = VALUE_DIM // OWN
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    head, row = tl.program_id(0) // PARTS, first_row + tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    first, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    context = tl.load(contexts + row)
    start = context - (end - first)
    cell_table, state_table = cell_tables + row * cell_stride, state_tables + row * state_stride
    number, keys_at = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    values_at = tl.program_id(0) % PARTS * OWN + tl.arange(0, OWN)
    slot = tl.load(state_table + tl.maximum(start // CHUNK - 1, 0), mask=start >= CHUNK, other=0).to(tl.int64)
    state_at = head * KEY_DIM * VALUE_DIM + keys_at[:, None] * VALUE_DIM + values_at[None, :]
    state = tl.load(states + slot * STATE + state_at, mask=everywhere(slot > 0, state_at), other=0.0)
    for chunk_start in range(start // CHUNK * CHUNK, context, CHUNK):
        position = tl.maximum(chunk_start, start)
        count = tl.minimum(chunk_start + CHUNK, context) - position
        token = (first + position - start).to(tl.int64)
        lines = _chunk_lines(position, count, start, token, cell_table, BLOCK_SIZE)
        is_before, is_own, in_block, block, tokens = lines
        own_decays = step_decays + tokens * VALUE_HEADS + head
        before = cell_decays + (block * BLOCK_SIZE + in_block) * VALUE_HEADS + head
        decay = tl.load(tl.where(is_own, own_decays, before), mask=is_own | is_before, other=0.0)
        strength = tl.load(strengths + tokens * VALUE_HEADS + head, mask=is_own, other=0.0)
        nothing = tl.zeros((CHUNK, OWN), tl.float32)
        value_lines = convolved + tokens * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        value = tl.load(value_lines[:, None] + values_at[None, :], mask=is_own[:, None], other=0.0).to(tl.float32)
        cells = updates + ((block * VALUE_HEADS + head) * BLOCK_SIZE + in_block) * VALUE_DIM
        key = _keys_of_chunk(
            position % CHUNK, lines, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE
        )
        from_state = tl.exp(decay)[:, None]
        matrix_at = ((tokens * VALUE_HEADS + head) * CHUNK)[:, None] + number[None, :]
        fresh = value
        if IS_DELTA:
            fresh -= _product(key, state, nothing, PRECISION) * from_state
        fresh *= strength[:, None]
        if position > chunk_start:  # of tokens before the row, updates are known
            fresh += tl.load(cells[:, None] + values_at[None, :], mask=is_before[:, None], other=0.0).to(tl.float32)
        update = fresh
        if IS_DELTA:
            inverse = tl.load(solved + matrix_at, mask=is_own[:, None], other=0.0)
            same = tl.where(number[:, None] == number[None, :], 1.0, 0.0).to(inverse.dtype)
            update = _product(tl.where(is_own[:, None], inverse, same), fresh, nothing, PRECISION)
        query_lines = convolved + tokens * CHANNELS + key_head * KEY_DIM
        query = tl.load(query_lines[:, None] + keys_at[None, :], mask=is_own[:, None], other=0.0)
        products = tl.load(mixed + matrix_at, mask=is_own[:, None], other=0.0)
        result = _product(query, state, nothing, PRECISION) * from_state
        result = _product(products, update, result, PRECISION)
        if not IS_DELTA:
            result += tl.load(skip + head) * value
        out_lines = out + (tokens * VALUE_HEADS + head) * VALUE_DIM
        tl.store(out_lines[:, None] + values_at[None, :], result, mask=is_own[:, None])
        is_kept = is_own & (block > 0)
        tl.store(cells[:, None] + values_at[None, :], update.to(updates.dtype.element_ty), mask=is_kept[:, None])
        if chunk_start + CHUNK <= context:
            last = tl.sum(tl.where(number == CHUNK - 1, decay, 0.0), axis=0)
            faded = update * tl.exp(last - decay)[:, None]
            state = _product(tl.trans(key), faded, state * tl.exp(last), PRECISION)
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
    spec, sizes, pieces, weights = args.spec, Sizes.of(args), plan.pieces, args.weights
    assert pieces is not None
    precision, heads, num_tokens = precision_of(projected), spec.value_heads, len(projected)
    mixed = projected.new_empty(num_tokens, heads, CHUNK.value)
    solved = torch.empty_like(mixed) if spec.rule == "delta" else mixed
    step_decays, strengths = torch.empty(2, num_tokens, heads, dtype=torch.float32, device=projected.device)
    _solve[(heads, len(pieces))](
        projected, weights.rates, weights.step_bias, convolved, cache.keys, cache.decays, plan.cells, pieces, solved,
        mixed, step_decays, strengths, plan.cells.stride(0), *step_numbers(spec), *sizes.shapes, plan.block_size,
        precision, num_warps=4, **launch_options(),
    )  # fmt: skip
    own, num_rows = min(spec.value_dim, MAX_VALUES), len(plan.contexts) - plan.num_single
    _scan[(heads * spec.value_dim // own, num_rows)](
        convolved, cache.keys, cache.updates, cache.states, sizes.or_any(weights.skip), plan.cells, plan.states,
        plan.query_starts, plan.contexts, solved, mixed, step_decays, strengths, cache.decays, out,
        plan.cells.stride(0), plan.states.stride(0), plan.num_single, *sizes.shapes, plan.block_size, own, precision,
        **SCAN, **launch_options(),
    )  # fmt: skip
