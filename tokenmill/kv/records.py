"""Records: a block of the pool as one contiguous piece of bytes, which tiers store and cores exchange.

The pool has a tensor for each field, [layers, blocks, ...], so a block consists of many pieces; a record has them one
after another:

    pool     keys   [layer 0: block 0 | block 1 | ...][layer 1: block 0 | block 1 | ...] ...
             values [...]
    record of block 1   [ keys of layer 0, 1, 2 ... | values of layer 0, 1, 2 ... ]        (scales likewise)

Blocks of every region are records: tokens, and cells and states of recurrent layers (`kv/layout.py`).

On a CPU pieces are copied in place. On a GPU one kernel per field gathers them into a staging tensor, and the copy
engine moves whole records to and from pinned memory. Both run on a separate stream, after all steps that were launched
before: a step may still be writing the block that is saved, or reading the one that is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from tokenmill.kv.storage import KVStorage

Record = torch.Tensor  # uint8 [bytes], in host memory
BufferOf = Callable[[int], Sequence[Record]]  # region → the calling thread's records for it
Piece = tuple[int, int, int]  # of all blocks: address of row 0, bytes from row to row, bytes of one block's piece

PINNED_BYTES = 1 << 30  # the most memory pinned by one allocation
STAGING_BYTES = 32 << 20  # size of each of the two staging tensors on a GPU


class BlockRecords(Protocol):
    """Copies blocks to and from records; used by one thread at a time."""

    sizes: list[int]  # bytes of a record, by region

    def read(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None: ...

    def write(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None: ...

    def empty(self, region: int, number: int) -> list[Record]:
        """Allocate memory for records of a kind that is copied fast (pinned for a GPU)."""
        ...

    # For reading blocks without this object (`tiers/nixl.py`):

    def empty_beside_pool(self, region: int, number: int) -> list[Record]:
        """Allocate records on the pool's device; they can be written to the pool, but not stored in a tier."""
        ...

    def memory(self) -> list[torch.Tensor]:
        """Return tensors that together cover all memory of the pool."""
        ...

    def pieces(self, region: int) -> list[Piece]:
        """Return the locations of the pieces of a region's blocks, in the order of a record."""
        ...

    def row(self, region: int, block: int) -> int:
        """Return the row of a block."""
        ...

    def wait_for_steps(self) -> None:
        """Wait until all steps launched so far have written their blocks."""
        ...


class RegionPlanes:
    """The tensors of one region as bytes, and the mapping from block ids to their rows."""

    def __init__(self, tensors: Sequence[torch.Tensor], first: int) -> None:
        """`first`: the id of the block in row 1; row 0 is the null block."""
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
    """The locations of blocks in a pool that has every block as a whole (not distributed over ranks)."""

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

    def wait_for_steps(self) -> None:
        """Do nothing: on a CPU a block is registered after its step has ended."""

    def read(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        for block, record in zip(blocks, records, strict=True):
            for pool, piece in self._pieces(region, block, record):
                np.copyto(piece, pool)

    def write(self, region: int, blocks: Sequence[int], records: Sequence[Record]) -> None:
        for block, record in zip(blocks, records, strict=True):
            for pool, piece in self._pieces(region, block, record):
                np.copyto(pool, piece)

    def _pieces(self, region: int, block: int, record: Record) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return pairs of a block's piece of each tensor, [layers, bytes], and the record's part for it."""
        planes, row, start = self._regions[region], self._regions[region].row(block), 0
        found = []
        values = record.numpy()
        for array, size in zip(self._arrays[region], planes.sizes, strict=True):
            pool = array[:, row]
            found.append((pool, values[start : start + size].reshape(pool.shape)))
            start += size
        return found


class CopyStream(Protocol):
    """A stream on which copies run after all steps launched before them."""

    def run(self, copies: Callable[[], None]) -> None:
        """Launch copies and wait until they are done."""
        ...


class GpuCopyStream:
    """A separate CUDA stream for copies to and from a GPU."""

    def __init__(self, steps: torch.cuda.Stream) -> None:
        """`steps`: the stream on which steps are launched."""
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
        self._is_cuda = storage.device.type == "cuda"  # False only in tests
        self._stream = stream
        self._stagings = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def empty(self, region: int, number: int) -> list[Record]:
        size, records = self.sizes[region], []
        max_records = max(1, PINNED_BYTES // size)  # torch rounds pinned allocations up to a power of two
        for start in range(0, number, max_records):
            some = min(max_records, number - start)
            records += list(torch.empty((some, size), dtype=torch.uint8, pin_memory=self._is_cuda))
        return records

    def empty_beside_pool(self, region: int, number: int) -> list[Record]:
        return list(torch.empty((number, self.sizes[region]), dtype=torch.uint8, device=self._device))

    def wait_for_steps(self) -> None:
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
        """Copy blocks in parts that fit into a staging tensor; with two stagings, the copy of one part does not wait
        for the kernels of the previous part."""
        region = self._regions[number]
        size = max(1, STAGING_BYTES // region.record_bytes)
        rows = torch.tensor([region.row(block) for block in blocks], device=self._device)
        for part, start in enumerate(range(0, len(blocks), size)):
            some = records[start : start + size]
            copy(region, rows[start : start + size], self._staging(part % 2, len(some), region.record_bytes), some)

    def _staging(self, which: int, number: int, num_bytes: int) -> torch.Tensor:
        if self._stagings[which].numel() < number * num_bytes:
            self._stagings[which] = torch.empty(number * num_bytes, dtype=torch.uint8, device=self._device)
        return self._stagings[which][: number * num_bytes].view(number, num_bytes)

    def _gather(
        self, region: RegionPlanes, rows: torch.Tensor, staging: torch.Tensor, records: Sequence[Record]
    ) -> None:
        start = 0
        for plane, size in zip(region.planes, region.sizes, strict=True):
            pieces = as_int64(plane).index_select(1, rows).transpose(0, 1)  # [blocks, layers, int64 values]
            as_int64(staging[:, start : start + size].view(len(staging), *plane.shape[::2])).copy_(pieces)
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
            pieces = as_int64(staging[:, start : start + size].view(len(staging), *plane.shape[::2])).transpose(0, 1)
            as_int64(plane).index_copy_(1, rows, pieces)
            start += size


def runs(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """Return ranges of records that are adjacent in memory: each range is copied at once."""
    start = 0
    for end in range(1, len(records) + 1):
        if end < len(records) and is_adjacent(records[end], records[end - 1]):
            continue
        yield start, end
        start = end


def is_adjacent(record: Record, before: Record) -> bool:
    """Tell whether a record starts where another one ends, in the same allocation."""
    is_next = record.data_ptr() == before.data_ptr() + before.numel()
    return is_next and record.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def joined(records: Sequence[Record]) -> Record:
    """Return adjacent records as one."""
    return records[0].as_strided((sum(record.numel() for record in records),), (1,))


def bytes_of(record: Record) -> memoryview:
    return memoryview(record.numpy())  # type: ignore[arg-type]


def as_int64(values: torch.Tensor) -> torch.Tensor:
    """View bytes as 8-byte integers if alignment and length allow it: kernels copy them eight times as fast."""
    offsets = (values.shape[-1], values.storage_offset(), *values.stride()[:-1])
    return values if any(offset % 8 for offset in offsets) else values.view(torch.int64)
