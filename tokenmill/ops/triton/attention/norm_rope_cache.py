"""From the joint projection to attention's inputs in one kernel: q and k are normed and rotated, k and v are cached.

A program takes one token and a few heads of one kind:  [ q q q q | k | v ]. It reads each element's rotation partner
again instead of exchanging it between threads; the second read comes from the cache. A cache of one byte a number gets
each head's vector divided by a scale of its own, which is kept beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.reference.kv_rounding import LARGEST
from tokenmill.ops.triton.attention.kv_dtypes import as_cached, numbers_of
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.launch.sizes import cdiv, next_power_of_2


@triton.jit
def placed(
    source, d, inside, norm, cos, sin, half, dim, eps, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr
):  # fmt: skip
    """Heads [HEADS, D] at `source`, normed and rotated, float32."""
    values = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    inverse = values * 0 + 1.0
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(values * values, axis=1) / dim + eps)[:, None] + values * 0
        values = values * inverse * tl.load(norm + d, mask=d < dim, other=0.0)
    if HAS_ROPE:
        partner = tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            other = other * inverse * tl.load(norm + partner, mask=d < dim, other=0.0)
        angle = tl.where(d < half, d, d - half)
        turns = d < 2 * half
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        values = values * c + tl.where(d < half, -other, other) * s
    return values


@triton.jit
def keep(vectors, numbers, scales, line, d, inside, DIM: tl.constexpr, LARGEST: tl.constexpr):
    """Vectors [HEADS, D] into the cache at `line` [HEADS, 1]; LARGEST: of the numbers that have a scale, else 0."""
    if LARGEST > 0:
        scale = tl.max(tl.abs(vectors), axis=1)[:, None] / LARGEST
        is_broken = tl.sum((vectors != vectors).to(tl.int32), axis=1)[:, None] > 0
        scale = tl.where(is_broken, float("nan"), scale)  # which a rounded number can't say
        tl.store(scales + line, scale, mask=tl.sum(inside.to(tl.int32), axis=1)[:, None] > 0)
        vectors = vectors / tl.maximum(scale, 1e-30)
        if LARGEST == 127:
            vectors = tl.minimum(tl.maximum(tl.floor(vectors + 0.5), -127.0), 127.0)
    tl.store(numbers + line * DIM + d, as_cached(vectors, numbers.dtype.element_ty), mask=inside)


@kernel_unspecialized("slots")
def _place(
    qkv, queries, keys, values, key_scales, value_scales, slots, q_norm, k_norm, cos, sin, half, eps, qkv_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    LARGEST: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (NUM_HEADS + TILE - 1) // TILE
    kv_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    d = tl.arange(0, DIM_PADDED)[None, :]
    row = qkv + token * qkv_stride
    cos_row, sin_row = cos + token * half, sin + token * half
    if tile < q_tiles:
        heads = (tile * TILE + tl.arange(0, TILE))[:, None]
        inside = (heads < NUM_HEADS) & (d < DIM)
        vectors = placed(row + heads * DIM, d, inside, q_norm, cos_row, sin_row, half, DIM, eps, HAS_NORM, HAS_ROPE)
        target = queries + (token * NUM_HEADS + heads) * DIM + d
        tl.store(target, vectors.to(queries.dtype.element_ty), mask=inside)
    else:
        is_key = tile < q_tiles + kv_tiles
        first = tl.where(is_key, tile - q_tiles, tile - q_tiles - kv_tiles) * TILE
        heads = (first + tl.arange(0, TILE))[:, None]
        inside = (heads < KV_HEADS) & (d < DIM)
        slot = tl.load(slots + token)
        line = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        if is_key:
            source = row + (NUM_HEADS + heads) * DIM
            vectors = placed(source, d, inside, k_norm, cos_row, sin_row, half, DIM, eps, HAS_NORM, HAS_ROPE)
            keep(vectors, keys, key_scales, line, d, inside, DIM, LARGEST)
        else:
            plain = tl.load(row + (NUM_HEADS + KV_HEADS + heads) * DIM + d, mask=inside, other=0.0)
            keep(plain.to(tl.float32), values, value_scales, line, d, inside, DIM, LARGEST)


def norm_rope_write_kv(
    qkv: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """qkv [T, (heads + 2 kv_heads) * D] → queries [T, heads, D]; keys and values go into the cache."""
    _, kv_heads, block_size, dim = cache.keys.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty(num_tokens, num_heads, dim)
    q_norm, k_norm = norms or (qkv, qkv)
    cos, sin = angles or (qkv, qkv)
    tile = min(8, next_power_of_2(kv_heads))
    tiles = cdiv(num_heads, tile) + 2 * cdiv(kv_heads, tile)
    if num_tokens:
        _place[(num_tokens, tiles)](
            qkv, queries, *numbers_of(cache), slots, q_norm, k_norm, cos, sin,
            cos.shape[-1] if angles else 0, eps, qkv.stride(0),
            num_heads, kv_heads, dim, next_power_of_2(dim), block_size, tile,
            norms is not None, angles is not None, LARGEST.get(cache.keys.dtype, 0.0),
            num_warps=4, **launch_options(),
        )  # fmt: skip
    return queries
