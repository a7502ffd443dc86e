"""Decoding steps as CUDA graphs: rows that each feed one token and draw the next one.

Everything such a step needs is on the device already: block tables, each row's newest token, and what its draw depends
on. The host writes row numbers, positions and random numbers into its own memory, 32 bytes a row; the graph reads them
there, looks up the rest, runs the model, and leaves the drawn tokens where the next step will look for them, and where
the host will. So a step can be started before the one ahead of it is done, and nothing lies between two graphs.

    best     every row takes the most likely token
    draw     each row by its own parameters (see `device_draws`)
    hidden   the host draws: the step ends with hidden states

A graph is captured when its kind and batch size are first met. Sizes are padded to a few; the rows that only fill up
have number -1, see nothing, and write into the null block. All graphs share one pool of memory, which the largest,
captured first, has sized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import ForwardBatch, GroupTables, Mode
from tokenmill.ops.triton.batch.decode_inputs import (
    GatheredInputs,
    StepMailbox,
    change_tables,
    gather_inputs,
    publish_tokens,
)
from tokenmill.ops.triton.sampling.argmax import argmax
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.inflight import PendingTokens
from tokenmill.runner.memory import graph_sizes, table_width
from tokenmill.runner.pinned_inputs import PinnedStepInputs, RowTables, new_mailbox

Kind = Literal["best", "draw", "hidden"]
IDLE_KINDS: tuple[Kind, ...] = ("best", "draw")


@dataclass(frozen=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # tokens int64 [R], negative where there is none; or hidden states [R, H]


@dataclass(frozen=True)
class DecodeInputs:
    """What the rows of a step feed: `tokens` None takes each row's newest."""

    rows: list[int]
    positions: list[int]
    tokens: list[int] | None
    indices: list[int]  # how many output tokens each has


@cache
def recording_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def best_tokens(model: Model, hidden: torch.Tensor, mode: Mode) -> torch.Tensor:
    """The most likely tokens behind hidden states [R, H], int64 [R]; negative where there is none."""
    best_logits = model.best_logits
    tokens, _ = argmax(model.logits(hidden, mode)) if best_logits is None else best_logits(hidden, mode)
    return tokens


class DecodeGraphs:
    def __init__(
        self, model: Model, storage: KVStorage, draws: DeviceSampler, max_rows: int, max_blocks: int, max_context: int
    ) -> None:
        device = storage.device
        width = table_width(max_blocks)
        self.rows = RowTables(len(storage.layout.groups), max_rows, width, device)  # kept true by the runner
        self.newest = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last token drawn for each row
        self._numbers = torch.arange(max_rows + 1, device=device)  # of a step's lines
        self._starts = self._numbers.int()  # where their one token begins
        self._model = model
        self._storage = storage
        self._draws = draws
        self._max_context = max_context
        self._sizes = graph_sizes(max_rows)
        self._captured: dict[tuple[int, Kind], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._letters = PinnedStepInputs(max_rows, device)
        self._rehearsed = new_mailbox(max_rows, device)

    def start(self, fed: DecodeInputs, kind: Kind) -> PendingTokens:
        """Puts a step on the stream, which draws."""
        tokens, _ = self._launch(fed, kind)
        return PendingTokens({row: line for line, row in enumerate(fed.rows)}, tokens, self._letters.launched())

    def hidden(self, fed: DecodeInputs) -> torch.Tensor:
        """Puts a step on the stream; hidden states [R, H], overwritten by the next step of the same size"""
        _, result = self._launch(fed, "hidden")
        self._letters.launched()
        return result[: len(fed.rows)]

    def _launch(self, fed: DecodeInputs, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        """Where its tokens will be, in the host's memory, and on the device"""
        size = next(size for size in self._sizes if size >= len(fed.rows))
        graph = self._captured.get((size, kind)) or self._capture(size, kind)
        uniforms = self._draws.uniforms(fed.rows, fed.indices) if kind == "draw" else None
        tokens = self._letters.write(size, fed.rows, fed.positions, fed.tokens, fed.indices, uniforms)
        graph.graph.replay()
        return tokens, graph.result

    def ask_for_kernels(self) -> None:
        """Those that are in no other step, for `compile_beside`."""
        found = self._found(1, self._rehearsed)
        publish_tokens(found, found.token_ids, self._rehearsed, self.newest)
        change_tables(self.newest.new_empty(2, 1), self.rows.tables)

    def ask_for_draws(self) -> None:
        found = self._found(1, self._rehearsed)
        logits = torch.empty(1, self._model.vocab_size, device=self.newest.device)
        self._draws.count_fed(found.rows, found.indices, found.token_ids)
        self._draws.draw(logits, found.rows, found.indices, found.uniforms, self.newest)

    def captures(self) -> Iterator[Callable[[], object]]:
        """What is left to do until every size is captured, the smallest first; whatever is left of it happens when a
        size is first met. Steps in which the host draws are few: theirs are left to that."""
        for kind in IDLE_KINDS:
            for size in self._sizes:
                if (size, kind) not in self._captured:
                    yield partial(self._capture, size, kind)

    def capture_largest(self) -> None:
        """Takes the memory that decoding will ever take. Kernels of draws can wait, but not what they draw from."""
        self._capture(self._sizes[-1], "best", keeps_room=True)

    def _capture(self, size: int, kind: Kind, *, keeps_room: bool = False) -> DecodeGraph:
        """`keeps_room`: for logits in float32, which the pool has from then on"""

        def step(mailbox: StepMailbox) -> torch.Tensor:
            result = self._step(size, mailbox, kind)
            if keeps_room:
                torch.empty(size, self._model.vocab_size, dtype=torch.float32, device=self._storage.device)
            return result

        with torch.inference_mode():
            step(self._rehearsed)  # rows that only fill up change nothing
            torch.cuda.synchronize()
            captured = DecodeGraph(*self._recorded(partial(step, self._letters.mailbox)))
        self._captured[(size, kind)] = captured
        return captured

    def _recorded(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """By hand: `torch.cuda.graph` gives the memory that is held for steps back to the driver each time."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(recording_stream()):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = step()
            finally:
                graph.capture_end()
        return graph, result

    def _step(self, size: int, mailbox: StepMailbox, kind: Kind) -> torch.Tensor:
        found = self._found(size, mailbox)
        if kind == "draw":
            self._draws.count_fed(found.rows, found.indices, found.token_ids)
        hidden = self._model.forward(self._batch(found), self._storage)
        if kind == "hidden":
            publish_tokens(found, None, mailbox, self.newest)
            return hidden
        if kind == "draw":
            logits = self._model.logits(hidden, "captured")
            drawn = self._draws.draw(logits, found.rows, found.indices, found.uniforms, self.newest)
        else:
            drawn = best_tokens(self._model, hidden, "captured")
        publish_tokens(found, drawn, mailbox, self.newest)
        return drawn

    def _found(self, size: int, mailbox: StepMailbox) -> GatheredInputs:
        return gather_inputs(size, mailbox, self.rows.tables, self.newest, self._storage.block_size)

    def _batch(self, found: GatheredInputs) -> ForwardBatch:
        size = len(found.rows)
        return ForwardBatch(
            token_ids=found.token_ids,
            positions=found.positions,
            query_starts=self._starts[: size + 1],
            context_lens=found.contexts,
            groups=tuple(GroupTables(table, slots) for table, slots in zip(found.tables, found.slots, strict=True)),
            logit_rows=self._numbers[:size],
            block_size=self._storage.block_size,
            max_query_len=1,
            max_context_len=self._max_context,
            num_single=size,
            mode="captured",
        )
