"""A CUDA runner without a GPU: a graph is a forward pass that runs immediately, in launch order, as on a stream.

Everything but the kernels is the real runner: the assignment of rows, what is kept until a step is collected, and which
tokens only the device knows. Rows take the most likely token that their mask allows; sampling is tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.runner import cuda_runner, device_sampler
from tokenmill.runner.cuda_runner import CudaRunner
from tokenmill.runner.decode_graphs import DecodeInputs, PendingTokens
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.inputs import build_batch
from tokenmill.types import PENDING, RowPlan

CPU = torch.device("cpu")


def greedy(
    model: Model, hidden: torch.Tensor, _mode: str = "eager", adapters: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the most likely tokens, negative for logits that are not finite, as the kernels do."""
    logits = model.logits(hidden) if adapters is None else model.logits(hidden, adapters=adapters)
    return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)


class Arrived:
    num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


class EagerGraphs:
    """Replaces `DecodeGraphs`; has its own copy of the rows' block tables, as a device has."""

    def __init__(
        self, model: Model, storage: KVStorage, sampler: DeviceSampler, max_rows: int, max_blocks: int, max_context: int
    ) -> None:
        self._model, self._storage = model, storage
        self.newest = torch.zeros(max_rows, dtype=torch.int64)
        self.row_slots = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._tables = torch.zeros(len(storage.layout.groups), max_rows, max_blocks, dtype=torch.int32).numpy()
        self._hidden = torch.empty(0)  # every step writes its hidden states here
        self.rows = SimpleNamespace(change=self._change)
        self.num_pending = self.num_given = 0

    def _change(self, changes: Sequence[tuple[int, int, int, list[int]]]) -> None:
        for group, row, start, blocks in changes:
            self._tables[group, row, start : start + len(blocks)] = blocks

    def start(self, inputs: DecodeInputs, kind: str, *, is_adapted: bool = False) -> PendingTokens:
        assert kind == "greedy"
        adapters = self.row_slots[inputs.rows] if is_adapted else None
        drawn = greedy(self._model, self._forward(inputs, is_adapted), "eager", adapters)
        self.newest[inputs.rows] = drawn
        event: Any = Arrived()
        return PendingTokens({row: line for line, row in enumerate(inputs.rows)}, drawn, event)

    def hidden(self, inputs: DecodeInputs, *, is_adapted: bool = False) -> torch.Tensor:
        states = self._forward(inputs, is_adapted)
        self._hidden.fill_(float("nan"))  # overwrites the hidden states of the previous step
        self._hidden = states
        return states

    def _forward(self, inputs: DecodeInputs, is_adapted: bool) -> torch.Tensor:
        self.num_pending += inputs.tokens.count(PENDING)
        self.num_given += len(inputs.tokens) - inputs.tokens.count(PENDING)
        fed = [
            int(self.newest[row]) if token == PENDING else token
            for row, token in zip(inputs.rows, inputs.tokens, strict=True)
        ]
        plans = [
            RowPlan(row=row, start=position, token_ids=[max(0, token)])
            for row, position, token in zip(inputs.rows, inputs.positions, fed, strict=True)
        ]
        adapters = self.row_slots[inputs.rows].tolist() if is_adapted else None
        batch = build_batch(plans, [[0]] * len(plans), self._tables, self._storage.block_size, CPU, adapters)
        return self._model.forward(batch, self._storage)


def eager_runner(monkeypatch: pytest.MonkeyPatch) -> type[CudaRunner]:
    """The CUDA runner with everything that needs a GPU replaced."""

    def event(self: CudaRunner) -> Any:
        return Arrived()

    def to_host(self: CudaRunner, drawn: torch.Tensor, rows: list[int]) -> PendingTokens:
        return PendingTokens({row: line for line, row in enumerate(rows)}, drawn, self._event())

    def to_device(self: CudaRunner, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def keep_allowed(logits: torch.Tensor, numbers: torch.Tensor, masks: torch.Tensor) -> None:
        allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
        logits[numbers.long()] += torch.where(torch.from_numpy(allowed) > 0, 0.0, -torch.inf)

    def draw(
        self: DeviceSampler, logits: torch.Tensor, rows: torch.Tensor, indices: Any, uniforms: Any, newest: torch.Tensor
    ) -> torch.Tensor:
        drawn = torch.where(logits.isnan().any(-1), -1, logits.argmax(-1))
        newest[rows.long()] = drawn
        return drawn

    monkeypatch.setattr(device_sampler, "keep_allowed", keep_allowed)
    monkeypatch.setattr(DeviceSampler, "draw", draw)
    monkeypatch.setattr(DeviceSampler, "count_fed", lambda *_: None)
    monkeypatch.setattr(cuda_runner, "DecodeGraphs", EagerGraphs)
    monkeypatch.setattr(cuda_runner, "best_tokens", greedy)
    monkeypatch.setattr(cuda_runner, "WarmUp", lambda *_, **__: SimpleNamespace(compile_rest=lambda: None))
    monkeypatch.setattr(CudaRunner, "_event", event)
    monkeypatch.setattr(CudaRunner, "_to_host", to_host)
    monkeypatch.setattr(CudaRunner, "_to_device", to_device)
    return CudaRunner
