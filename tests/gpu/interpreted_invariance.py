"""Kernels for `--deterministic` and for rounded caches, in Triton's interpreter: right, and the same in any company."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from fixed_order import sums_in_fixed_order
from interpreted_kernels import paged_batch, same

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs, ExpertsWeight, LinearWeight
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.reference.kv_rounding import LARGEST, rounded
from tokenmill.ops.triton.attention.deterministic import deterministic_attention
from tokenmill.ops.triton.attention.plan import plan_attention
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm.deterministic import DeterministicConfig, deterministic_linear

FASTEST, STEADY = build_ops(), build_ops(deterministic=True)


def check_products() -> None:
    for num_out, num_in, border in ((40, 384, 384), (72, 520, 256)):
        matrix, bias = torch.randn(num_out, num_in), torch.randn(num_out)
        x = torch.randn(21, num_in)
        weight = LinearWeight(num_out, num_in, matrix, bias)
        together = deterministic_linear(x, weight, border=border)
        same(together, x @ matrix.T + bias)
        for rows in (slice(0, 1), slice(3, 10)):
            assert torch.equal(deterministic_linear(x[rows], weight, border=border), together[rows])
        in_turn = deterministic_linear(x.repeat(7, 1), weight, cut=DeterministicConfig(16, 2, 32, 4, 2), border=border)
        assert torch.equal(in_turn[:21], together), "one program for both segments, or one for each"
    elsewhere = deterministic_linear(x, weight, border=border + 32)
    assert not torch.equal(elsewhere, together), "sums in another order must show, or nothing here is checked"


def make_cache(num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    keys, values = torch.randn(2, num_blocks, kv_heads, 16, dim)
    if dtype == torch.float32:
        return LayerCache(keys, values)
    (keys, key_scales), (values, value_scales) = rounded(keys, dtype), rounded(values, dtype)
    return LayerCache(keys, values, key_scales, value_scales)


def check_attention(
    heads: int, kv_heads: int, dim: int, args: AttentionArgs, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    """Fastest and steady kernels against the reference, over a cache of any precision."""
    batch = paged_batch(lengths, 16)
    cache = make_cache(1 + batch.groups[0].block_tables.numel(), kv_heads, dim, dtype)
    queries = torch.randn(sum(count for count, _ in lengths), heads, dim)
    expected = PLAIN.attention(queries, cache, PLAIN.plan_attention(batch, 0, args.window), args)
    plan = plan_attention(batch, 0, args.window)
    for ops in (FASTEST, STEADY):
        same(ops.attention(queries, cache, plan, args), expected, tolerance=1e-4)
    if batch.max_query_len == 1:
        ways = [deterministic_attention(queries, cache, plan, args, in_turn=in_turn) for in_turn in (True, False)]
        assert torch.equal(*ways), "one program for all segments, or one for each"


def check_chunking(args: AttentionArgs) -> None:
    """A prompt of 290 tokens at once; in pieces; its last token alone: the same bits."""
    whole = paged_batch([(290, 290)], 16)
    cache = make_cache(1 + whole.groups[0].block_tables.numel(), 1, 16, torch.float32)
    queries = torch.randn(290, 2, 16)
    found = deterministic_attention(queries, cache, plan_attention(whole, 0, args.window), args)
    for first, last in ((230, 277), (277, 290), (289, 290)):
        part = paged_batch([(last - first, last)], 16)
        part.groups[0].block_tables.copy_(whole.groups[0].block_tables[:, : part.groups[0].block_tables.shape[1]])
        alone = deterministic_attention(queries[first:last], cache, plan_attention(part, 0, args.window), args)
        assert torch.equal(alone, found[first:last]), (first, last)


def check_experts() -> None:
    packed = ExpertsWeight(5, (torch.randn(5, 48, 32), torch.randn(5, 32, 24)))
    x, logits = torch.randn(19, 32), torch.randn(19, 5)
    chosen = STEADY.route(logits, 2, True)
    together = STEADY.experts(x, *chosen, packed, "silu")
    same(together, PLAIN.experts(x, *chosen, packed, "silu"))
    for rows in (slice(0, 1), slice(7, 12)):
        alone = STEADY.experts(x[rows], chosen[0][rows], chosen[1][rows], packed, "silu")
        assert torch.equal(alone, together[rows])


def check_rounded_writes(dtype: torch.dtype) -> None:
    """What the fused kernel keeps is what the reference keeps, but for a number on the edge between two."""
    tokens, heads, kv_heads, dim, block = 3, 4, 2, 20, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    slots = torch.tensor([9, 4, 11])
    shape = (3, kv_heads, block)
    caches = [LayerCache(*torch.zeros(2, *shape, dim).to(dtype), *torch.zeros(2, *shape)) for _ in range(2)]
    assert FASTEST.norm_rope_write_kv is not None
    FASTEST.norm_rope_write_kv(qkv, caches[0], slots, None, 1e-6, None)
    _, k, v = (part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    PLAIN.write_kv(caches[1], k, v, slots)
    for part in ("keys", "values"):
        ours, theirs = (getattr(cache, part).float() for cache in caches)
        scales = [getattr(cache, f"{part.removesuffix('s')}_scales") for cache in caches]
        same(*scales)
        # The interpreter cuts fp8 off where a GPU rounds.
        same(ours, theirs, tolerance=0.07 if dtype == torch.float8_e4m3fn else 1e-3)


def main() -> None:
    torch.manual_seed(0)
    with sums_in_fixed_order():
        check_all()
    print("all kernels agree with the reference")


def check_all() -> None:
    check_products()
    decoding, mixed = [(1, 90), (1, 300)], [(1, 270), (20, 20), (5, 275)]
    check_attention(4, 2, 20, AttentionArgs(0.3), torch.float32, decoding)
    check_attention(3, 1, 16, AttentionArgs(0.3, window=262), torch.float8_e4m3fn, decoding)
    check_attention(2, 1, 16, AttentionArgs(0.3, window=23, softcap=2.0, sinks=torch.randn(2)), torch.int8, mixed)
    check_attention(2, 1, 20, AttentionArgs(0.3), torch.float32, mixed)
    check_chunking(AttentionArgs(0.3))
    check_chunking(AttentionArgs(0.3, window=70, sinks=torch.randn(2)))
    check_experts()
    for dtype in LARGEST:
        check_rounded_writes(dtype)


if __name__ == "__main__":
    main()
