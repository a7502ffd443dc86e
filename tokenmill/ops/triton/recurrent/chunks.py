"""The recurrence of prompts in chunks of 64 tokens, as matrix products (formulas in `arch/recurrent.py`).

    solve   all segments in parallel: decays G, per head T = (1 + A)⁻¹ with A_tj = β_t e^{G_t - G_j} k_t·k_j, j < t,
            and P_tj = e^{G_t - G_j} q_t·k_j, j <= t. Row t belongs to a token: [T, heads, 64] each
    scan    a row's segments sequentially, some values of a head per program: with the state S before the chunk

            U = T β (V - e^G K S)        O = e^G Q S + P U        S' = e^{G_64} S + (e^{G_64 - G} K)ᵀ U

If a row begins within a chunk, the tokens before it are cells: their keys and updates are known, so their rows of T are
those of the identity, and T is multiplied by their updates. Mamba-2 has no T: its updates are dt · v. With decays per
key channel, e^G is applied to keys and queries, e^G ∘ K, and `channels.py` computes their products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, precision_of
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.recurrent.channels import solve_channels
from tokenmill.ops.triton.recurrent.parts import CHUNK, decays_in_cell, everywhere, key_head_of
from tokenmill.ops.triton.recurrent.plan import RecurrentBatch
from tokenmill.ops.triton.recurrent.segments import load_keys, load_queries, tokens_of
from tokenmill.ops.triton.recurrent.sizes import Sizes, step_numbers
from tokenmill.ops.triton.recurrent.solve import solve

SCAN, SCAN_CHANNELS = {"num_warps": 4, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}
MAX_VALUES, MAX_CHANNEL_VALUES = 16, 32  # values of a head per program of `scan`


@triton.jit
def _product(x, matrix, acc, PRECISION: tl.constexpr):
    """Add x [M, K] float32 times a matrix [K, N] in the dtype of activations to acc; with 16-bit activations, x is
    split in two 16-bit parts."""
    if matrix.dtype == tl.float32:
        return tl.dot(x, matrix, acc, input_precision=PRECISION)
    high = x.to(matrix.dtype)
    low = (x - high.to(tl.float32)).to(matrix.dtype)
    return tl.dot(high, matrix, tl.dot(low, matrix, acc))


@triton.jit
def _load_decays(part, step_decays, cell_decays, head, HEADS: tl.constexpr, DECAYS: tl.constexpr, SIZE: tl.constexpr):
    """Load the decays of a chunk's tokens, [64], or [64, DECAYS] with decays per channel; zeros after the last one."""
    _, is_before, is_own, in_block, block, tokens = part
    before = decays_in_cell(cell_decays, block, in_block, head, HEADS, DECAYS, SIZE)
    found = tl.where(is_own, step_decays + (tokens * HEADS + head) * DECAYS, before)
    is_there = is_own | is_before
    if DECAYS > 1:
        decay = tl.load(found[:, None] + tl.arange(0, DECAYS)[None, :], mask=is_there[:, None], other=0.0)
    else:
        decay = tl.load(found, mask=is_there, other=0.0)
    return decay


