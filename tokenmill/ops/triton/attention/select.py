"""Selection of the attention kernel for the rows of a step that are computed together: one ordered table.

    one query per row    a few rows: cache write and attention in one kernel, each context split over many programs;
                         more rows: the decode kernel, with fewer splits the more rows there are
    a chunk of a prompt  the prefill kernel, which reads the paged cache; for short chunks over long contexts, with the
                         context split over many programs
    a whole long prompt  torch's dense attention over keys gathered from the cache, if it supports the layer

The kernels' callers use the functions here; `tokenmill doctor --kernels` prints the table. Needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenmill.ops.triton.launch.capabilities import Capabilities

TILE = 64  # keys per iteration
MAX_SPLITS = 32  # per context
MAX_CHUNK_ROUNDS = 4  # waves of programs: limits the number of splits and the size of their results
MERGE_COST = 0.01  # of a program's time, per split
SPLIT_CHUNK = 1024  # tokens; longer chunks have enough tiles
CHUNK_SPLIT_KEYS = 512  # fewest keys per split of a chunk, since a split's result has to be read again
DENSE_HEAD_DIMS = (64, 96, 128)
MAX_FUSED_HEAD_DIM = 256
MAX_FUSED_ROWS = 16  # also with few KV heads, as one of eight ranks has them


class ChunkCut(NamedTuple):
    """How a short chunk is cut into tiles."""

    queries: int  # per tile, over all heads of a KV head
    at_once: int  # programs resident per multiprocessor


# A chunk that fits into a small tile leaves room for two programs, of which one computes while the other waits for its
# keys. More queries in large tiles read every key half as often from the L2 cache.
SMALL_CUT, LARGE_CUT = ChunkCut(64, 2), ChunkCut(128, 1)


class AttentionStep(NamedTuple):
    """The properties of rows computed together that attention selection uses."""

    num_rows: int
    num_queries: int  # per row
    context: int  # of the longest row, including its queries
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
    """Return the number of splits of a context: enough to fill the GPU, but each with at least one tile; a power of
    two, so that few variants are compiled."""
    wanted = gpu.tuning.attention_decode_programs // max(1, num_rows * kv_heads)
    splits = max(1, min(wanted, MAX_SPLITS, -(-max_context // TILE)))
    return 1 << (splits.bit_length() - 1)


def chunk_cut(num_tokens: int, num_heads: int, kv_heads: int) -> ChunkCut:
    """Return how chunks of `num_tokens` tokens together are cut into tiles."""
    return SMALL_CUT if num_tokens * padded_group(num_heads, kv_heads) <= SMALL_CUT.queries else LARGE_CUT


def padded_group(num_heads: int, kv_heads: int) -> int:
    """Return the heads of a KV head in a tile of queries, a power of two."""
    return 1 << (num_heads // kv_heads - 1).bit_length()


def num_chunk_splits(num_tokens: int, num_heads: int, kv_heads: int, max_context: int, gpu: Capabilities) -> int:
    """Return the number of splits of the context of each tile, for chunks of `num_tokens` tokens together; 1: use the
    prefill kernel. All programs take about the same time, so the number is chosen such that the last wave of programs
    is nearly full."""
    cut = chunk_cut(num_tokens, num_heads, kv_heads)
    tiles = max(1, num_tokens * padded_group(num_heads, kv_heads) // cut.queries) * kv_heads
    at_once = cut.at_once * gpu.tuning.multiprocessors
    most = min(MAX_SPLITS, max_context // CHUNK_SPLIT_KEYS, MAX_CHUNK_ROUNDS * at_once // tiles)
    if num_tokens > SPLIT_CHUNK or most < 2:
        return 1

    def rounds(splits: int) -> float:
        if splits == 1:  # of the prefill kernel, whose tiles are small and of one head
            programs = -(-num_tokens // SMALL_CUT.queries) * num_heads
            return float(-(-programs // (SMALL_CUT.at_once * gpu.tuning.multiprocessors)))
        return -(-tiles * splits // at_once) / splits * (1.0 + MERGE_COST * splits)

    return min(range(1, most + 1), key=rounds)


def takes_fused_decode(num_rows: int, kv_heads: int, head_dim: int, max_context: int, gpu: Capabilities) -> bool:
    """Return whether rows of one query each are so few that gaps between kernels dominate: every split prepares the
    queries again. Tiles of larger heads do not fit in registers."""
    splits = num_splits_for(num_rows, kv_heads, max_context, gpu)
    are_few = num_rows <= MAX_FUSED_ROWS and splits >= gpu.tuning.attention_fused_min_splits
    return are_few and head_dim <= MAX_FUSED_HEAD_DIM


def is_whole_prompt(num_queries: int, context: int, gpu: Capabilities) -> bool:
    """Return whether a row is a prompt that begins and ends in this step and is long enough for dense attention."""
    return num_queries == context >= gpu.tuning.attention_dense_min_tokens


def can_be_dense(dtype: torch.dtype, head_dim: int, *, has_extras: bool) -> bool:
    """Return whether torch's attention supports the layer."""
    return not has_extras and dtype != torch.float32 and head_dim in DENSE_HEAD_DIMS


ATTENTION: tuple[AttentionRow, ...] = (
    AttentionRow(
        "fused_decode",
        lambda s: (
            s.num_queries == 1 and takes_fused_decode(s.num_rows, s.kv_heads, s.head_dim, s.context, s.capabilities)
        ),
        "few decoding rows: norm, RoPE, cache write and attention are one kernel",
    ),
    AttentionRow(
        "decode",
        lambda s: s.num_queries == 1,
        "one query per row: every cached key is read once for all heads that share it",
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
        "short chunks over long contexts: the heads of a KV head in one tile, each context split over programs",
    ),
    AttentionRow("prefill", lambda s: True, "chunks of prompts, over the paged cache"),
)


def choose_attention(step: AttentionStep) -> AttentionRow:
    return next(row for row in ATTENTION if row.accepts(step))
