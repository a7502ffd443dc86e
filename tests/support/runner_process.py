"""A runner in another process: only msgspec bytes of plans and results cross the pipe.

this process    RemoteRunner.launch(plan) ──► bytes ──► ModelRunner.launch
                RemoteRunner.draw(ticket, masks) ──► bytes ──► ModelRunner.draw
                RemoteRunner.collect(ticket) ──► bytes ──► ModelRunner.collect ──► bytes of a StepResult
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.guided.masks import StepMasks
from tokenmill.kv.storage import KVStorage
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.testing.scripted_models import ContextModel
from tokenmill.types import PENDING, RowInit, StepPlan, StepResult


class RunnerSizes(msgspec.Struct, frozen=True):
    vocab_size: int
    num_blocks: int
    block_size: int
    max_rows: int
    max_context: int


class LaunchStep(msgspec.Struct, tag=True, frozen=True):
    plan: StepPlan


class MaskLine(msgspec.Struct, frozen=True):
    row: int
    num_drafts: int
    bits: bytes


class Draw(msgspec.Struct, tag=True, frozen=True):
    ticket: int
    masks: list[MaskLine]


class Collect(msgspec.Struct, tag=True, frozen=True):
    ticket: int


class ReceivedMasks:
    """The part of `StepMasks` that the sampler reads."""

    def __init__(self, lines: list[MaskLine]) -> None:
        self._lines = {(line.row, line.num_drafts): np.frombuffer(line.bits, np.uint8) for line in lines}

    def bits(self, rows: Sequence[int], num_drafts: Sequence[int] = ()) -> NDArray[np.uint8]:
        drafts = num_drafts or [0] * len(rows)
        return np.stack([self._lines[row, number] for row, number in zip(rows, drafts, strict=True)])


def local_runner(limits: RunnerSizes, make: type[ModelRunner] = ModelRunner) -> ModelRunner:
    cpu = torch.device("cpu")
    model = ContextModel(limits.vocab_size)
    storage = KVStorage(model.layout, limits.num_blocks, limits.block_size, cpu)
    sampler = Sampler(limits.vocab_size, limits.max_rows, cpu)
    return make(model, storage, sampler, limits.max_rows, limits.max_context)


def serve(connection: Connection, limits: bytes) -> None:
    runner = local_runner(msgspec.msgpack.decode(limits, type=RunnerSizes))
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(LaunchStep | Draw | Collect)
    while received := connection.recv_bytes():
        message = decoder.decode(received)
        if isinstance(message, LaunchStep):
            runner.launch(message.plan)
        elif isinstance(message, Draw):
            masks: Any = ReceivedMasks(message.masks)
            runner.draw(message.ticket, masks)
        else:
            connection.send_bytes(msgspec.msgpack.encode(runner.collect(message.ticket)))


class RemoteRunner:
    def __init__(self, limits: RunnerSizes, depth: int, continues: Callable[[RowInit], bool]) -> None:
        self.depth = depth
        self.continues = continues
        self.most_in_flight = 0
        self.num_pending_guided = 0  # whether rows with grammars feed tokens that the host has not seen
        self._plans: dict[int, StepPlan] = {}
        self._has_grammar: dict[int, bool] = {}
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, msgspec.msgpack.encode(limits)))
        self._process.start()

    def launch(self, plan: StepPlan) -> int:
        self._has_grammar |= {new.row: new.params.guided is not None for new in plan.new_rows}
        self._connection.send_bytes(msgspec.msgpack.encode(LaunchStep(plan)))
        self._plans[plan.step] = plan
        self.most_in_flight = max(self.most_in_flight, len(self._plans))
        return plan.step

    def draw(self, ticket: int, masks: StepMasks) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(Draw(ticket, self._lines(self._plans[ticket], masks))))

    def collect(self, ticket: int) -> StepResult:
        plan = self._plans.pop(ticket)
        self.num_pending_guided += sum(
            row.token_ids == [PENDING] and self._has_grammar[row.row] for row in plan.rows if row.sample
        )
        self._connection.send_bytes(msgspec.msgpack.encode(Collect(ticket)))
        assert self._connection.poll(60), "the runner's process does not answer"
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=StepResult)

    def _lines(self, plan: StepPlan, masks: StepMasks) -> list[MaskLine]:
        return [
            MaskLine(row.row, number, masks.bits([row.row], [number]).tobytes())
            for row in plan.rows
            if row.sample and self._has_grammar[row.row]
            for number in range(row.num_drafts + 1)
        ]

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        pass

    def next_idle_task(self) -> bool:
        return False

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.send_bytes(b"")
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
