"""Building the input tensors of a forward pass from the rows of a step.

rows        a: start 5, tokens [x y z]      b: start 0, tokens [u v]
tokens      x y z u v         owner   0 0 0 1 1        query_starts  0 3 5
positions   5 6 7 0 1         slots   table[owner, position // block_size] * block_size + position % block_size
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.types import RowPlan

Ints = NDArray[np.int64]


def build_batch(
    rows: Sequence[RowPlan],
    wanted: Sequence[Sequence[int]],
    tables: NDArray[np.int32],
    block_size: int,
    device: torch.device,
    adapters: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
) -> ForwardBatch:
    """Build the batch of a forward pass; `wanted[i]`: the tokens of row i, counted from its first one, whose hidden
    states are returned; `adapters[i]`: the slot of row i's adapter, None if no row has one; `owners[i]`: the rank with
    row i's context, None if every rank has all contexts."""
    counts = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    query_starts = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(query_starts[-1]) - query_starts[owner] + starts[owner]
    contexts = starts + counts

    def on_device(values: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        # A copy from pinned memory is queued on the device; otherwise the host would wait for it.
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=on_device(_concatenated([row.token_ids for row in rows])),
        positions=on_device(positions),
        query_starts=on_device(query_starts.astype(np.int32)),
        context_lens=on_device(contexts.astype(np.int32)),
        groups=tuple(
            GroupTables(on_device(table), on_device(_slots(table, owner, positions, block_size)))
            for table in _step_tables(rows, tables, int(contexts.max()), block_size)
        ),
        logit_rows=on_device(_concatenated(wanted) + np.repeat(query_starts[:-1], [len(part) for part in wanted])),
        block_size=block_size,
        max_query_len=int(counts.max()),
        max_context_len=int(contexts.max()),
        num_single=int(np.argmax(np.append(counts, 0) != 1)),
        lengths=tuple(zip(counts.tolist(), contexts.tolist(), strict=True)),
        adapters=None if adapters is None else on_device(np.repeat(np.asarray(adapters, np.int32), counts)),
        owners=None if owners is None else on_device(np.asarray(owners, np.int32)),
    )


def _concatenated(parts: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(parts), np.int64, sum(map(len, parts)))


def _step_tables(
    rows: Sequence[RowPlan], tables: NDArray[np.int32], max_context: int, block_size: int
) -> NDArray[np.int32]:
    """Return the rows' block tables, [groups, rows, blocks of the longest context]."""
    num_blocks = -(-max_context // block_size)
    return tables[:, [row.row for row in rows], :num_blocks]


def _slots(table: NDArray[np.int32], owner: Ints, positions: Ints, block_size: int) -> Ints:
    blocks = table[owner, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size
