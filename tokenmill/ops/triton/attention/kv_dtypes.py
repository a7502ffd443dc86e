"""The cache as kernels read and write it. Its fp8 numbers (e4m3) are taken by their bits on GPUs that have no
instruction for them: in a higher place the same bits are a float16 number, 2 ** 8 times too small.

    e4m3      s eeee mmm                  numbers below the smallest exponent are right too, in either form
    float16   s 0 eeee mmm 0000000
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.triton.launch.capabilities import has_fp8


def numbers_of(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and their scales; where they have none, something to pass in their place."""
    keys, values = cache.keys, cache.values
    if keys.dtype == torch.float8_e4m3fn and not has_fp8(keys.device):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values, keys, values
    return keys, values, cache.key_scales, cache.value_scales


@triton.jit
def as_factors(numbers, DTYPE: tl.constexpr):
    """What was read from the cache, as the factors of a product"""
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(DTYPE)
    return numbers.to(DTYPE)


@triton.jit
def as_cached(numbers, DTYPE: tl.constexpr):
    """float32 numbers, of which none is larger than 448 if they are to be fp8, as they are stored"""
    if tl.uint8 == DTYPE:
        # To the nearest, halves to even: with four bits, or, below the smallest exponent, to a multiple of 2 ** -9.
        bits = numbers.to(tl.int32, bitcast=True)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(numbers) < 0.015625, (numbers + 24576.0) - 24576.0, large)
        half = (rounded * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)  # exactly
        return (((half & 0x7FFF) >> 7) | ((half >> 8) & 0x80)).to(tl.uint8)
    return numbers.to(DTYPE)
