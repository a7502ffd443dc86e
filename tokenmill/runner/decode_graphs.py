"""Decoding steps as CUDA graphs: rows that each feed one token and draw the most likely next one.

Everything such a step needs is on the device already: block tables and each row's newest token. The host sends the
row numbers and positions, four bytes each; the graph looks up the rest, runs the model, and leaves the drawn tokens
where the next step will look for them. So a step can be started before the one ahead of it is done.

A graph is captured when its batch size is first met. Sizes are padded to a few; the rows that only fill up have
number -1, see nothing, and write into the null block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.triton.best import pick_best
from tokenmill.ops.triton.seats import NO_ROW, look_up, remember

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    given: torch.Tensor  # int32 [3, R]
    drawn: torch.Tensor  # int64 [R], -1 where the logits are not finite
    hidden: torch.Tensor  # [R, H], for rows that draw in another way


def graph_sizes(max_rows: int) -> list[int]:
    """1 2 4 8 16 24 32 48 64 80 ... 128 160 ... 256 320 384 ..."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, 128, 16), *range(128, 256, 32), *range(256, 512, 64)]
    sizes += range(512, max_rows, 64)
    return [size for size in sizes if size < max_rows] + [max_rows]


class DecodeGraphs:
    def __init__(self, model: Model, storage: KVStorage, max_rows: int, max_blocks: int, max_context: int) -> None:
        device = storage.device
        self.tables = torch.zeros(
            len(storage.layout.groups), max_rows, max_blocks, dtype=torch.int32, device=device
        )  # of all rows, kept up to date by the runner
        self.newest = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last token drawn for each row
        self._model = model
        self._storage = storage
        self._max_context = max_context
        self._sizes = graph_sizes(max_rows)
        self._captured: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def start(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64] | None
    ) -> DecodeGraph:
        """Puts a step on the stream; `tokens` None takes each row's newest. Row i's token will be `drawn[i]`."""
        size = next(size for size in self._sizes if size >= len(rows))
        graph = self._captured.get(size) or self._capture(size)
        given = torch.empty(3, size, dtype=torch.int32, pin_memory=True)
        lines = given.numpy()
        lines[0, : len(rows)], lines[0, len(rows) :] = rows, NO_ROW
        lines[1, : len(rows)], lines[1, len(rows) :] = positions, 0
        lines[2] = -1
        if tokens is not None:
            lines[2, : len(rows)] = tokens
        graph.given.copy_(given, non_blocking=True)
        graph.graph.replay()
        return graph

    def prepare(self) -> None:
        """Captures every size now; otherwise each is captured when it is first met."""
        for size in self._sizes:
            if size not in self._captured:
                self._capture(size)

    def _capture(self, size: int) -> DecodeGraph:
        given = torch.zeros(3, size, dtype=torch.int32, device=self._storage.device)
        given[0] = NO_ROW  # a rehearsal with rows that only fill up changes nothing
        given[2] = -1
        with torch.inference_mode():
            self._step(given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                drawn, hidden = self._step(given)
        captured = DecodeGraph(graph, given, drawn, hidden)
        self._captured[size] = captured
        return captured

    def _step(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._model.forward(self._batch(given), self._storage)
        drawn = pick_best(self._model.logits(hidden))
        remember(given, drawn, self.newest)
        return drawn, hidden

    def _batch(self, given: torch.Tensor) -> ForwardBatch:
        size, device = given.shape[1], given.device
        found = look_up(given, self.tables, self.newest, self._storage.block_size)
        return ForwardBatch(
            token_ids=found.token_ids,
            positions=found.positions,
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=found.contexts,
            groups=tuple(GroupTables(table, slots) for table, slots in zip(found.tables, found.slots, strict=True)),
            logit_rows=torch.arange(size, device=device),
            block_size=self._storage.block_size,
            max_query_len=1,
            max_context_len=self._max_context,
            num_single=size,
        )
