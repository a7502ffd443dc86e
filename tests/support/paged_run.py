"""Runs a model through the paged KV cache without a scheduler: shuffled blocks, prompt chunks, several rows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.cpu.decoder import NativeDecoder

CPU = torch.device("cpu")


def compute_dtype(model: Decoder | NativeDecoder) -> str:
    """Return the data type of activations, which is that of the output projection's input."""
    if isinstance(model, NativeDecoder):
        return "float32"
    embedded = model.embedding.rows(torch.zeros(1, dtype=torch.int64))
    return str(embedded.dtype).removeprefix("torch.")


def shuffled(*shape: int) -> torch.Tensor:
    """Return block ids from 1, int32, in random order."""
    ids = list(range(1, 1 + math.prod(shape)))
    random.Random(0).shuffle(ids)
    return torch.tensor(ids, dtype=torch.int32).view(shape)


class PagedRun:
    """Rows with room for `max_len` tokens each; their blocks are spread over the pool in random order."""

    def __init__(
        self,
        model: Decoder | NativeDecoder,
        num_rows: int,
        max_len: int,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        adapters: Sequence[int] | None = None,
    ) -> None:
        """`adapters`: the slot of each row's adapter."""
        layout = KVLayout.from_spec(model.spec, CacheDtypes(str(dtype).removeprefix("torch."), compute_dtype(model)))
        groups = len(layout.paged)
        per_row = -(-max_len // block_size)
        num_blocks = 1 + groups * num_rows * per_row
        rows = torch.tensor(layout.rows_per_block[:groups], dtype=torch.int32).view(groups, 1, 1)
        tables = [shuffled(groups, num_rows, per_row) * rows]
        num_others = 1 + num_rows * per_row if layout.is_recurrent else 0  # ids of cells, and of states
        tables += [shuffled(1, num_rows, per_row) for _ in layout.groups[groups:]]
        self.tables = torch.cat(tables)
        self.storage = KVStorage(layout, num_blocks, block_size, CPU, num_cells=num_others, num_states=num_others)
        self.model = model
        self.lengths = [0] * num_rows
        self.adapters = None if adapters is None else torch.tensor(adapters, dtype=torch.int32)

    def feed(self, tokens: dict[int, list[int]], every_logit: bool = True) -> torch.Tensor:
        """Feed new tokens to some rows; return the logits of all of them, one after another, or of each row's last."""
        batch = self._batch(tokens, every_logit)
        for row, ids in tokens.items():
            self.lengths[row] += len(ids)
        hidden = self.model.forward(batch, self.storage)
        if batch.adapters is None:
            return self.model.logits(hidden)
        return self.model.logits(hidden, adapters=batch.adapters[batch.logit_rows])

    def _batch(self, tokens: dict[int, list[int]], every_logit: bool) -> ForwardBatch:
        rows, counts = list(tokens), [len(ids) for ids in tokens.values()]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        positions = torch.cat([torch.arange(self.lengths[r], self.lengths[r] + len(tokens[r])) for r in rows])
        contexts = torch.tensor([self.lengths[r] + len(tokens[r]) for r in rows], dtype=torch.int32)
        owner = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        size = self.storage.block_size
        slots = self.tables[:, owner, positions // size].long() * size + positions % size
        return ForwardBatch(
            token_ids=torch.tensor([i for ids in tokens.values() for i in ids]),
            positions=positions,
            query_starts=starts,
            context_lens=contexts,
            groups=tuple(GroupTables(table[rows], slot) for table, slot in zip(self.tables, slots, strict=True)),
            logit_rows=torch.arange(len(positions)) if every_logit else starts[1:].long() - 1,
            block_size=size,
            max_query_len=max(counts),
            max_context_len=int(contexts.max()),
            adapters=None if self.adapters is None else self.adapters[owner],
        )


def feed_in_chunks(run: PagedRun, row: int, tokens: list[int], chunk: int) -> torch.Tensor:
    """Return the logits [len(tokens), vocab] of one row fed chunk by chunk."""
    return torch.cat([run.feed({row: tokens[at : at + chunk]}) for at in range(0, len(tokens), chunk)])


def greedy(run: PagedRun, row: int, prompt: list[int], count: int, chunk: int) -> list[int]:
    last = feed_in_chunks(run, row, prompt, chunk)[-1]
    found = [int(last.argmax())]
    while len(found) < count:
        found.append(int(run.feed({row: found[-1:]})[-1].argmax()))
    return found
