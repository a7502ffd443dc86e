"""Attention and what precedes it (norm of q and k, rope, cache write): kernels in the interpreter.

Decode rows, chunks of prompts, whole prompts, and the fused decode kernel, over caches of every precision,
against the reference ops.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.support.triton_inputs import assert_near, paged_batch, random_cache
from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.reference.kv_rounding import LARGEST
from tokenmill.ops.triton.attention.decode import fused_decode_attention
from tokenmill.ops.triton.attention.kv_cache import norm_rope_write_kv
from tokenmill.ops.triton.attention.prefill import dense_prefill_attention
from tokenmill.ops.triton.attention.split_prefill import split_prefill_attention
from tokenmill.ops.triton.build import build_ops

OPS = build_ops()
CACHE_ERROR = {torch.int8: 0.01, torch.float8_e4m3fn: 0.1}  # of one vector; the interpreter truncates to fp8
DECODE, MIXED = [(1, 90), (1, 3), (1, 200)], [(1, 70), (37, 37), (5, 50)]
ONE_BYTE = [torch.int8, torch.float8_e4m3fn]


def args_of(kind: str) -> AttentionArgs:
    """Plain attention, or everything at once: window, soft cap and sinks of two heads."""
    if kind == "plain":
        return AttentionArgs(0.3)
    if kind == "chunks":
        return AttentionArgs(0.3, window=23, is_chunked=True)
    return AttentionArgs(0.3, window=23, softcap=2.0, sinks=torch.randn(2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "has_norm"),
    [(4, 2, 20, 20, False), (3, 1, 16, 8, True), (2, 2, 16, 0, False)],
)
def test_norm_rope_and_cache_write(heads: int, kv_heads: int, dim: int, rotary: int, has_norm: bool) -> None:
    tokens, block = 3, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    angles = (torch.randn(tokens, rotary // 2), torch.randn(tokens, rotary // 2)) if rotary else None
    norms = (torch.randn(dim), torch.randn(dim)) if has_norm else None
    slots = torch.tensor([9, 4, 11])
    caches = [LayerCache(torch.zeros(3, kv_heads, block, dim), torch.zeros(3, kv_heads, block, dim)) for _ in range(2)]
    queries = norm_rope_write_kv(qkv, caches[0], slots, norms, 1e-6, angles)
    q, k, v = (part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    if norms:
        q, k = PLAIN.rms_norm(q, norms[0], 1e-6), PLAIN.rms_norm(k, norms[1], 1e-6)
    if angles:
        q, k = PLAIN.rotate(q, *angles), PLAIN.rotate(k, *angles)
    PLAIN.write_kv(caches[1], k, v, slots)
    assert_near(queries, q)
    assert_near(caches[0].keys, caches[1].keys)
    assert_near(caches[0].values, caches[1].values)


@pytest.mark.parametrize("dtype", LARGEST)
def test_one_byte_cache_write_keeps_what_the_reference_keeps(dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, dim, block = 3, 4, 2, 20, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    slots = torch.tensor([9, 4, 11])
    shape = (3, kv_heads, block)
    caches = [LayerCache(*torch.zeros(2, *shape, dim).to(dtype), *torch.zeros(2, *shape)) for _ in range(2)]
    norm_rope_write_kv(qkv, caches[0], slots, None, 1e-6, None)
    _, k, v = (part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    PLAIN.write_kv(caches[1], k, v, slots)
    for part in ("keys", "values"):
        ours, theirs = (getattr(cache, part).float() for cache in caches)
        scales = [getattr(cache, f"{part.removesuffix('s')}_scales") for cache in caches]
        assert_near(*scales)
        # The interpreter truncates to fp8 where a GPU rounds.
        assert_near(ours, theirs, tolerance=0.07 if dtype == torch.float8_e4m3fn else 1e-3)


def check_attention(
    heads: int, kv_heads: int, dim: int, args: AttentionArgs, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    batch = paged_batch(lengths, 16)
    cache = random_cache(1 + batch.groups[0].block_tables.numel(), kv_heads, dim, dtype)
    queries = torch.randn(sum(count for count, _ in lengths), heads, dim)
    plans = [ops.plan_attention(batch, 0, args.window, is_chunked=args.is_chunked) for ops in (OPS, PLAIN)]
    found = [ops.attention(queries, cache, plan, args) for ops, plan in zip((OPS, PLAIN), plans, strict=True)]
    assert_near(*found, tolerance=1e-4)


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kind", "dtype"),
    [
        (4, 2, 20, "plain", torch.float32),
        (2, 1, 16, "all", torch.float32),
        (2, 1, 16, "chunks", torch.float32),
        (2, 1, 512, "plain", torch.float32),
        *((2, 1, 16, "all", dtype) for dtype in ONE_BYTE),
    ],
)
def test_paged_attention(
    heads: int, kv_heads: int, dim: int, kind: str, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    check_attention(heads, kv_heads, dim, args_of(kind), dtype, lengths)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kind", "dtype"),
    [
        (4, 2, 20, "plain", torch.float32),
        (3, 1, 16, "plain", torch.float32),
        (2, 1, 16, "all", torch.float32),
        (2, 1, 16, "chunks", torch.float32),
        (2, 2, 16, "all", torch.int8),
    ],
)
def test_short_chunks_share_their_contexts_among_programs(
    heads: int, kv_heads: int, dim: int, kind: str, dtype: torch.dtype
) -> None:
    lengths = [(1, 70), (3, 3), (37, 1100), (5, 1029)]
    with (
        patch("tokenmill.ops.triton.attention.step.split_prefill_attention", wraps=split_prefill_attention) as split,
        patch("tokenmill.ops.triton.attention.step.num_chunk_splits", lambda *_: 5),
    ):
        check_attention(heads, kv_heads, dim, args_of(kind), dtype, lengths)
    assert split.called


@pytest.mark.parametrize("kind", ["chunks", "everything"])
@pytest.mark.parametrize("way", ["decode", "prefill", "split_prefill", "deterministic"])
def test_blocks_before_a_window_are_not_read(way: str, kind: str) -> None:
    """Released blocks hold whatever other sequences, or padding, have written there since."""
    lengths = DECODE if way == "decode" else [(1, 200), (5, 150), (3, 90)]
    batch, args = paged_batch(lengths, 16), args_of(kind)
    cache = random_cache(1 + batch.groups[0].block_tables.numel(), 1, 16, torch.float32)
    queries = torch.randn(sum(count for count, _ in lengths), 2, 16)
    ops = build_ops(deterministic=way == "deterministic")
    plan = ops.plan_attention(batch, 0, args.window, is_chunked=args.is_chunked)

    def attended() -> torch.Tensor:
        if way != "split_prefill":
            return ops.attention(queries, cache, plan, args)
        out = torch.zeros_like(queries)
        tables = (plan.tables, plan.query_starts, plan.contexts)
        split_prefill_attention(queries, cache, *tables, range(3), len(queries), args, out, 2)
        return out.flatten(1)

    expected = attended()
    for table, (count, context) in zip(batch.groups[0].block_tables, lengths, strict=True):
        oldest = context - count - 22 if kind == "everything" else (context - count) // 23 * 23
        released = table[: max(oldest, 0) // 16].long()
        cache.keys[released] = cache.values[released] = float("nan")
    assert torch.equal(attended(), expected)


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_whole_prompts_of_one_length_are_attended_densely(dtype: torch.dtype) -> None:
    check_dense_prefill(dtype)


def check_dense_prefill(dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 4, 2, 16
    batch = paged_batch([(21, 21), (21, 21)], 16)
    tables = batch.groups[0].block_tables
    cache, args = random_cache(1 + tables.numel(), kv_heads, dim, dtype), AttentionArgs(0.3)
    queries = torch.randn(42, heads, dim)
    found = dense_prefill_attention(queries.view(2, 21, heads, dim), cache, tables, args).flatten(0, 1).flatten(1)
    assert_near(found, PLAIN.attention(queries, cache, PLAIN.plan_attention(batch, 0, None), args), tolerance=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "kind", "dtype"),
    [
        (4, 2, 20, 20, "plain", torch.float32),
        (2, 1, 16, 0, "all", torch.float32),
        *((2, 1, 16, 8, "all", dtype) for dtype in ONE_BYTE),
    ],
)
def test_fused_decode_attention(
    heads: int, kv_heads: int, dim: int, rotary: int, kind: str, dtype: torch.dtype
) -> None:
    check_fused_decode(heads, kv_heads, dim, rotary, args_of(kind), dtype)


def check_fused_decode(
    heads: int, kv_heads: int, dim: int, rotary: int, args: AttentionArgs, dtype: torch.dtype
) -> None:
    """Compare writing and attending in one kernel with one after the other; one of the rows is padding."""
    contexts, block = [90, 0, 1, 65, 200], 16
    batch = paged_batch([(1, context) for context in contexts], block)
    tables = batch.groups[0].block_tables
    first = random_cache(1 + tables.numel(), kv_heads, dim, dtype)
    caches = [first, LayerCache(*(part.clone() for part in vars(first).values() if part is not None))]
    newest = (batch.context_lens.long() - 1).clamp(min=0)
    slots = tables.long().gather(1, (newest // block).unsqueeze(1)).squeeze(1) * block + newest % block
    slots[1] = 0  # the null block
    qkv = torch.randn(len(contexts), (heads + 2 * kv_heads) * dim)
    angles = (torch.randn(5, rotary // 2), torch.randn(5, rotary // 2)) if rotary else None
    norms = (torch.randn(dim), torch.randn(dim)) if rotary else None
    plan = replace(OPS.plan_attention(batch, 0, args.window), max_context=1200)  # so that it is split often
    found = fused_decode_attention(qkv, caches[0], norms, 1e-6, angles, plan, args)
    queries = norm_rope_write_kv(qkv, caches[1], slots, norms, 1e-6, angles)
    filled = replace(batch, context_lens=batch.context_lens.clamp(min=1))
    expected = PLAIN.attention(queries, caches[1], PLAIN.plan_attention(filled, 0, args.window), args)
    assert not found[1].any()
    is_row = batch.context_lens > 0
    # The fused kernel attends to the newest key before it is rounded for the cache.
    assert_near(found[is_row], expected[is_row], tolerance=CACHE_ERROR.get(dtype, 1e-4))
    for ours, theirs in zip(vars(caches[0]).values(), vars(caches[1]).values(), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_near(ours[1:].float(), theirs[1:].float())


class TestDevicesWithoutFp8:
    """GPUs without fp8 instructions convert by bit operations."""

    @pytest.fixture(autouse=True)
    def no_fp8(self) -> None:
        with patch("tokenmill.ops.triton.attention.kv_cache.has_fp8", lambda device: False):
            yield

    def test_every_number_is_kept_and_others_become_the_nearest(self) -> None:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        between = (torch.rand(63 * 30) - 0.5) * 2.0 ** torch.randint(-9, 10, (63 * 30,))
        values = torch.cat((every[every.isfinite()][:252], between)).view(-1, 63)
        vectors = torch.nn.functional.pad(values, (1, 0), value=448.0)  # so that the scale is 1
        numbers = torch.zeros(2, len(values), 1, 1, 64).to(torch.float8_e4m3fn)
        cache = LayerCache(*numbers, *torch.zeros(2, len(values), 1, 1))
        norm_rope_write_kv(vectors.repeat(1, 3), cache, torch.arange(len(values)), None, 1e-6, None)
        assert torch.equal(cache.keys.float().view(-1, 64), vectors.to(torch.float8_e4m3fn).float())

    @pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
    def test_paged_attention(self, lengths: list[tuple[int, int]]) -> None:
        check_attention(2, 1, 16, AttentionArgs(0.3), torch.float8_e4m3fn, lengths)

    def test_fused_decode_attention(self) -> None:
        check_fused_decode(2, 1, 16, 8, AttentionArgs(0.3), torch.float8_e4m3fn)

    def test_dense_prefill(self) -> None:
        check_dense_prefill(torch.float8_e4m3fn)
