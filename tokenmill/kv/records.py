"""A block of the pool as a record: one piece of bytes that can be kept elsewhere and put back.

The pool has a tensor for each field, [layers, blocks, ...], so a block is many pieces; a record has them one after
another:

    pool     keys   [layer 0: block 0 | block 1 | ...][layer 1: block 0 | block 1 | ...] ...
             values [...]
    record of block 1   [ keys of layer 0, 1, 2 ... | values of layer 0, 1, 2 ... ]        (scales likewise)

Blocks of every region are records: tokens, and cells and states of recurrent layers (`kv/layout.py`).

On a CPU pieces are copied where they are. On a GPU they are gathered into a staging tensor by one kernel a field, and
the copy engine moves whole records from and to pinned memory. Both happen on a stream of its own, behind all steps that
were launched before: a step may still be writing the block that is saved, or reading the one that is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from tokenmill.kv.storage import KVStorage

Record = torch.Tensor  # uint8 [bytes], in host memory
Room = Callable[[int], Sequence[Record]]  # a thread's records of a region
Piece = tuple[int, int, int]  # of all blocks: address of row 0, bytes from row to row, bytes that belong to the block

PINNED_BYTES = 1 << 30  # that are pinned at a time
STAGED_BYTES = 32 << 20  # of records on their way from or to a GPU; two stagings of so much


class BlockRecords(Protocol):
    """Copies blocks from and to records; by one thread at a time."""

    sizes: list[int]  # bytes of a record, by region

    def read(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None: ...

    def write(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None: ...

    def empty(self, region: int, number: int) -> list[Record]:
        """Allocate memory for records, of a kind that is copied fast."""
        ...

    # For those who read blocks without this object (`tiers/nixl.py`):

    def empty_beside_pool(self, region: int, number: int) -> list[Record]:
        """Allocate records in the same memory as the pool; they can be written to it, but not kept elsewhere."""
        ...

    def memory(self) -> list[torch.Tensor]:
        """Return tensors that lie in all memory of the pool."""
        ...

    def pieces(self, region: int) -> list[Piece]:
        """Return where a region's blocks lie, in the order of a record."""
        ...

    def row(self, region: int, block: int) -> int:
        """Return the row of a block."""
        ...

    def settle(self) -> None:
        """Wait until all steps have written that were launched before."""
        ...


class RegionPlanes:
    """The tensors of one region as bytes, and how a block id becomes a row of them."""

    def __init__(self, tensors: Sequence[torch.Tensor], first: int) -> None:
        """`first`: the id of the block in row 1; row 0 is the null block's."""
        self.planes = [tensor.view(torch.uint8).view(*tensor.shape[:2], -1) for tensor in tensors]
        self.sizes = [plane.shape[0] * plane.shape[2] for plane in self.planes]
        self.record_bytes = sum(self.sizes)
        self._first = first

    def row(self, block: int) -> int:
        return block - self._first + 1

    def pieces(self) -> list[Piece]:
        return [
            (plane.data_ptr() + layer * plane.stride(0), plane.stride(1), plane.shape[2])
            for plane in self.planes
            for layer in range(plane.shape[0])
        ]


def region_planes(storage: KVStorage) -> list[RegionPlanes]:
    firsts = (1, storage.num_blocks, storage.num_blocks + max(0, storage.num_cells - 1))
    return [RegionPlanes(tensors, first) for tensors, first in zip(storage.regions, firsts, strict=True)]


class WholeBlocks:
    """A pool that has all of every block: where its pieces lie."""

    def __init__(self, storage: KVStorage) -> None:
        self._regions = region_planes(storage)

    def memory(self) -> list[torch.Tensor]:
        return [plane for region in self._regions for plane in region.planes]

    def pieces(self, region: int) -> list[Piece]:
        return self._regions[region].pieces()

    def row(self, region: int, block: int) -> int:
        return self._regions[region].row(block)


