"""Whole long prompts: their keys are exactly this step's, so the fastest dense attention at hand (cuDNN's) computes it.

Keys and values are gathered from the paged cache once a layer, which costs a few per cent of the attention itself.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmill.ops.batch import LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.kv_dtypes import as_factors, numbers_of
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized
from tokenmill.ops.triton.launch.sizes import cdiv, next_power_of_2

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@kernel_unspecialized("length", "table_stride", "num_rows", "tables")
def _gather(
    keys, values, key_scales, value_scales, tables, out, length, table_stride, num_rows,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    row, part = tl.program_id(2) // 2, tl.program_id(2) % 2
    block = tl.load(tables + row * table_stride + number).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    d = tl.arange(0, DIM_PADDED)
    places = number * BLOCK_SIZE + offsets
    inside = (places < length)[:, None] & (d < DIM)[None, :]
    lines = (block * KV_HEADS + head) * BLOCK_SIZE + offsets
    source = values if part else keys
    found = tl.load(source + lines[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    if IS_SCALED:
        scales = value_scales if part else key_scales
        found = as_factors(found, tl.float32) * tl.load(scales + lines, mask=places < length, other=0.0)[:, None]
    line = ((part * num_rows + row) * KV_HEADS + head).to(tl.int64)
    target = out + (line * length + places)[:, None] * DIM + d[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=inside)


def dense_prefill_attention(
    queries: torch.Tensor, cache: LayerCache, tables: torch.Tensor, args: AttentionArgs
) -> torch.Tensor:
    """queries [R, L, heads, D] of rows of equal length whose contexts they are, as the result; tables int32
    [R, max_blocks]"""
    num_rows, length, num_heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    dense = queries.new_empty(2, num_rows, kv_heads, length, dim)
    grid = (cdiv(length, block_size), kv_heads, 2 * num_rows)
    padded = next_power_of_2(dim)
    _gather[grid](
        *numbers_of(cache), tables, dense, length, tables.stride(0), num_rows,
        kv_heads, dim, padded, block_size, cache.key_scales is not None, num_warps=4,
    )  # fmt: skip
    with sdpa_kernel(BACKENDS, set_priority=True):
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            dense[0],
            dense[1],
            is_causal=True,
            scale=args.scale,
            enable_gqa=num_heads != kv_heads,
        )
    return mixed.transpose(1, 2)
