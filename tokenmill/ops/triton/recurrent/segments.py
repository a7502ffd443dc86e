"""Inputs and results of the solve step, per segment: tokens of a chunk in halves of 32, and the solved matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.recurrent.parts import CHUNK

HALF = tl.constexpr(32)


@triton.jit
def tokens_of(begin, segment, table, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return a part of a segment's chunk, tokens `begin` to `begin + COUNT`: their indices, masks of those before the
    segment (in cells) and in it, their offsets in blocks of cells, blocks, and tokens of the step."""
    position, count, token = segment
    at = position % CHUNK
    numbers = begin + tl.arange(0, COUNT)
    is_before, is_own = numbers < at, (numbers >= at) & (numbers < at + count)
    positions = position - at + numbers
    block = tl.load(table + positions // BLOCK_SIZE, mask=is_before | is_own, other=0).to(tl.int64)
    return numbers, is_before, is_own, positions % BLOCK_SIZE, block, token + numbers - at


@triton.jit
def load_keys(
    at, part, keys, convolved, key_head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load the keys of a chunk's tokens [N, D], zeros after the last one."""
    _, is_before, is_own, in_block, block, tokens = part
    columns = tl.arange(0, KEY_DIM)[None, :]
    own = tokens * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM
    found = tl.load(convolved + own[:, None] + columns, mask=is_own[:, None], other=0.0)
    if at > 0:  # the row begins within the chunk
        cells = ((block * KEY_HEADS + key_head) * BLOCK_SIZE + in_block) * KEY_DIM
        found += tl.load(keys + cells[:, None] + columns, mask=is_before[:, None], other=0.0)
    return found


@triton.jit
def load_queries(part, convolved, key_head, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    _, _, is_own, _, _, tokens = part
    offsets = (tokens * CHANNELS + key_head * KEY_DIM)[:, None] + tl.arange(0, KEY_DIM)[None, :]
    return tl.load(convolved + offsets, mask=is_own[:, None], other=0.0)


@triton.jit
def _inverse(matrix):
    """Return (1 + matrix)⁻¹ of a strictly lower triangular matrix [32, 32], row by row."""
    number = tl.arange(0, HALF)
    inverse = tl.where(number[:, None] == number[None, :], 1.0, 0.0)
    for row in range(1, HALF):
        is_row = number == row
        factors = tl.sum(tl.where(is_row[:, None], matrix, 0.0), axis=0)
        change = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(is_row[:, None], inverse - change[None, :], inverse)
    return inverse


@triton.jit
def store_tile(matrix, tile, part, begin, head, VALUE_HEADS: tl.constexpr):
    """Store the rows of a head's matrix that belong to tokens, columns `begin` to `begin + 32`."""
    _, _, is_own, _, _, tokens = part
    offsets = ((tokens * VALUE_HEADS + head) * CHUNK + begin)[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(matrix + offsets, tile.to(matrix.dtype.element_ty), mask=is_own[:, None])


@triton.jit
def store_solution(
    solved, alike, strengths, parts, head, VALUE_HEADS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute and store T = (1 + A)⁻¹ of a segment, where A is β_t times the decayed products k_t·k_j of its halves.
    Rows of tokens before the segment are those of the identity."""
    upper, lower = parts
    alike00, alike10, alike11 = alike
    i, j = upper[0], lower[0]
    share0, share1 = tl.where(upper[2], strengths[0], 0.0)[:, None], tl.where(lower[2], strengths[1], 0.0)[:, None]
    solved00 = _inverse(tl.where(i[:, None] > i[None, :], alike00 * share0, 0.0))
    solved11 = _inverse(tl.where(j[:, None] > j[None, :], alike11 * share1, 0.0))
    between = tl.dot(alike10 * share1, solved00, input_precision=PRECISION)
    store_tile(solved, solved00, upper, 0, head, VALUE_HEADS)
    store_tile(solved, tl.zeros((HALF, HALF), tl.float32), upper, HALF, head, VALUE_HEADS)
    store_tile(solved, -tl.dot(solved11, between, input_precision=PRECISION), lower, 0, head, VALUE_HEADS)
    store_tile(solved, solved11, lower, HALF, head, VALUE_HEADS)
