"""Selection of the attention kernel for the rows of a step that are computed together: one ordered table.

    one query a row      a few rows: cache write and attention in one kernel, each context split among many programs;
                         more rows: the decode kernel, with fewer splits as rows become more
    a chunk of a prompt  the prefill kernel, which reads the paged cache; a short one over a long context, with its
                         context split among many programs
    a whole long prompt  torch's dense attention over keys gathered from the cache, where it has what the layer needs

The kernels ask the functions here; `tokenmill doctor --kernels` prints the table. Needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenmill.ops.triton.launch.capabilities import Capabilities

TILE = 64  # keys that a program looks at together
MAX_SPLITS = 32  # of a context
CHUNK_TILE = 64  # queries of a short chunk that a program computes together, of all heads of a KV head
CHUNK_TILES_AT_ONCE = 2  # such programs that a multiprocessor has room for
MAX_CHUNK_ROUNDS = 4  # of as many programs as there is room for: bounds what splits leave
MERGE_COST = 0.01  # of a program's time, for each split
SPLIT_CHUNK = 1024  # tokens: longer chunks have enough tiles
CHUNK_SPLIT_KEYS = 512  # the fewest keys of a chunk's split: what it leaves has to be read again
DENSE_HEAD_DIMS = (64, 96, 128)
MAX_FUSED_HEAD_DIM = 256


class AttentionStep(NamedTuple):
    """Rows that are computed together, as attention selection sees them."""

    num_rows: int
    num_queries: int  # of each row in this step
    context: int  # of the longest row, its queries included
    num_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries
    has_extras: bool  # a window, a softcap or sinks
    capabilities: Capabilities


class AttentionRow(NamedTuple):
    name: str
    accepts: Callable[[AttentionStep], bool]
    why: str


def num_splits_for(num_rows: int, kv_heads: int, max_context: int, gpu: Capabilities) -> int:
    """The number of programs that share a context: so many that all programs together fill the GPU, but each with a
    tile of its own. A power of two, so that few variants are compiled."""
    wanted = gpu.tuning.attention_decode_programs // max(1, num_rows * kv_heads)
    splits = max(1, min(wanted, MAX_SPLITS, -(-max_context // TILE)))
    return 1 << (splits.bit_length() - 1)


def num_chunk_splits(num_tokens: int, num_heads: int, kv_heads: int, max_context: int, gpu: Capabilities) -> int:
    """The number of programs that share the context of each tile of chunks with so many tokens together. All programs
    take about as long, so one more than there is room for takes as long again as all before it: so many that the last
    round is nearly full. 1: whole contexts, a head at a time."""
    group = 1 << (num_heads // kv_heads - 1).bit_length()
    tiles = max(1, num_tokens * group // CHUNK_TILE) * kv_heads
    at_once = CHUNK_TILES_AT_ONCE * gpu.tuning.multiprocessors
    most = min(MAX_SPLITS, max_context // CHUNK_SPLIT_KEYS, MAX_CHUNK_ROUNDS * at_once // tiles)
    if num_tokens > SPLIT_CHUNK or most < 2:
        return 1

    def rounds(splits: int) -> float:
        programs = tiles * splits if splits > 1 else -(-num_tokens // CHUNK_TILE) * num_heads
        return -(-programs // at_once) / splits * (1.0 + MERGE_COST * splits)

    return min(range(1, most + 1), key=rounds)


def takes_fused_decode(num_rows: int, kv_heads: int, head_dim: int, max_context: int, gpu: Capabilities) -> bool:
    """Return whether rows of one query each are so few that the gaps between kernels take most of the time. Tiles of
    larger heads have no room in registers."""
    splits = num_splits_for(num_rows, kv_heads, max_context, gpu)
    return splits >= gpu.tuning.attention_fused_min_splits and head_dim <= MAX_FUSED_HEAD_DIM


def is_whole_prompt(num_queries: int, context: int, gpu: Capabilities) -> bool:
    """Return whether a row is a prompt that begins and ends in this step and is long enough for dense attention."""
    return num_queries == context >= gpu.tuning.attention_dense_min_tokens


def can_be_dense(dtype: torch.dtype, head_dim: int, *, has_extras: bool) -> bool:
    """Return whether torch's attention computes what the layer needs."""
    return not has_extras and dtype != torch.float32 and head_dim in DENSE_HEAD_DIMS


ATTENTION: tuple[AttentionRow, ...] = (
    AttentionRow(
        "fused_decode",
        lambda s: (
            s.num_queries == 1 and takes_fused_decode(s.num_rows, s.kv_heads, s.head_dim, s.context, s.capabilities)
        ),
        "few rows decode: norm, rotation, cache write and attention are one kernel",
    ),
    AttentionRow(
        "decode",
        lambda s: s.num_queries == 1,
        "one query a row: every cached key is read once for all heads that share it",
    ),
    AttentionRow(
        "dense_prefill",
        lambda s: (
            is_whole_prompt(s.num_queries, s.context, s.capabilities)
            and can_be_dense(s.dtype, s.head_dim, has_extras=s.has_extras)
        ),
        "whole long prompts: torch's attention (cuDNN) over gathered keys",
    ),
    AttentionRow(
        "split_prefill",
        lambda s: num_chunk_splits(s.num_rows * s.num_queries, s.num_heads, s.kv_heads, s.context, s.capabilities) > 1,
        "short chunks over long contexts: the heads of a KV head in one tile, each context split among programs",
    ),
    AttentionRow("prefill", lambda s: True, "chunks of prompts, over the paged cache"),
)


def choose_attention(step: AttentionStep) -> AttentionRow:
    return next(row for row in ATTENTION if row.accepts(step))
