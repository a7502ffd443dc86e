"""Access to the KV cache in kernels, and the kernel that norms and rotates q and k and writes k and v to the cache.

A program computes one token and a few heads of one kind:  [ q q q q | k | v ]. It reads each element's rotation partner
again instead of exchanging it between threads; the second read hits the L1 cache. In a one-byte cache each head's
vector is divided by its scale, which is stored separately.

GPUs without fp8 instructions convert e4m3 by its bits: shifted, they are a float16 value that is 2 ** 8 times too
small.

    e4m3      s eeee mmm                  subnormal values are correct too, in both directions
    float16   s 0 eeee mmm 0000000
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.reference.kv_rounding import LARGEST
from tokenmill.ops.triton.launch.capabilities import has_fp8
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


def cache_tensors(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and their scales as kernel arguments, with placeholders for missing scales."""
    keys, values = cache.keys, cache.values
    if keys.dtype == torch.float8_e4m3fn and not has_fp8(keys.device):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values, keys, values
    return keys, values, cache.key_scales, cache.value_scales


@triton.jit
def as_factors(stored, DTYPE: tl.constexpr):
    """Convert keys or values read from the cache to factors of a product in DTYPE."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(DTYPE)
    return stored.to(DTYPE)


@triton.jit
def as_cached(stored, DTYPE: tl.constexpr):
    """Convert float32 values to the cache's dtype; for fp8 none may exceed 448."""
    if tl.uint8 == DTYPE:
        # Round to nearest even: to four significant bits, or, for subnormal results, to a multiple of 2 ** -9.
        bits = stored.to(tl.int32, bitcast=True)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(stored) < 0.015625, (stored + 24576.0) - 24576.0, large)
        half = (rounded * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)  # exact
        return (((half & 0x7FFF) >> 7) | ((half >> 8) & 0x80)).to(tl.uint8)
    return stored.to(DTYPE)


@triton.jit
def norm_rope(source, d, inside, norm, rope, dim, eps, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr):
    """Load heads [HEADS, D] at `source`, norm and rotate them, float32; `rope` is (cos, sin, rotary_dim / 2)."""
    cos, sin, half = rope
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
        is_rotated = d < 2 * half
        c = tl.load(cos + angle, mask=is_rotated, other=1.0)
        s = tl.load(sin + angle, mask=is_rotated, other=0.0)
        values = values * c + tl.where(d < half, -other, other) * s
    return values


@triton.jit
def store_kv(vectors, stored, scales, kv_row, d, inside, DIM: tl.constexpr, LARGEST: tl.constexpr):
    """Write vectors [HEADS, D] to the cache at `kv_row` [HEADS, 1]. LARGEST: the largest value of a dtype with scales,
    else 0."""
    if LARGEST > 0:
        scale = tl.max(tl.abs(vectors), axis=1)[:, None] / LARGEST
        is_nan = tl.sum((vectors != vectors).to(tl.int32), axis=1)[:, None] > 0
        scale = tl.where(is_nan, float("nan"), scale)  # an integer can't be NaN, its scale can
        tl.store(scales + kv_row, scale, mask=tl.sum(inside.to(tl.int32), axis=1)[:, None] > 0)
        vectors = vectors / tl.maximum(scale, 1e-30)
        if LARGEST == 127:
            vectors = tl.minimum(tl.maximum(tl.floor(vectors + 0.5), -127.0), 127.0)
    tl.store(stored + kv_row * DIM + d, as_cached(vectors, stored.dtype.element_ty), mask=inside)


@kernel_unspecialized("slots")
def _norm_rope_write_kv(
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
    rope = (cos + token * half, sin + token * half, half)
    if tile < q_tiles:
        heads = (tile * TILE + tl.arange(0, TILE))[:, None]
        inside = (heads < NUM_HEADS) & (d < DIM)
        vectors = norm_rope(row + heads * DIM, d, inside, q_norm, rope, DIM, eps, HAS_NORM, HAS_ROPE)
        target = queries + (token * NUM_HEADS + heads) * DIM + d
        tl.store(target, vectors.to(queries.dtype.element_ty), mask=inside)
    else:
        is_key = tile < q_tiles + kv_tiles
        first = tl.where(is_key, tile - q_tiles, tile - q_tiles - kv_tiles) * TILE
        heads = (first + tl.arange(0, TILE))[:, None]
        inside = (heads < KV_HEADS) & (d < DIM)
        slot = tl.load(slots + token)
        kv_row = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        if is_key:
            source = row + (NUM_HEADS + heads) * DIM
            vectors = norm_rope(source, d, inside, k_norm, rope, DIM, eps, HAS_NORM, HAS_ROPE)
            store_kv(vectors, keys, key_scales, kv_row, d, inside, DIM, LARGEST)
        else:
            plain = tl.load(row + (NUM_HEADS + KV_HEADS + heads) * DIM + d, mask=inside, other=0.0)
            store_kv(plain.to(tl.float32), values, value_scales, kv_row, d, inside, DIM, LARGEST)


def norm_rope_write_kv(
    qkv: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """qkv [T, (heads + 2 kv_heads) * D] → queries [T, heads, D]; writes keys and values to the cache"""
    _, kv_heads, block_size, dim = cache.keys.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty(num_tokens, num_heads, dim)
    q_norm, k_norm = norms or (qkv, qkv)
    cos, sin = cos_sin or (qkv, qkv)
    tile = min(8, next_power_of_2(kv_heads))
    tiles = cdiv(num_heads, tile) + 2 * cdiv(kv_heads, tile)
    if num_tokens:
        _norm_rope_write_kv[(num_tokens, tiles)](
            qkv, queries, *cache_tensors(cache), slots, q_norm, k_norm, cos, sin,
            cos.shape[-1] if cos_sin else 0, eps, qkv.stride(0),
            num_heads, kv_heads, dim, next_power_of_2(dim), block_size, tile,
            norms is not None, cos_sin is not None, LARGEST.get(cache.keys.dtype, 0.0),
            num_warps=4, **launch_options(),
        )  # fmt: skip
    return queries
