"""The tensors of the KV pool. They are allocated once; steps read and write them in place.

A field of a layer (keys, values, inputs of a convolution) is a contiguous tensor; the tokens of a block are its second
to last axis:

    shape per token (kv_heads, head_dim)  →  [rows, kv_heads, block_size, head_dim]     keys, values
    shape per token (width,)              →  [rows, block_size, width]                  inputs
    scales of 8-bit values                →  [rows, kv_heads, block_size] float32

A block id belongs to one cache group at a time. If all groups have the same fields, each field is one tensor
[layers_per_group, num_blocks, ...]: the keys of the group's i-th layer are keys[i, block].

If groups have different fields, they share one buffer [num_blocks, bytes], and each field of each layer is a view of it
that starts at a different offset. A block is then `rows_per_block` rows of such a view, so the ids in a group's block
tables are block * rows_per_block (`BlockTable.updates`), and kernels need no special case:

    block 7 of 6 rows in group 0   [ K row | V row | K row | V row | K row | V row ]   id 42 in views from row 0, 1 ...
    block 9 of 2 rows in group 1   [ inputs row            | inputs row            ]   id 18 in views from row 0, 1

If the fields of a layer differ in size, they are one row together, and each is a view of its part of the rows.

Cells and states of recurrent layers have separate tensors, [layers, num_cells, ...] and [layers, num_states, ...];
a state has no axis of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.layout import CacheGroup, KVLayout, fields_per_row, has_scale, value_bytes
from tokenmill.kv.pool_memory import PoolMemory
from tokenmill.ops.batch import LayerCache

MAX_COPIED_BYTES = 64 << 20  # temporary memory of a block copy (at least that of one layer)
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

Fields = dict[str, torch.Tensor]


class KVStorage:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        num_cells: int = 0,
        num_states: int = 0,
        memory: PoolMemory | None = None,
    ) -> None:
        """`num_blocks`, `num_cells` and `num_states` count the null block; the latter two are 0 for models without
        recurrent layers. `memory`: shared memory for a pool on a CPU that another process maps too."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_cells = num_cells
        self.num_states = num_states
        self.block_size = block_size
        self.device = device
        self._memory = memory
        self._pools: list[torch.Tensor] = []  # all tensors of blocks: [planes, num_blocks, ...]
        self._cells: list[torch.Tensor] = []  # [layers, num_cells, ...]
        self._states: list[torch.Tensor] = []  # [layers, num_states, ...]
        self._fields: dict[int, Fields] = {}  # by layer
        self._groups = {
            (layer, field.name): number
            for number, group in enumerate(layout.groups)
            for layer in group.layers
            for field in group.fields
        }
        self._paged = {layer: layout.place(layer)[0] for group in layout.paged for layer in group.layers}
        if layout.is_uniform:
            self._allocate_fields(layout)
        else:
            self._allocate_shared(layout)
        self._allocate_recurrent(layout)
        self._layers = {
            layer: LayerCache(fields["keys"], fields["values"], fields.get("keys_scale"), fields.get("values_scale"))
            for layer, fields in self._fields.items()
            if "keys" in fields
        }

    def group(self, layer: int, field: str | None = None) -> int:
        """Return the cache group of a layer's field, the index of its block table in a batch. None: the (first) group
        of its paged fields."""
        return self._paged[layer] if field is None else self._groups[layer, field]

    def fields(self, layer: int) -> Fields:
        """Return the tensors of a layer's fields, by name."""
        return self._fields[layer]

    def layer(self, number: int) -> LayerCache:
        """Return the keys and values of an attention layer."""
        return self._layers[number]

    @property
    def regions(self) -> list[list[torch.Tensor]]:
        """The tensors of each region's blocks (`BlockPool`): [layers, blocks of the region, ...]."""
        return [self._pools, self._cells, self._states]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks given as pairs of ids (from, to), as if simultaneously: a source is read before it is
        overwritten. Ids after those of blocks are cells (`BlockPool`)."""
        if not pairs:
            return
        blocks = [pair for pair in pairs if pair[0] < self.num_blocks]
        self._copy(self._pools, blocks)
        if len(blocks) < len(pairs):
            before = self.num_blocks - 1
            cells = [(source - before, to - before) for source, to in pairs if source >= self.num_blocks]
            self._copy(self._cells, cells)

    def _copy(self, pools: list[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, targets = (torch.tensor(ids, device=self.device) for ids in zip(*pairs, strict=True))
        for pool in filter(len, pools):
            bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # 8-bit types are copied as bytes
            for planes in torch.split(bits, max(1, MAX_COPIED_BYTES // (len(pairs) * bits[0, 0].nbytes))):
                planes[:, targets] = planes[:, sources]

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in (*self._pools, *self._cells, *self._states))

    # ── allocation ──

    def _allocate_fields(self, layout: KVLayout) -> None:
        """Allocate one tensor per field."""
        for field in layout.groups[0].fields:
            pool = self._blocks((layout.layers_per_group, self.num_blocks, *self._block_shape(field)), field.dtype)
            scales = self._scales(field, layout.layers_per_group) if has_scale(field) else None
            for group in layout.paged:
                for index, layer in enumerate(group.layers):
                    self._keep(layer, field, pool[index], None if scales is None else scales[index])

    def _allocate_shared(self, layout: KVLayout) -> None:
        """Allocate one buffer for all fields, and one for the scales of each set of fields with scales."""
        shared = self._blocks((1, self.num_blocks, layout.shared_bytes * self.block_size), "int8").view(torch.uint8)
        scales: dict[tuple[CacheField, ...], torch.Tensor] = {}
        for group, rows in zip(layout.paged, layout.rows_per_block[: len(layout.paged)], strict=True):
            if has_scale(group.fields[0]) and group.fields not in scales:
                scales[group.fields] = self._scales(group.fields[0], 1, rows * fields_per_row(group.fields))
            self._share(group, rows, shared, scales.get(group.fields))

    def _allocate_recurrent(self, layout: KVLayout) -> None:
        """Allocate one tensor per field of cells and of states."""
        for kind, pools, number in (("cells", self._cells, self.num_cells), ("state", self._states, self.num_states)):
            fields = ((group, field) for group in layout.groups if group.kind == kind for field in group.fields)
            for group, field in fields:
                shape = self._block_shape(field) if kind == "cells" else field.shape
                pools.append(self._zeros((len(group.layers), number, *shape), field.dtype))
                for index, layer in enumerate(group.layers):
                    self._keep(layer, field, pools[-1][index], None)

    def _share(self, group: CacheGroup, rows: int, shared: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Make views of the rows of a group's fields: the first layer's fields, then the second's ..."""
        length = (self.num_blocks - 1) * rows + 1  # rows of each view: up to the first row of the last block
        together = fields_per_row(group.fields)
        for index, layer in enumerate(group.layers):
            start = 0  # bytes of a row before the field
            for number, field in enumerate(group.fields):
                first = index if together > 1 else index * len(group.fields) + number
                own_rows, end = slice(first, first + length), start + value_bytes(field) * self.block_size
                values = shared.view(self.num_blocks * rows, -1)[own_rows, start:end].view(DTYPES[field.dtype])
                own = None
                if scales is not None:
                    own = scales.view(-1, together, *scales.shape[3:])[own_rows, number % together]
                self._keep(layer, field, values.view(length, *self._block_shape(field)), own)
                start = end if together > 1 else 0

    def _keep(self, layer: int, field: CacheField, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        fields = self._fields.setdefault(layer, {})
        fields[field.name] = values
        if scales is not None:
            fields[f"{field.name}_scale"] = scales

    def _block_shape(self, field: CacheField) -> tuple[int, ...]:
        return (*field.shape[:-1], self.block_size, field.shape[-1])

    def _scales(self, field: CacheField, planes: int, *rows: int) -> torch.Tensor:
        return self._blocks((planes, self.num_blocks, *rows, *field.shape[:-1], self.block_size), "float32")

    def _blocks(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        self._pools.append(self._zeros(shape, dtype))
        return self._pools[-1]

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Allocate zeros, so that values with masked scores are never NaN. On a CPU pages are mapped when they are
        first written, so an unused pool takes no memory."""
        kind = DTYPES[dtype]
        if self.device.type != "cpu" or not math.prod(shape):  # a pipeline stage may have no layer of a kind
            return torch.zeros(shape, dtype=kind, device=self.device)
        num_bytes = math.prod(shape) * kind.itemsize
        if self._memory is not None:
            return torch.from_numpy(self._memory.allocate(num_bytes)).view(kind).view(shape)
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(kind).view(shape)
