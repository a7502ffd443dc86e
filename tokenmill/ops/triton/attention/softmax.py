"""The online softmax of attention, tile by tile as in FlashAttention, and loads of tiles from the paged cache.

A query that has processed some of its keys has a state; more keys update it, states of different keys can be merged,
and the result is the state's weighted values divided by its sum:

    m_i   the highest score so far, in powers of two
    l_i   Σ exp2(score - m_i)
    acc   Σ exp2(score - m_i) * value

Scores of keys that a query does not see are -inf: they change no bit of its state, because m_i starts with a finite
number. Functions here take tuples, which have no cost in compiled code: `cache` is (keys, values, key scales, value
scales), `state` is (m_i, l_i, acc).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.elementwise.activation import tanh

LOG2E = tl.constexpr(1.4426950408889634)  # exponentials are computed as powers of two
LOWEST = tl.constexpr(-1e30)  # m_i before the first key
NO_WINDOW = 1 << 30


def window_of(args: AttentionArgs) -> int:
    """Return the window as a kernel argument: negative for chunked attention."""
    window = args.window or NO_WINDOW
    return -window if args.is_chunked else window


@triton.jit
def oldest_seen(position, window):
    """Return the position of the oldest key that a query sees."""
    size = tl.abs(window)
    return tl.where(window > 0, tl.maximum(position - size + 1, 0), position // size * size)


@triton.jit
def oldest_of_tile(q_positions, window):
    """Return the position of the oldest key that any of a tile's queries sees. Keys before it must not be loaded, not
    even to give them a score of -inf: blocks before a window are released, and 0 times what is there now may be NaN."""
    return tl.min(oldest_seen(q_positions, window), axis=0)


@triton.jit
def empty_state(QUERIES: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Return the state of queries before their first key."""
    m_i = tl.full((QUERIES,), LOWEST, tl.float32)
    l_i = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, DIM_PADDED), tl.float32)
    return m_i, l_i, acc


@triton.jit
def load_kv_rows(table, kv_head, offs_n, inside, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the cache rows of positions offs_n of a sequence, for one KV head."""
    blocks = tl.load(table + offs_n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + offs_n % BLOCK_SIZE


@triton.jit
def load_scale(scales, kv_rows, inside, IS_SCALED: tl.constexpr):
    """Load the scales of a tile's keys or values, or a placeholder if there are none."""
    scale = inside
    if IS_SCALED:
        scale = tl.load(scales + kv_rows, mask=inside, other=0.0)
    return scale


@triton.jit
def attention_scores(
    query, key, key_scale, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of query [M, D] and key [N, D] as exponents of two, [M, N]."""
    qk = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if IS_SCALED:
        qk *= key_scale[None, :]
    if HAS_SOFTCAP:
        qk = softcap * tanh(qk / softcap)
    return qk * LOG2E


@triton.jit
def add_keys(state, qk, value, value_scale, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """Return the state after more keys, with scores qk [M, N] and values [N, D]."""
    m_i, l_i, acc = state
    m_new = tl.maximum(m_i, tl.max(qk, axis=1))
    p = tl.exp2(qk - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    if IS_SCALED:
        p *= value_scale[None, :]
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i, acc


@triton.jit
def merge_states(state, other):
    """Merge two states."""
    m_i, l_i, acc = state
    other_m, other_l, other_acc = other
    m_new = tl.maximum(m_i, other_m)
    alpha, beta = tl.exp2(m_i - m_new), tl.exp2(other_m - m_new)
    return m_new, l_i * alpha + other_l * beta, acc * alpha[:, None] + other_acc * beta[:, None]


@triton.jit
def attention_output(state, sink, HAS_SINKS: tl.constexpr):
    """Return the attention output [M, D]. A sink [M] is a score that counts in the sum and has no value."""
    m_i, l_i, acc = state
    if HAS_SINKS:
        l_i += tl.exp2(sink * LOG2E - m_i)
    return acc / tl.maximum(l_i, 1e-30)[:, None]
