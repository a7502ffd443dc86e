"""Decoding steps as CUDA graphs: rows that each feed one token and draw the next one.

Everything such a step needs is on the device already: block tables, each row's newest token, and what its draw depends
on. The host sends row numbers, positions and random numbers, a few bytes each; the graph looks up the rest, runs the
model, and leaves the drawn tokens where the next step will look for them. So a step can be started before the one ahead
of it is done.

    best     every row takes the most likely token
    draw     each row by its own knobs (see `device_draws`)
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

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.triton.best import pick_best
from tokenmill.ops.triton.seats import NO_ROW, give, look_up, remember
from tokenmill.runner.device_draws import DeviceDraws
from tokenmill.runner.memory import graph_sizes

Ints = NDArray[np.int64]
Kind = Literal["best", "draw", "hidden"]
IDLE_KINDS: tuple[Kind, ...] = ("best", "draw")
ROW, POSITION, TOKEN, INDEX = range(4)  # lines of what the host sends


@dataclass(frozen=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    given: torch.Tensor  # int32 [4, R]
    uniforms: torch.Tensor  # float64 [R]
    result: torch.Tensor  # tokens int64 [R], negative where there is none; or hidden states [R, H]


@dataclass(frozen=True)
class Fed:
    """What the rows of a step feed: `tokens` None takes each row's newest."""

    rows: list[int]
    positions: list[int]
    tokens: list[int] | None
    indices: list[int]  # how many output tokens each has


@cache
def recording_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def best_tokens(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """The most likely tokens behind hidden states [R, H], int64 [R]; negative where there is none."""
    best_logits = model.best_logits
    tokens, _ = pick_best(model.logits(hidden)) if best_logits is None else best_logits(hidden)
    return tokens


class DecodeGraphs:
    def __init__(
        self, model: Model, storage: KVStorage, draws: DeviceDraws, max_rows: int, max_blocks: int, max_context: int
    ) -> None:
        device = storage.device
        self.tables = torch.zeros(
            len(storage.layout.groups), max_rows, max_blocks, dtype=torch.int32, device=device
        )  # of all rows, kept up to date by the runner
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

    def start(self, fed: Fed, kind: Kind) -> torch.Tensor:
        """Puts a step on the stream; line i of what comes back belongs to fed.rows[i]. It is overwritten by the next
        step of the same kind and size."""
        count = len(fed.rows)
        size = next(size for size in self._sizes if size >= count)
        graph = self._captured.get((size, kind)) or self._capture(size, kind)
        if size == 1:
            give(graph.given, fed.rows[0], fed.positions[0], fed.tokens[0] if fed.tokens else -1, fed.indices[0])
        else:
            self._send(fed, graph.given)
        if kind == "draw":
            uniforms = torch.zeros(size, dtype=torch.float64, pin_memory=True)
            uniforms.numpy()[:count] = self._draws.uniforms(fed.rows, fed.indices)
            graph.uniforms.copy_(uniforms, non_blocking=True)
        graph.graph.replay()
        return graph.result

    def _send(self, fed: Fed, given: torch.Tensor) -> None:
        count = len(fed.rows)
        lines = torch.empty(given.shape, dtype=torch.int32, pin_memory=True)
        values = lines.numpy()
        values[:, count:] = [[NO_ROW], [0], [-1], [0]]
        values[ROW, :count], values[POSITION, :count] = fed.rows, fed.positions
        values[TOKEN, :count] = -1 if fed.tokens is None else fed.tokens
        values[INDEX, :count] = fed.indices
        given.copy_(lines, non_blocking=True)

    def ask_for_kernels(self) -> None:
        """Those that are in no other step, for `compile_beside`."""
        given = self.tables.new_empty(4, 1)
        give(given, 0, 0, -1, 0)
        found = look_up(given, self.tables, self.newest, self._storage.block_size)
        remember(given, found.token_ids, self.newest)

    def ask_for_draws(self) -> None:
        for size in (1, 4):  # lines of `given` begin at any address, or at multiples of 16
            given = self.tables.new_empty(4, size)
            logits = torch.empty(size, self._model.vocab_size, device=given.device)
            self._draws.count_fed(given[ROW], given[INDEX], self.newest)
            self._draws.draw(logits, given[ROW], given[INDEX], logits.double()[:, 0], self.newest)

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
        device = self._storage.device
        given = torch.zeros(4, size, dtype=torch.int32, device=device)
        given[ROW] = NO_ROW  # a rehearsal with rows that only fill up changes nothing
        given[TOKEN] = -1
        uniforms = torch.zeros(size, dtype=torch.float64, device=device)

        def step() -> torch.Tensor:
            result = self._step(given, uniforms, kind)
            if keeps_room:
                torch.empty(size, self._model.vocab_size, dtype=torch.float32, device=device)
            return result

        with torch.inference_mode():
            step()
            torch.cuda.synchronize()
            graph, result = self._recorded(step)
        captured = DecodeGraph(graph, given, uniforms, result)
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

    def _step(self, given: torch.Tensor, uniforms: torch.Tensor, kind: Kind) -> torch.Tensor:
        batch = self._batch(given)
        if kind == "draw":
            self._draws.count_fed(given[ROW], given[INDEX], batch.token_ids)
        hidden = self._model.forward(batch, self._storage)
        if kind == "hidden":
            return hidden
        if kind == "draw":
            logits = self._model.logits(hidden)
            return self._draws.draw(logits, given[ROW], given[INDEX], uniforms, self.newest)
        drawn = best_tokens(self._model, hidden)
        remember(given, drawn, self.newest)
        return drawn

    def _batch(self, given: torch.Tensor) -> ForwardBatch:
        size = given.shape[1]
        found = look_up(given, self.tables, self.newest, self._storage.block_size)
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
        )
