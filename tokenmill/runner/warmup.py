"""Warm-up of a GPU runner, before its first request and while it is idle: steps that write only into the null block.

start         kernels of the first steps are compiled in parallel ─► widest step ─► largest graph; all memory is taken
first token   from here on, kernels of decoding steps of every size are compiled while requests run
idle          a graph of each size; the end of a long prompt; graphs of prompt chunks, alone and with decoding rows;
              long prompts, whose attention library takes a second to load

All but the graphs run with one layer of each kind, which launches the same kernels and uses the same memory as all
layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import representative_layers
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.triton.launch import preload
from tokenmill.ops.triton.launch.kernel import CompileOnLaunch, Compiling, compile_in_parallel
from tokenmill.runner.decode_graphs import DecodeGraphs, best_tokens
from tokenmill.runner.inputs import build_batch
from tokenmill.runner.memory import graph_sizes
from tokenmill.runner.mixed_graphs import MixedGraphs
from tokenmill.types import RowPlan

SHORT, MIDDLE, LONG = 40, 640, 4096  # prompt lengths in tokens
FEW = (24, 12)  # tokens of prompts whose beginning was cached: GEMMs of so few rows have their own kernels
SOME = (100, SHORT)  # tokens of short whole prompts
LATE = (SHORT, 12)  # tokens at the end of long prompts: attention cuts few of them into smaller tiles
MAX_COMPILED_ROWS = 80  # decoding steps up to this size (padded to 128) have different kernels for different sizes
Chunk = tuple[int, int]  # a row's tokens: first position and number


class WarmUp:
    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        graphs: DecodeGraphs,
        max_rows: int,
        max_context: int,
        mixed: MixedGraphs | None = None,
        *,
        has_head: bool = True,
    ) -> None:
        """`has_head`: False for a later stage of a pipeline."""
        self._model = representative_layers(model)
        self._storage = storage
        self._graphs = graphs
        self._mixed = mixed
        self._max_rows = max_rows
        self._max_context = max_context
        self._has_head = has_head
        self._compiling: Compiling | CompileOnLaunch | None = None
        self._not_requested: list[Callable[[], object]] = []  # launches of the kernels not requested yet
        self._is_rest_requested = False

    @torch.inference_mode()
    def compile_first(self, token_budget: int, while_compiling: Callable[[], object]) -> None:
        """Compile the kernels of the first steps. `while_compiling` is called while the compilers run; if they are
        still running then, the kernels needed next are determined meanwhile."""
        preload.finish_products(self._storage.device)
        self._compiling = compile_in_parallel(*self._first_launches(token_budget))
        while_compiling()
        self._not_requested, self._is_rest_requested = [self._launch_rest], False
        if self._compiling.is_working:
            self._compiling.note(self._not_requested.pop())
        self._compiling.join()

    @torch.inference_mode()
    def compile_rest(self) -> None:
        """Start compiling the other kernels in the background; a second call does nothing."""
        if self._compiling is not None and not self._is_rest_requested:
            self._is_rest_requested = True
            self._compiling.make(*self._not_requested)

    @torch.inference_mode()
    def run_widest(self, token_budget: int) -> None:
        """Run a step of as many rows and as many tokens as the limits allow."""
        self.compute(self._widest(token_budget))
        torch.cuda.synchronize()

    def preparations(self, token_budget: int) -> Iterator[Callable[[], object]]:
        """Yield the idle tasks, in order."""
        longest = min(self._max_context - 1, token_budget)
        yield self.compile_rest
        yield partial(self.rehearse, [(0, min(SHORT, longest))] * 2)
        yield from self._graphs.captures()
        for length in LATE:
            yield partial(self.rehearse, [self._late_chunk(min(length, longest))])
        if self._mixed is not None:
            yield from self._mixed.captures()
        yield partial(self.rehearse, [(0, longest)])  # last, because it may block for a second

    @torch.inference_mode()
    def rehearse(self, chunks: list[Chunk]) -> None:
        """Compute a step of these chunks, one per row, which writes into the null block."""
        self.compute(self._batch(chunks))

    def _widest(self, token_budget: int) -> ForwardBatch:
        """Build the batch of the widest step, in which no row is a whole prompt."""
        lengths = [1] * min(self._max_rows, token_budget)
        left = token_budget - len(lengths)
        for row in range(len(lengths)):
            more = min(left, self._max_context - 2)
            lengths[row], left = 1 + more, left - more
        return self._batch([(1 if length > 1 else 0, length) for length in reversed(lengths)])

    def _first_launches(self, token_budget: int) -> Iterator[Callable[[], object]]:
        """Yield launches of the steps whose kernels are compiled first, the slowest to compile first."""
        few, fewer = FEW
        yield partial(self._launch_decoding, 1)
        yield partial(self._launch, self._prompt, few)
        yield partial(self._launch, self._widest, token_budget)
        yield partial(self._launch, self._prompt, fewer)
        yield partial(self._launch_decoding, self._max_rows)
        for length in SOME:
            yield partial(self._launch, self._prompt, length)
        yield self._graphs.ask_for_kernels

    def _launch(self, batch: Callable[[int], ForwardBatch], size: int) -> None:
        self.compute(batch(size))

    def _launch_decoding(self, num_rows: int) -> None:
        self.compute(self.decoding(num_rows))

    def _launch_rest(self) -> None:
        if self._has_head:
            self._graphs.ask_for_draws()
        middle = min(MIDDLE, self._max_context - 1)
        late = ([self._late_chunk(length)] for length in LATE)
        for chunks in ([(0, middle)], [(middle - 1, 1), (0, SHORT)], *late):
            self.compute(self._batch(chunks))
        for size in graph_sizes(min(self._max_rows, MAX_COMPILED_ROWS)):
            self._launch_decoding(size)
        if self._mixed is not None:
            self._mixed.ask_for_kernels(self._model)

    def _late_chunk(self, num_tokens: int) -> Chunk:
        """Return the end of a long prompt whose beginning was cached or transferred."""
        return max(0, min(LONG, self._max_context - 1) - num_tokens), num_tokens

    def _prompt(self, num_tokens: int) -> ForwardBatch:
        return self._batch([(0, min(num_tokens, self._max_context - 1))])

    def decoding(self, num_rows: int) -> ForwardBatch:
        """Build a decode batch as captured in a graph, whose kernels are those for the longest context."""
        return replace(self._batch([(0, 1)] * num_rows), max_context_len=self._max_context, mode="captured")

    def _batch(self, chunks: list[Chunk]) -> ForwardBatch:
        plans = [RowPlan(row=row, start=start, token_ids=[0] * count) for row, (start, count) in enumerate(chunks)]
        num_blocks = max(start + count for start, count in chunks) // self._storage.block_size + 1
        nulls = np.zeros((len(self._storage.layout.groups), len(chunks), num_blocks), np.int32)
        wanted = [[count - 1] for _, count in chunks]
        return build_batch(plans, wanted, nulls, self._storage.block_size, self._storage.device)

    def compute(self, batch: ForwardBatch) -> None:
        states = self._model.forward(batch, self._storage)
        if not self._has_head:
            return
        hidden = states[: len(batch.logit_rows)]  # the first pipeline stage returns the states of all tokens
        best_tokens(self._model, hidden, batch.mode)
        self._model.logits(hidden, batch.mode)  # which sampling needs