@triton.jit
def _recalled(state, vectors, decay, DECAYS: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply a state [OWN, KEY_DIM], decayed up to each token, by vectors [64, KEY_DIM]: [OWN, 64]."""
    nothing = tl.zeros((state.shape[0], vectors.shape[0]), tl.float32)
    if DECAYS > 1:
        found = _product(state, tl.trans(vectors.to(tl.float32) * tl.exp(decay)), nothing, PRECISION)
    else:
        found = _product(state, tl.trans(vectors), nothing, PRECISION) * tl.exp(decay)[None, :]
    return found


@triton.jit
def _next_state(state, key, update, decay, DECAYS: tl.constexpr, PRECISION: tl.constexpr):
    number = tl.arange(0, CHUNK)
    if DECAYS > 1:
        last = tl.sum(tl.where((number == CHUNK - 1)[:, None], decay, 0.0), axis=0)
        kept = key.to(tl.float32) * tl.exp(last[None, :] - decay)
        following = _product(update, kept, state * tl.exp(last)[None, :], PRECISION)
    else:
        last = tl.sum(tl.where(number == CHUNK - 1, decay, 0.0), axis=0)
        following = _product(update * tl.exp(last - decay)[None, :], key, state * tl.exp(last), PRECISION)
    return following


@kernel_unspecialized("cell_stride", "state_stride", "first_row")
def _scan(
    convolved, keys, updates, states, skip, cell_tables, state_tables, query_starts, contexts, solved, mixed,
    step_decays, strengths, cell_decays, out, cell_stride, state_stride, first_row, IS_DELTA: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, IS_TILED: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """All matrices are transposed: a state is [own values, key dim], so that it and its products are the factors that
    tensor cores read from registers."""
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
        part = tokens_of(0, segment, cell_table, CHUNK, BLOCK_SIZE)
        _, is_before, is_own, in_block, block, tokens = part
        decay = _load_decays(part, step_decays, cell_decays, head, VALUE_HEADS, DECAYS, BLOCK_SIZE)
        strength = tl.load(strengths + tokens * VALUE_HEADS + head, mask=is_own, other=0.0)
        value_offsets = tokens * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        value = tl.load(convolved + value_offsets[None, :] + values_at[:, None], mask=is_own[None, :], other=0.0)
        value = value.to(tl.float32)
        key = load_keys(
            position - chunk_start, part, keys, convolved, key_head, KEY_HEADS, KEY_DIM, CHANNELS, BLOCK_SIZE
        )
        nothing = tl.zeros((OWN, CHUNK), tl.float32)
        matrix_at = ((tokens * VALUE_HEADS + head) * CHUNK)[:, None] + number[None, :]
        cells = ((block * VALUE_HEADS + head) * BLOCK_SIZE + in_block) * VALUE_DIM
        cells_at = cells[None, :] + values_at[:, None]
        fresh = value
        if IS_DELTA:
            fresh -= _recalled(state, key, decay, DECAYS, PRECISION)
        fresh *= strength[None, :]
        if position > chunk_start:  # the updates of tokens before the row are known
            fresh += tl.load(updates + cells_at, mask=is_before[None, :], other=0.0).to(tl.float32)
        update = fresh
        if IS_DELTA:
            inverse = tl.load(solved + matrix_at, mask=is_own[:, None], other=0.0)
            same = tl.where(number[:, None] == number[None, :], 1.0, 0.0).to(inverse.dtype)
            update = _product(fresh, tl.trans(tl.where(is_own[:, None], inverse, same)), nothing, PRECISION)
        query = load_queries(part, convolved, key_head, KEY_DIM, CHANNELS)
        products = tl.load(mixed + matrix_at, mask=is_own[:, None], other=0.0)
        result = _recalled(state, query, decay, DECAYS, PRECISION)
        result = _product(update, tl.trans(products), result, PRECISION)
        if not IS_DELTA:
            result += tl.load(skip + head) * value
        out_at = ((tokens * VALUE_HEADS + head) * VALUE_DIM)[None, :] + values_at[:, None]
        tl.store(out + out_at, result, mask=is_own[None, :])
        is_kept = is_own & (block > 0)
        tl.store(updates + cells_at, update.to(updates.dtype.element_ty), mask=is_kept[None, :])
        if chunk_start + CHUNK <= context:
            state = _next_state(state, key, update, decay, DECAYS, PRECISION)
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
    """Compute the rows of several tokens; out: float32 [T, values], before gate and norm."""
    spec, sizes, segments, weights = args.spec, Sizes.of(args), plan.segments, args.weights
    assert segments is not None
    precision, heads, num_tokens = precision_of(projected), spec.value_heads, len(projected)
    mixed = projected.new_empty(num_tokens, heads, CHUNK.value)
    solved = torch.empty_like(mixed) if spec.rule == "delta" else mixed
    strengths = torch.empty(num_tokens, heads, dtype=torch.float32, device=projected.device)
    step_decays = torch.empty(num_tokens, spec.num_decays, dtype=torch.float32, device=projected.device)
    solving, warps = (solve_channels, 8) if spec.has_channel_decays else (solve, 1)
    solving[(heads, len(segments))](
        projected, weights.rates, weights.step_bias, convolved, cache.keys, cache.decays, plan.cells, segments, solved,
        mixed, step_decays, strengths, plan.cells.stride(0), *step_numbers(spec), *sizes.shapes, plan.block_size,
        precision, spec.is_tiled, num_warps=warps, **launch_options(),
    )  # fmt: skip
    most, options = (MAX_CHANNEL_VALUES, SCAN_CHANNELS) if spec.has_channel_decays else (MAX_VALUES, SCAN)
    own, num_rows = min(spec.value_dim, most), len(plan.contexts) - plan.num_single
    _scan[(heads * spec.value_dim // own, num_rows)](
        convolved, cache.keys, cache.updates, cache.states, sizes.or_any(weights.skip), plan.cells, plan.states,
        plan.query_starts, plan.contexts, solved, mixed, step_decays, strengths, cache.decays, out,
        plan.cells.stride(0), plan.states.stride(0), plan.num_single, *sizes.shapes, plan.block_size, own, precision,
        spec.is_tiled, **options, **launch_options(),
    )  # fmt: skip
