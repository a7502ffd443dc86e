"""Decoding steps as CUDA graphs: rows that each feed one token and sample the next one.

Everything else that such a step needs is already on the device: block tables, each row's newest token, its sampling
parameters and token counts. The host writes row numbers, positions and random numbers into pinned memory, 32 bytes a
row; the graph reads them there, gathers the rest, runs the model, and writes the sampled tokens to device memory for
the next step and to pinned memory for the host. So a step can be launched before the previous one is done, and the
device does not wait between two graphs.

    greedy   every row takes the most likely token
    sample   each row samples with its own parameters (see `device_sampler`)
    host     the step ends with hidden states, for sampling outside the graph

A graph is captured when its kind and batch size first occur, or earlier, while the engine is idle. Batches are padded
to a few sizes; padding rows have row number -1, attend to nothing, and write into the null block. All graphs share one
memory pool, whose size is set by the largest graph, which is captured first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import ForwardBatch, GroupTables, Mode
from tokenmill.ops.triton.batch.decode_inputs import (
    INDEX,
    NO_ROW,
    NUM_WORDS,
    POSITION,
    RING_SIZE,
    ROW,
    TOKEN,
    UNIFORM,
    GatheredInputs,
    StepMailbox,
    change_tables,
    gather_inputs,
    publish_tokens,
)
from tokenmill.ops.triton.sampling.argmax import argmax
from tokenmill.ops.triton.sampling.penalties import keep_allowed
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.memory import graph_sizes, table_width

Kind = Literal["greedy", "sample", "host"]
IDLE_KINDS: tuple[Kind, ...] = ("greedy", "sample")
STAGE_KINDS: tuple[Kind, ...] = ("host",)  # for a pipeline stage, whose graphs end with its last layer
PADDING_ROW = (NO_ROW, 0, -1, 0, 0, 0, 0, 0)  # pads a step to the size of its graph
NO_ADAPTERS = -1  # the version of graphs without adapters
MIN_TABLE_CHANGES = 512  # block-table entries that every allocated buffer has room for


@dataclass(frozen=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # tokens int64 [R], negative where sampling failed; or hidden states [R, H]


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of a step's rows."""

    rows: list[int]
    positions: list[int]
    tokens: list[int]  # PENDING: the row's newest token, which is on the device
    indices: list[int]  # how many output tokens each row has


@dataclass(frozen=True)
class PendingTokens:
    """Sampled tokens being copied to the host: token i belongs to the row with lines[row] == i."""

    lines: dict[int, int]
    tokens: torch.Tensor  # int64, pinned
    arrived: torch.cuda.Event

    def wait(self) -> list[int]:
        self.arrived.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


@cache
def recording_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def best_tokens(model: Model, hidden: torch.Tensor, mode: Mode, adapters: torch.Tensor | None = None) -> torch.Tensor:
    """Return the most likely next tokens for hidden states [R, H], int64 [R]; negative for a row without one.
    `adapters` [R]: the rows' adapter slots."""
    best_logits = model.best_logits
    if best_logits is None:
        tokens, _ = argmax(model.logits(hidden, mode, adapters))
    else:
        tokens, _ = best_logits(hidden, mode, adapters)
    return tokens


