"""Steps of short prompt chunks, alone or together with rows that decode, as CUDA graphs.

Launching the kernels of such a step one by one takes the host longer than computing them takes the device: 17 ms for 32
layers, while 128 prompt tokens and 32 rows of an 8B model are computed in 7 ms. So these steps are captured, padded to
a few numbers of single rows and of chunk tokens:

    tokens   [ single 0 | single 1 | ... | padding | chunk of prompt A ... | chunk of prompt B ... | padding ]
    rows     [ one each .....................      | A | B | unused | unused ]

The host sends one array of integers; block tables, newest tokens and slots are looked up on the device, in the graph.
Padding tokens belong to no row: they are written into the null block, and no row attends to them. The graph ends with
hidden states; sampling follows as in a step without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.runner.decode_graphs import DecodeGraphs
from tokenmill.runner.memory import RunnerLimits, mixed_step_bytes
from tokenmill.runner.mixed_sizes import CHUNKS, MAX_ALONE, MAX_PROMPTS, SINGLES, can_mix, mixed_sizes
from tokenmill.types import PENDING, RowPlan

NO_ROW = -1
COMPILED_SINGLES, COMPILED_CHUNKS = (0, 8, 32, 64), (16, 32, 64, 256)  # these sizes launch the kernels of all sizes

Replay = Callable[[], object]


@dataclass(frozen=True)
class MixedGraph:
    replay: Replay
    sent: torch.Tensor  # int64, the integers of `packed`
    hidden: torch.Tensor  # [rows, H], overwritten by the next step of the same size


def mixed_graphs_of(
    model: Model, storage: KVStorage, graphs: DecodeGraphs, max_rows: int, max_context: int
) -> MixedGraphs | None:
    """Return None if the model's steps with prompt chunks can't be captured."""
    if not isinstance(model, Decoder) or not model.is_whole or not can_mix(model.spec):
        return None
    return MixedGraphs(model, storage, graphs, max_rows, max_context)


class MixedGraphs:
    def __init__(
        self, model: Decoder, storage: KVStorage, graphs: DecodeGraphs, max_rows: int, max_context: int
    ) -> None:
        self._model = model
        self._max_rows = max_rows
        self._storage = storage
        self._graphs = graphs
        self._max_context = max_context
        self._captured: dict[tuple[int, int], MixedGraph] = {}

    def takes(self, plans: Sequence[RowPlan]) -> bool:
        """Tell whether a step is small enough. A step of prompts alone delays no other row, so that no size is captured
        for it while requests wait."""
        num_single = num_singles(plans)
        num_tokens = sum(len(plan.token_ids) for plan in plans) - num_single
        if num_single > SINGLES[-1] or len(plans) - num_single > MAX_PROMPTS or num_tokens > CHUNKS[-1]:
            return False
        return num_single > 0 or (num_tokens <= MAX_ALONE and _padded(0, num_tokens) in self._captured)

    def hidden(self, plans: Sequence[RowPlan]) -> torch.Tensor:
        """Launch a step, its single rows first; return hidden states [R, H] of each row's last token, which the next
        step of the same size overwrites."""
        num_single = num_singles(plans)
        num_tokens = sum(len(plan.token_ids) for plan in plans) - num_single
        singles, tokens = _padded(num_single, num_tokens)
        graph = self._captured.get((singles, tokens)) or self._capture(singles, tokens)
        numbers = torch.from_numpy(packed(plans, singles, tokens))
        is_pinned = graph.sent.device.type == "cuda"
        graph.sent.copy_(numbers.pin_memory() if is_pinned else numbers, non_blocking=True)
        graph.replay()
        if num_single == singles:
            return graph.hidden[: len(plans)]
        return torch.cat([graph.hidden[:num_single], graph.hidden[singles : singles + len(plans) - num_single]])

    def step_bytes(self) -> int:
        """Return the bytes that the largest step uses."""
        block_size, value_bytes = self._storage.block_size, self._model.dtype.itemsize
        limits = RunnerLimits(self._max_rows, 1, self._max_context, block_size, value_bytes)
        return mixed_step_bytes(self._model.spec, limits)

    def captures(self) -> Iterator[Callable[[], object]]:
        """Yield a task for each size that is not captured yet, those of short chunks first. Otherwise a size with
        decoding rows is captured when it first occurs."""
        for singles, tokens in mixed_sizes(self._max_rows):
            if (singles, tokens) not in self._captured:
                yield partial(self._capture, singles, tokens)

    def ask_for_kernels(self, model: Model) -> None:
        """Launch steps of some sizes with `model`, so that `compile_in_parallel` compiles the kernels of all sizes."""
        for singles in COMPILED_SINGLES:
            for tokens in COMPILED_CHUNKS:
                sent = torch.from_numpy(packed([], singles, tokens)).to(self._storage.device)
                model.forward(self._batch(sent, singles, tokens), self._storage)

    def _capture(self, singles: int, tokens: int) -> MixedGraph:
        sent = torch.from_numpy(packed([], singles, tokens)).to(self._storage.device)

        def step() -> torch.Tensor:
            return self._model.forward(self._batch(sent, singles, tokens), self._storage)

        with torch.inference_mode():
            replay, hidden = self._graphs.recorded_step(step)
        captured = self._captured[(singles, tokens)] = MixedGraph(replay, sent, hidden)
        return captured

    def _batch(self, sent: torch.Tensor, singles: int, tokens: int) -> ForwardBatch:
        """Build a batch from the integers of `packed`."""
        num_tokens, num_rows = singles + tokens, singles + MAX_PROMPTS
        lengths = [num_tokens, num_tokens, num_tokens, num_rows, num_rows, num_rows, num_rows + 1]
        token_ids, positions, owners, rows, contexts, last, starts = torch.split(sent, lengths)
        rows, is_token, owners = rows.clamp_min(0), owners != NO_ROW, owners.clamp_min(0)
        newest = self._graphs.newest[rows[owners]].clamp_min(0)
        tables = self._graphs.rows.tables[:, rows]
        size = self._storage.block_size
        groups = []
        for table in tables:
            blocks = table[owners, positions // size].long()
            groups.append(GroupTables(table, torch.where(is_token, blocks * size + positions % size, 0)))
        return ForwardBatch(
            token_ids=torch.where(token_ids == PENDING, newest, token_ids),
            positions=positions,
            query_starts=starts.int(),
            context_lens=contexts.int(),
            groups=tuple(groups),
            logit_rows=last,
            block_size=size,
            max_query_len=tokens,
            max_context_len=self._max_context,
            num_single=singles,
            mode="captured",
        )


def _padded(num_single: int, num_tokens: int) -> tuple[int, int]:
    """Return the captured size of a step."""
    singles = next(size for size in (0, *SINGLES) if size >= num_single)
    return singles, next(size for size in CHUNKS if size >= num_tokens)


def num_singles(plans: Sequence[RowPlan]) -> int:
    """Return how many rows feed one token; they come first."""
    return sum(len(plan.token_ids) == 1 for plan in plans)


def packed(plans: Sequence[RowPlan], singles: int, tokens: int) -> NDArray[np.int64]:
    """Pack the integers of a step: for each token its id, position and row; for each row its row number, the length of
    its context, and the indices of its last and first tokens."""
    num_single, num_tokens, num_rows = num_singles(plans), singles + tokens, singles + MAX_PROMPTS
    by_token = np.zeros((3, num_tokens), np.int64)
    by_row = np.zeros((3, num_rows), np.int64)
    starts = np.zeros(num_rows + 1, np.int64)
    by_token[2], by_row[0] = NO_ROW, NO_ROW
    starts[: singles + 1] = np.arange(singles + 1)
    at = singles
    for number, plan in enumerate(plans):
        row = number if number < num_single else singles + number - num_single
        first, count = (number, 1) if number < num_single else (at, len(plan.token_ids))
        span = slice(first, first + count)
        by_token[0, span] = plan.token_ids
        by_token[1, span] = np.arange(plan.start, plan.start + count)
        by_token[2, span] = row
        by_row[:, row] = plan.row, plan.start + count, first + count - 1
        if number >= num_single:
            at += count
            starts[row + 1] = at
    for row in range(singles + len(plans) - num_single, num_rows):  # unused rows are empty
        starts[row + 1] = at
    return np.concatenate([by_token.ravel(), by_row.ravel(), starts])
