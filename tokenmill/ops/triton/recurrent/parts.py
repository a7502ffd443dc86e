"""Functions shared by both forms of a recurrent mixer: inputs of the convolution, decay and step, gate and norm.

The inputs of a row's convolution are in three places: those of this step in the projections, earlier ones of its chunk
in cells, and those before the chunk in the tail of its state:

    tail of state 1 | cells of 64 .. 99 | projections of 100 .. 120          a row of 21 tokens from position 100 on

Functions here take tuples, which have no cost in compiled code: `row` is (first token, first position, table of cells,
slot of the state before the row's chunk), `sources` is (projections, inputs in cells, tails).
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
NO_NORM, NORM_FIRST, GATE_FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def everywhere(condition, like):
    """Broadcast a condition to a mask of the shape of the integers `like`."""
    return like * 0 + condition.to(tl.int32) > 0


@triton.jit
def key_head_of(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, IS_TILED: tl.constexpr):
    """Return the key head of a value head: neighbouring value heads share one, or (IS_TILED) value heads cycle over
    them."""
    return head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), accurate for small results too."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-4, small * (1.0 - 0.5 * small), tl.log(1.0 + small))


@triton.jit
def decays_of(head, DECAYS: tl.constexpr):
    """Return the indices of a value head's decays: one, or one per key channel."""
    return head if DECAYS == 1 else head * DECAYS + tl.arange(0, DECAYS)


@triton.jit
def decays_in_cell(decays, block, at, head, HEADS: tl.constexpr, DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offset of a value head's first decay in a token's cell."""
    number = (block * BLOCK_SIZE + at) * HEADS + head if DECAYS == 1 else (block * HEADS + head) * BLOCK_SIZE + at
    return decays + number * DECAYS


@triton.jit
def step_of(a, head, numbers, rates, step_bias, step_scale, min_step, max_step):
    """Return (g, dt) of projected a."""
    dt = softplus(a.to(tl.float32) * step_scale + tl.load(step_bias + numbers))
    dt = tl.minimum(tl.maximum(dt, min_step), max_step)
    return tl.load(rates + head) * dt, dt


@triton.jit
def input_rows(
    at, row, sources, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return pointers to the inputs at positions `at` of a row, and whether they exist."""
    first, start, table, slot = row
    projected, conv_inputs, tails = sources
    chunk_start = start // CHUNK * CHUNK
    in_step, in_cells = at >= start, (at >= chunk_start) & (at < start)
    inside = tl.maximum(at, 0)
    block = tl.load(table + inside // BLOCK_SIZE, mask=in_cells, other=0).to(tl.int64)
    cells = conv_inputs + (block * BLOCK_SIZE + inside % BLOCK_SIZE) * CHANNELS
    tail = tails + (slot * (KERNEL - 1) + (KERNEL - 1 - chunk_start + at)) * CHANNELS
    here = projected + (first + at - start).to(tl.int64) * WIDTH
    inputs = tl.where(in_step, here, tl.where(in_cells, cells, tail))
    return inputs, in_step | in_cells | ((at >= 0) & everywhere(slot > 0, at))


@triton.jit
def unit(x, axis: tl.constexpr):
    """Normalise vectors to length one."""
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, axis=axis) + 1e-6), axis)
