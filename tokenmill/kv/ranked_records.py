"""Records of a pool whose blocks are distributed over ranks: each rank has some heads, or some layers, of every block.

    ranks     rank 0: [heads 0 1 of all layers]      rank 1: [head 2 of all layers]
    record    [ keys of layer 0: heads 0 1 2 | keys of layer 1: heads 0 1 2 | ... | values ... ]

A record is the same as that of a single rank (`records.py`), so blocks computed on two ranks can be used by a model on
three ranks, or on one. Parts that several ranks have are read from the first of them and written to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.kv.records import Piece, Record, region_planes
from tokenmill.kv.storage import KVStorage


@dataclass(frozen=True)
class RankBlocks:
    """One rank's part of every block."""

    storage: KVStorage
    layers: range  # of the whole model's layers
    heads: tuple[int, int]  # of the key heads, if these are split


class RankedRecords:
    """Records of all ranks' pools, in host memory."""

    def __init__(self, whole: KVStorage, parts: Sequence[RankBlocks]) -> None:
        """`whole`: a pool of the whole model with any number of blocks, which defines the layout of a record."""
        self._whole = [[as_bytes(tensor) for tensor in tensors] for tensors in whole.regions]
        self.sizes = [region.record_bytes for region in region_planes(whole)]
        self._parts = list(parts)
        self._planes = [region_planes(part.storage) for part in parts]
        self._arrays = [[list(map(as_bytes, tensors)) for tensors in part.storage.regions] for part in parts]
        self._layers = [own_layers(whole, part) for part in parts]

    def empty(self, region: int, number: int) -> list[Record]:
        return list(torch.empty((number, self.sizes[region]), dtype=torch.uint8))

    def empty_beside_pool(self, region: int, number: int) -> list[Record]:
        return self.empty(region, number)

    def memory(self) -> list[torch.Tensor]:
        return [tensor for part in self._parts for tensors in part.storage.regions for tensor in tensors]

    def row(self, region: int, block: int) -> int:
        return self._planes[0][region].row(block)  # the same on every rank

    def wait_for_steps(self) -> None:
        """Do nothing: a block is registered after its step has ended."""

    def pieces(self, region: int) -> list[Piece]:
        (record,), found = self.empty(region, 1), list[tuple[int, Piece]]()
        for _, own, part, is_first in self._shares(region, record):
            for layer, piece in enumerate(part if is_first else ()):
                address = own.ctypes.data + layer * own.strides[0]
                found.append((piece.ctypes.data, (address, own.strides[1], piece.nbytes)))
        return [piece for _, piece in sorted(found)]

    def read(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        for block, record in zip(blocks, records, strict=True):
            for pool, piece, is_first in self._pieces(region, block, record):
                if is_first:
                    np.copyto(piece, pool)

    def write(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        for block, record in zip(blocks, records, strict=True):
            for pool, piece, _ in self._pieces(region, block, record):
                np.copyto(pool, piece)

    def _pieces(self, region: int, block: int, record: Record) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Yield each rank's part of a block, the record's part for it, and whether it is the first rank with it."""
        for rank, own, part, is_first in self._shares(region, record):
            yield own[:, self._planes[rank][region].row(block)], part, is_first

    def _shares(self, region: int, record: Record) -> Iterator[tuple[int, np.ndarray, np.ndarray, bool]]:
        """Yield every rank, its part of all blocks, the record's part for it, and whether it is the first rank with
        it."""
        values, start = record.numpy(), 0
        for number, whole in enumerate(self._whole[region]):
            shape = (whole.shape[0], *whole.shape[2:])
            size = int(np.prod(shape))
            plane = values[start : start + size].reshape(shape)
            start += size
            seen: set[tuple[int, int, int, int]] = set()
            for rank, part in enumerate(self._parts):
                own = self._arrays[rank][region][number]
                layers = self._layers[rank] if own.shape[0] < whole.shape[0] else slice(0, whole.shape[0])
                heads = slice(*part.heads) if own.shape[2:] != whole.shape[2:] else slice(0, whole.shape[2])
                span = (layers.start, layers.stop, heads.start, heads.stop)
                yield rank, own, plane[layers, heads], span not in seen
                seen.add(span)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of a pool, [layers, blocks, ...], with bytes as its last axis."""
    found: np.ndarray = tensor.view(torch.uint8).numpy()
    return found


def own_layers(whole: KVStorage, part: RankBlocks) -> slice:
    """Return which of a block's layers a rank has. With pipeline stages there is only one group, so the first group is
    used."""
    indices = [index for index, layer in enumerate(whole.layout.groups[0].layers) if layer in part.layers]
    return slice(indices[0], indices[-1] + 1) if indices else slice(0, 0)