class HostRecords(WholeBlocks):
    """Records of a pool in host memory."""

    def __init__(self, storage: KVStorage) -> None:
        super().__init__(storage)
        self._arrays = [[plane.numpy() for plane in region.planes] for region in self._regions]
        self.sizes = [region.record_bytes for region in self._regions]

    def empty(self, region: int, number: int) -> list[Record]:
        return list(torch.empty((number, self.sizes[region]), dtype=torch.uint8))

    def empty_beside_pool(self, region: int, number: int) -> list[Record]:
        return self.empty(region, number)

    def settle(self) -> None:
        """Do nothing: a block is registered when its step has ended."""

    def read(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        for block, record in zip(blocks, records, strict=True):
            for pool, piece in self._pieces(region, block, record):
                np.copyto(piece, pool)

    def write(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        for block, record in zip(blocks, records, strict=True):
            for pool, piece in self._pieces(region, block, record):
                np.copyto(pool, piece)

    def _pieces(self, region: int, block: int, record: Record) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return pairs of a block's part of each tensor, [layers, bytes], and the record's part for it."""
        planes, row, start = self._regions[region], self._regions[region].row(block), 0
        found = []
        values = record.numpy()
        for array, size in zip(self._arrays[region], planes.sizes, strict=True):
            pool = array[:, row]
            found.append((pool, values[start : start + size].reshape(pool.shape)))
            start += size
        return found


class CopyStream(Protocol):
    """A stream on which copies run after all steps that were launched before them."""

    def run(self, copies: Callable[[], None]) -> None:
        """Launch copies, and wait until they are made."""
        ...


class GpuCopyStream:
    """A stream of its own for copies from and to a GPU."""

    def __init__(self, steps: torch.cuda.Stream) -> None:
        """`steps`: the stream that steps are launched on."""
        self._stream = torch.cuda.Stream(steps.device)  # type: ignore[no-untyped-call]
        self._steps = steps

    def run(self, copies: Callable[[], None]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_stream(self._steps)
            copies()
            self._stream.synchronize()


class DeviceRecords(WholeBlocks):
    """Records of a pool in a GPU's memory."""

    def __init__(self, storage: KVStorage, stream: CopyStream) -> None:
        super().__init__(storage)
        self.sizes = [region.record_bytes for region in self._regions]
        self._device = storage.device
        self._is_cuda = storage.device.type == "cuda"  # False in tests alone
        self._stream = stream
        self._stagings = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def empty(self, region: int, number: int) -> list[Record]:
        size, records = self.sizes[region], []
        most = max(1, PINNED_BYTES // size)  # torch rounds what it pins up to a power of two
        for start in range(0, number, most):
            some = min(most, number - start)
            records += list(torch.empty((some, size), dtype=torch.uint8, pin_memory=self._is_cuda))
        return records

    def empty_beside_pool(self, region: int, number: int) -> list[Record]:
        return list(torch.empty((number, self.sizes[region]), dtype=torch.uint8, device=self._device))

    def settle(self) -> None:
        self._stream.run(lambda: None)

    def read(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        self._stream.run(partial(self._each_part, self._gather, region, blocks, records))

    def write(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        self._stream.run(partial(self._each_part, self._scatter, region, blocks, records))

    def _each_part(
        self,
        copy: Callable[[RegionPlanes, torch.Tensor, torch.Tensor, Sequence[Record]], None],
        number: int,
        blocks: Sequence[int],
        records: Sequence[Record],
    ) -> None:
        """Copy as many blocks at a time as a staging has room for; two stagings, so that one part's copy need not wait
        for the kernels of the part before it."""
        region = self._regions[number]
        most = max(1, STAGED_BYTES // region.record_bytes)
        rows = torch.tensor([region.row(block) for block in blocks], device=self._device)
        for part, start in enumerate(range(0, len(blocks), most)):
            some = records[start : start + most]
            copy(region, rows[start : start + most], self._staging(part % 2, len(some), region.record_bytes), some)

    def _staging(self, which: int, number: int, num_bytes: int) -> torch.Tensor:
        if self._stagings[which].numel() < number * num_bytes:
            self._stagings[which] = torch.empty(number * num_bytes, dtype=torch.uint8, device=self._device)
        return self._stagings[which][: number * num_bytes].view(number, num_bytes)

    def _gather(
        self, region: RegionPlanes, rows: torch.Tensor, staging: torch.Tensor, records: Sequence[Record]
    ) -> None:
        start = 0
        for plane, size in zip(region.planes, region.sizes, strict=True):
            pieces = words(plane).index_select(1, rows).transpose(0, 1)  # [blocks, layers, words]
            words(staging[:, start : start + size].view(len(staging), *plane.shape[::2])).copy_(pieces)
            start += size
        for start, end in runs(records):
            joined(records[start:end]).copy_(staging[start:end].flatten(), non_blocking=True)

    def _scatter(
        self, region: RegionPlanes, rows: torch.Tensor, staging: torch.Tensor, records: Sequence[Record]
    ) -> None:
        for start, end in runs(records):
            staging[start:end].flatten().copy_(joined(records[start:end]), non_blocking=True)
        start = 0
        for plane, size in zip(region.planes, region.sizes, strict=True):
            pieces = words(staging[:, start : start + size].view(len(staging), *plane.shape[::2])).transpose(0, 1)
            words(plane).index_copy_(1, rows, pieces)
            start += size


def runs(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """Return ranges of records that are adjacent in memory: each is one copy."""
    start = 0
    for place in range(1, len(records) + 1):
        before = records[place - 1]
        if place < len(records) and is_behind(records[place], before):
            continue
        yield start, place
        start = place


def is_behind(record: Record, before: Record) -> bool:
    """Tell whether a record begins where another one ends, in the same allocation."""
    is_next = record.data_ptr() == before.data_ptr() + before.numel()
    return is_next and record.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def joined(records: Sequence[Record]) -> Record:
    """Return adjacent records as one."""
    return records[0].as_strided((sum(record.numel() for record in records),), (1,))


def bytes_of(record: Record) -> memoryview:
    return memoryview(record.numpy())  # type: ignore[arg-type]


def words(values: torch.Tensor) -> torch.Tensor:
    """View bytes as 8-byte integers where alignment and length allow it: kernels copy them eight times as fast."""
    places = (values.shape[-1], values.storage_offset(), *values.stride()[:-1])
    return values if any(place % 8 for place in places) else values.view(torch.int64)