class DecodeGraphs:
    def __init__(
        self, model: Model, storage: KVStorage, sampler: DeviceSampler, max_rows: int, max_blocks: int, max_context: int
    ) -> None:
        device = storage.device
        width = table_width(max_blocks)
        self.rows = RowTables(len(storage.layout.groups), max_rows, width, device)  # kept up to date by the runner
        self.newest = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last token sampled for each row
        self.kinds = IDLE_KINDS  # captured while the engine is idle
        self._numbers = torch.arange(max_rows + 1, device=device)  # 0, 1, 2, ...
        self._starts = self._numbers.int()  # of a step's queries: each row has one
        self._model = model
        self._storage = storage
        self._sampler = sampler
        self._max_context = max_context
        self._sizes = graph_sizes(max_rows)
        # Each row's adapter slot; padding rows have row number -1, so they use the last entry.
        self.row_slots = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, Kind, int], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._inputs = PinnedStepInputs(max_rows, device)
        self._padding = new_mailbox(max_rows, device)

    def start(self, inputs: DecodeInputs, kind: Kind, *, is_adapted: bool = False) -> PendingTokens:
        """Launch a step that samples; `is_adapted`: some rows have adapters."""
        tokens, _ = self._launch(inputs, kind, is_adapted)
        return PendingTokens({row: line for line, row in enumerate(inputs.rows)}, tokens, self._inputs.launched())

    def hidden(self, inputs: DecodeInputs, *, is_adapted: bool = False) -> torch.Tensor:
        """Launch a step; return its hidden states [R, H], which the next step of the same size overwrites."""
        _, result = self._launch(inputs, "host", is_adapted)
        self._inputs.launched()
        return result[: len(inputs.rows)]

    def _launch(self, inputs: DecodeInputs, kind: Kind, is_adapted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay a graph; return where its tokens will be in pinned memory, and its result on the device."""
        size = next(size for size in self._sizes if size >= len(inputs.rows))
        version = self._adapter_version() if is_adapted else NO_ADAPTERS
        graph = self._captured.get((size, kind, version)) or self._capture(size, kind, version=version)
        uniforms = self._sampler.uniforms(inputs.rows, inputs.indices) if kind == "sample" else None
        tokens = self._inputs.write(size, inputs.rows, inputs.positions, inputs.tokens, inputs.indices, uniforms)
        graph.graph.replay()
        return tokens, graph.result

    def _adapter_version(self) -> int:
        """Return the version of the set of matrices that adapters have ever changed, on which graphs with adapters
        depend. Graphs of an earlier version are freed."""
        slots = self._model.adapter_slots
        assert slots is not None, "rows have adapters where the model has slots"
        for key in [key for key in self._captured if key[2] not in (NO_ADAPTERS, slots.version)]:
            del self._captured[key]
        return slots.version

    def ask_for_kernels(self) -> None:
        """Launch the kernels that no other kind of step has, so that `compile_in_parallel` compiles them."""
        gathered = self._gather(1, self._padding)
        publish_tokens(gathered, gathered.token_ids, self._padding, self.newest)
        change_tables(self.newest.new_empty(2, 1), self.rows.tables)

    def ask_for_draws(self) -> None:
        """Launch the sampling kernels, so that `compile_in_parallel` compiles them."""
        gathered = self._gather(1, self._padding)
        logits = torch.empty(1, self._model.vocab_size, device=self.newest.device)
        self._sampler.count_fed(gathered.rows, gathered.indices, gathered.token_ids)
        keep_allowed(logits, gathered.rows, gathered.rows.new_zeros(1, -(-self._model.vocab_size // 32)))
        self._sampler.draw(logits, gathered.rows, gathered.indices, gathered.uniforms, self.newest)

    def captures(self) -> Iterator[Callable[[], object]]:
        """Yield a task for each size in `kinds` that is not captured yet, the smallest first. Everything else is
        captured when it first occurs."""
        for kind in self.kinds:
            for size in self._sizes:
                if (size, kind, NO_ADAPTERS) not in self._captured:
                    yield partial(self._capture, size, kind)

    def capture_largest(self, room_bytes: int = 0) -> None:
        """Allocate the memory that captured steps will ever use, with room for the logits of steps that sample, and for
        `room_bytes` of the steps captured by `recorded_step`."""
        self._capture(self._sizes[-1], self.kinds[0], room_bytes=room_bytes)

    def _capture(
        self, size: int, kind: Kind, *, room_bytes: int | None = None, version: int = NO_ADAPTERS
    ) -> DecodeGraph:
        """`room_bytes`: memory to reserve in the graphs' pool, in addition to float32 logits; None reserves neither.
        `version`: of the adapters."""

        def step(mailbox: StepMailbox) -> torch.Tensor:
            result = self._step(size, mailbox, kind, is_adapted=version != NO_ADAPTERS)
            if room_bytes is not None:
                torch.empty(size, self._model.vocab_size, dtype=torch.float32, device=self._storage.device)
                torch.empty(room_bytes, dtype=torch.uint8, device=self._storage.device)
            return result

        with torch.inference_mode():
            step(self._padding)  # padding rows change nothing
            torch.cuda.synchronize()
            captured = DecodeGraph(*self._recorded(partial(step, self._inputs.mailbox)))
        self._captured[(size, kind, version)] = captured
        return captured

    def recorded_step(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Capture a step of another module in the same memory pool; return a function that replays it, and its result.
        The step is run once before, and must not change anything then."""
        step()
        torch.cuda.synchronize()
        graph, result = self._recorded(step)
        return graph.replay, result

    def _recorded(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture without `torch.cuda.graph`, which would return the memory reserved for steps to the driver."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(recording_stream()):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = step()
            finally:
                graph.capture_end()
        return graph, result

    def _step(self, size: int, mailbox: StepMailbox, kind: Kind, *, is_adapted: bool = False) -> torch.Tensor:
        gathered = self._gather(size, mailbox)
        adapters = self.row_slots[gathered.rows] if is_adapted else None
        if kind == "sample":
            self._sampler.count_fed(gathered.rows, gathered.indices, gathered.token_ids)
        hidden = self._model.forward(self._batch(gathered, adapters), self._storage)
        if kind == "host":
            publish_tokens(gathered, None, mailbox, self.newest)
            return hidden
        if kind == "sample":
            logits = self._model.logits(hidden, "captured", adapters)
            drawn = self._sampler.draw(logits, gathered.rows, gathered.indices, gathered.uniforms, self.newest)
        else:
            drawn = best_tokens(self._model, hidden, "captured", adapters)
        publish_tokens(gathered, drawn, mailbox, self.newest)
        return drawn

    def _gather(self, size: int, mailbox: StepMailbox) -> GatheredInputs:
        return gather_inputs(size, mailbox, self.rows.tables, self.newest, self._storage.block_size)

    def _batch(self, gathered: GatheredInputs, adapters: torch.Tensor | None) -> ForwardBatch:
        size = len(gathered.rows)
        return ForwardBatch(
            token_ids=gathered.token_ids,
            positions=gathered.positions,
            query_starts=self._starts[: size + 1],
            context_lens=gathered.contexts,
            groups=tuple(map(GroupTables, gathered.tables, gathered.slots)),
            logit_rows=self._numbers[:size],
            block_size=self._storage.block_size,
            max_query_len=1,
            max_context_len=self._max_context,
            num_single=size,
            mode="captured",
            adapters=adapters,
        )


# ── pinned memory ──────────────────────────────────────────────────────────────────────────────────────


def shared(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory that kernels on `device` can access."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_mailbox(max_rows: int, device: torch.device) -> StepMailbox:
    """Return a mailbox whose slots all hold padding rows."""
    sent = shared(RING_SIZE, max_rows, NUM_WORDS.value, dtype=torch.int32, device=device)
    sent.numpy()[:] = PADDING_ROW
    drawn = shared(RING_SIZE, max_rows, dtype=torch.int64, device=device)
    return StepMailbox(sent, drawn, torch.zeros(1, dtype=torch.int32, device=device))


class RingSlots:
    """The slots of a ring of pinned memory, each with an event recorded after its last use.

    Torch tracks only its own copies, so it does not know when a kernel has finished with pinned memory. A slot is
    rewritten only after its event has completed; with this many slots that never takes a wait.
    """

    def __init__(self) -> None:
        self.next = 0
        self._done: list[torch.cuda.Event | None] = [None] * RING_SIZE

    def take(self) -> int:
        """Return the next slot, once no kernel reads or writes it any more."""
        done = self._done[self.next]
        if done is not None:
            done.synchronize()
        return self.next

    def used(self) -> torch.cuda.Event:
        """Record that the work that uses the slot is on the stream; the event completes when that work is done."""
        done = self._done[self.next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._done[self.next] = done
        self.next = (self.next + 1) % RING_SIZE
        return done


class PinnedStepInputs:
    """The host's side of a mailbox: it writes the inputs of steps and receives their tokens."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.mailbox = new_mailbox(max_rows, device)
        self._words: NDArray[np.int32] = self.mailbox.sent.numpy()
        self._uniforms: NDArray[np.float64] = self._words.view(np.float64)
        self._slots = RingSlots()
        self._is_written = False  # inputs were written whose step is not launched yet

    def write(
        self,
        size: int,
        rows: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        indices: Sequence[int],
        uniforms: Sequence[float] | None,
    ) -> torch.Tensor:
        """Write the inputs of the next step, of `size` rows; return where its tokens will be, int64 [size]."""
        if self._is_written:  # the last step failed before or after its launch: the device knows its slot
            self._slots.next = int(self.mailbox.turn)
        self._is_written = True
        slot, count = self._slots.take(), len(rows)
        words = self._words[slot]
        words[count:size] = PADDING_ROW
        words[:count, ROW], words[:count, POSITION], words[:count, INDEX] = rows, positions, indices
        words[:count, TOKEN] = tokens
        if uniforms is not None:
            self._uniforms[slot, :count, UNIFORM // 2] = uniforms
        return self.mailbox.drawn[slot, :size]

    def launched(self) -> torch.cuda.Event:
        """Record that the step with the written inputs is on the stream; the event completes when the step is done."""
        done = self._slots.used()
        self._is_written = False
        return done


class RowTables:
    """Block tables of all rows on the device, int32 [groups, max_rows, max_blocks]."""

    def __init__(self, num_groups: int, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros(num_groups, max_rows, max_blocks, dtype=torch.int32, device=device)
        self._slots = RingSlots()
        self._buffers = [shared(0, dtype=torch.int64, device=device)] * RING_SIZE

    def change(self, changes: Sequence[tuple[int, int, int, list[int]]]) -> None:
        """Apply changes to the tables, each (group, row, first entry, block ids from that entry on)."""
        if not changes:
            return
        _, max_rows, max_blocks = self.tables.shape
        counts = [len(blocks) for *_, blocks in changes]
        firsts = [(group * max_rows + row) * max_blocks + start for group, row, start, _ in changes]
        total = sum(counts)
        packed = self._room(total)
        lines = packed.numpy()
        offsets = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        lines[0] = np.repeat(firsts, counts) + offsets
        lines[1] = np.concatenate([blocks for *_, blocks in changes]) if len(changes) > 1 else changes[0][3]
        change_tables(packed, self.tables)
        self._slots.used()

    def _room(self, num_changes: int) -> torch.Tensor:
        """Return pinned memory int64 [2, num_changes] of the next slot."""
        slot = self._slots.take()
        if self._buffers[slot].numel() < 2 * num_changes:
            size = 2 * max(num_changes, MIN_TABLE_CHANGES)
            self._buffers[slot] = shared(size, dtype=torch.int64, device=self.tables.device)
        return self._buffers[slot][: 2 * num_changes].view(2, num_changes)
