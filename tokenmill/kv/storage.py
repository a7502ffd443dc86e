"""The tensors behind the block ids. Allocated once; steps write into them and read from them, nothing moves.

    keys, values: [layers_per_group, num_blocks, num_kv_heads, block_size, head_dim]
    scales:       [layers_per_group, num_blocks, num_kv_heads, block_size] of each, where a number takes one byte

A block id belongs to one KV group at a time; the group's i-th layer finds its keys in keys[i, block].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.kv.layout import KVLayout
from tokenmill.ops.batch import LayerCache

MAX_COPIED_BYTES = 64 << 20  # of a copy's sources that lie beside the pool at a time, at least one layer's


class KVStorage:
    def __init__(
        self, layout: KVLayout, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layout.layers_per_group, num_blocks, layout.num_kv_heads, block_size, layout.head_dim)
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        is_scaled = dtype.itemsize == 1
        self.key_scales = _zeros(shape[:-1], torch.float32, device) if is_scaled else None
        self.value_scales = _zeros(shape[:-1], torch.float32, device) if is_scaled else None

    def layer(self, number: int) -> LayerCache:
        """Views of one layer's keys and values."""
        _, index = self.layout.place(number)
        if self.key_scales is None or self.value_scales is None:
            return LayerCache(self.keys[index], self.values[index])
        return LayerCache(self.keys[index], self.values[index], self.key_scales[index], self.value_scales[index])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from, to) block ids, all copied as if at once: sources are read before anything is written."""
        if not pairs:
            return
        sources, targets = (torch.tensor(ids, device=self.device) for ids in zip(*pairs, strict=True))
        for part in self._parts:
            bits = part.view(torch.uint8) if part.dtype.itemsize == 1 else part  # copied, whatever they mean
            for layers in torch.split(bits, max(1, MAX_COPIED_BYTES // (len(pairs) * bits[0, 0].nbytes))):
                layers[:, targets] = layers[:, sources]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> list[torch.Tensor]:
        every = (self.keys, self.values, self.key_scales, self.value_scales)
        return [part for part in every if part is not None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, so that what a masked score multiplies is never NaN. On a CPU the pages come when they are first written:
    a pool that is never filled costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
