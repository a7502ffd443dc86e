"""One query a row from the joint projection on, in one kernel, where few rows decode and every hop between kernels
counts: q and k are normed and rotated, k and v go into the cache, and the query attends.

What earlier steps left in the cache is on its way before this step's projection is known. The newest key is not read
back: who has it in his split begins with it, from registers, and writes it into the cache for the steps to come.

    context of a row:   [ split 0 | split 1 | ... | keys of earlier steps, newest ]
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference.kv_rounding import LARGEST
from tokenmill.ops.triton.attention.decode import (
    LOG2E,
    LOWEST,
    NO_WINDOW,
    add_tile,
    finish,
    parts_for,
    precision_of,
    share_of,
    tile_of,
)
from tokenmill.ops.triton.attention.kv_dtypes import numbers_of
from tokenmill.ops.triton.attention.norm_rope_cache import keep, placed
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.select import TILE, num_splits_for
from tokenmill.ops.triton.elementwise.activation import tanh
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.launch.sizes import next_power_of_2

WARPS = 8


@kernel_unspecialized("table_stride")
def _fused_decode_attention(
    qkv, keys, values, key_scales, value_scales, out, parts, lse, arrived, tables, contexts, sinks,
    q_norm, k_norm, cos, sin, half, eps, scale, softcap, window, table_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    LARGEST: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    oldest, low, high, used = share_of(context, window, split, TILE, NUM_SPLITS)
    if split >= used:
        return
    newest = context - 1
    is_scaled: tl.constexpr = LARGEST > 0
    d = tl.arange(0, DIM_PADDED)
    table = tables + row * table_stride
    places = low + tl.arange(0, TILE)
    seen = (places < high) & (places < newest) & (places >= oldest)
    key, value, key_scale, value_scale = tile_of(
        keys, values, key_scales, value_scales, table, kv_head, places, seen, d, KV_HEADS, DIM, BLOCK_SIZE, is_scaled
    )
    own = newest < high  # and so of the last split
    own_block = tl.load(table + tl.maximum(newest, 0) // BLOCK_SIZE).to(tl.int64)
    wait_for_previous(OVERLAPS)

    vectors = qkv + row * (NUM_HEADS + 2 * KV_HEADS) * DIM
    cos_row, sin_row = cos + row * half, sin + row * half
    d_row = d[None, :]
    member = tl.arange(0, 16)[:, None]
    q_inside = (member < GROUP) & (d_row < DIM)
    q_source = vectors + (kv_head * GROUP + member) * DIM
    query = placed(q_source, d_row, q_inside, q_norm, cos_row, sin_row, half, DIM, eps, HAS_NORM, HAS_ROPE)
    query = query.to(qkv.dtype.element_ty)
    one = tl.zeros((1, 1), tl.int64)
    k_source = vectors + (NUM_HEADS + kv_head + one) * DIM
    inside = (one == 0) & (d_row < DIM)
    own_key = placed(k_source, d_row, inside, k_norm, cos_row, sin_row, half, DIM, eps, HAS_NORM, HAS_ROPE)
    own_value = tl.load(k_source + KV_HEADS * DIM + d_row, mask=inside, other=0.0).to(tl.float32)
    if own & (context > 0):
        line = (own_block * KV_HEADS + kv_head) * BLOCK_SIZE + newest % BLOCK_SIZE + one
        keep(own_key, keys, key_scales, line, d_row, inside, DIM, LARGEST)
        keep(own_value, values, value_scales, line, d_row, inside, DIM, LARGEST)
    if not is_scaled:  # rounded as it will be read later; a byte's rounding is left to the steps to come
        own_key = own_key.to(keys.dtype.element_ty).to(tl.float32)
    score = tl.sum(query.to(tl.float32) * own_key, axis=1) * scale
    if HAS_SOFTCAP:
        score = softcap * tanh(score / softcap)
    is_own = own & (context > 0)
    highest = tl.where(is_own, score * LOG2E, LOWEST)
    total = tl.where(is_own, score * 0 + 1.0, 0.0)
    mixed = tl.zeros((16, DIM_PADDED), tl.float32) + tl.where(is_own, own_value, 0.0)
    for start in range(low, high, TILE):
        places = start + TILE + tl.arange(0, TILE)
        is_next = (places < high) & (places < newest)
        next_key, next_value, next_key_scale, next_value_scale = tile_of(
            keys, values, key_scales, value_scales, table, kv_head, places, is_next, d,
            KV_HEADS, DIM, BLOCK_SIZE, is_scaled,
        )  # fmt: skip
        highest, total, mixed = add_tile(
            highest, total, mixed, query, key, value, key_scale, value_scale, seen, scale, softcap,
            HAS_SOFTCAP, is_scaled, PRECISION,
        )  # fmt: skip
        key, value, key_scale, value_scale, seen = next_key, next_value, next_key_scale, next_value_scale, is_next
    finish(
        highest, total, mixed, out, parts, lse, arrived, sinks, row, kv_head, split, used, d,
        NUM_HEADS, KV_HEADS, GROUP, DIM, NUM_SPLITS, HAS_SINKS,
    )  # fmt: skip


def fused_decode_attention(
    qkv: torch.Tensor,
    cache: LayerCache,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    plan: AttentionPlan,
    args: AttentionArgs,
) -> torch.Tensor:
    """qkv [R, (heads + 2 kv_heads) * D] of rows with one query each → values weighted by attention [R, heads * D]"""
    _, kv_heads, block_size, dim = cache.keys.shape
    num_rows = len(qkv)
    num_splits = num_splits_for(num_rows, kv_heads, plan.max_context, capabilities_of(qkv.device))
    qkv = qkv.contiguous()
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    out = qkv.new_empty(num_rows, num_heads, dim)
    cos, sin = angles or (qkv, qkv)
    _fused_decode_attention[(num_rows, kv_heads, num_splits)](
        qkv, *numbers_of(cache), out, *parts_for(out, num_splits), plan.tables, plan.contexts,
        args.sinks if args.sinks is not None else qkv, *(norms or (qkv, qkv)), cos, sin,
        cos.shape[-1] if angles else 0, eps, args.scale, args.softcap or 1.0, args.window or NO_WINDOW,
        plan.tables.stride(0), num_heads, kv_heads, num_heads // kv_heads, dim, max(16, next_power_of_2(dim)),
        block_size, TILE, num_splits, norms is not None, angles is not None, args.softcap is not None,
        args.sinks is not None, LARGEST.get(cache.keys.dtype, 0.0), precision_of(qkv),
        num_warps=WARPS, **launch_options(),
    )  # fmt: skip
    return out.flatten(1)
