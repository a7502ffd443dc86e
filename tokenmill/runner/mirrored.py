"""Steps on ranks with GPUs: each call of rank 0's runner is repeated on all other ranks, in the same order.

    core: MirroredRunner.launch(plan)   ──► launch, plan ──►  mirror(): launch on ranks 1 … n-1
          MirroredRunner.draw(masks)    ──► draw, masks  ──►            draw
          MirroredRunner.collect(step)  ──► collect      ──►            collect
              │                                                          │
              └── CudaRunner of rank 0 ═══════ exchanges in kernels ═════┘

In each exchange the kernels of all ranks wait for each other, so all ranks put the same kernels on their streams in the
same order; this includes capturing graphs and launching kernels to compile them. All ranks have the same logits and
sample with the same random numbers, so each has every row's newest token on its own device, and a step can be launched
before rank 0 has seen the tokens of the previous one. Sampling on the host is done by rank 0 alone; the other ranks get
the token with the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from tokenmill.errors import PeerDied
from tokenmill.guided.masks import StepMasks
from tokenmill.lora.adapter import Adapter
from tokenmill.parallel.group import RankGroup
from tokenmill.runner.cuda_runner import CudaRunner
from tokenmill.runner.ranked import Followers, adapter_messages, decode_plan, encode_plan, reported, take_adapter
from tokenmill.types import RowInit, StepPlan, StepResult

LAUNCH, DRAW, COLLECT, LARGEST, IDLE = b"l", b"d", b"c", b"m", b"i"  # first byte of a message; see ADAPTER too


class SentMasks(msgspec.Struct, frozen=True, array_like=True):
    """The masks of a step's rows in a message to another rank."""

    ticket: int
    rows: list[int]
    num_words: int
    data: bytes

    @classmethod
    def of(cls, ticket: int, masks: StepMasks, rows: Sequence[int]) -> SentMasks:
        table = np.zeros((len(rows), masks.num_words), np.int32)
        masks.copy_to(table, rows)
        return cls(ticket, list(rows), masks.num_words, table.tobytes())

    def masks(self) -> StepMasks:
        table = np.zeros((1 + max(self.rows, default=0), self.num_words), np.int32)
        table[self.rows] = np.frombuffer(self.data, np.int32).reshape(-1, self.num_words)
        return StepMasks(table, None, {})


class LargestStep(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `run_largest_step` in a message to another rank."""

    token_budget: int
    step_bytes: int


class StoppableGroup(RankGroup, Protocol):
    @property
    def is_aborted(self) -> bool: ...


_encoder = msgspec.msgpack.Encoder()
_masks_decoder = msgspec.msgpack.Decoder(SentMasks)
_largest_decoder = msgspec.msgpack.Decoder(LargestStep)
_ticket_decoder = msgspec.msgpack.Decoder(int)


def encode_largest(largest: LargestStep) -> bytes:
    return _encoder.encode(largest)


def decode_largest(data: bytes) -> LargestStep:
    return _largest_decoder.decode(data)


class MirroredRunner:
    """Runs each step on all ranks; the core uses it like any other runner."""

    def __init__(self, own: CudaRunner, group: StoppableGroup, followers: Followers) -> None:
        self._own = own
        self._group = group
        self._followers = followers
        self.depth = own.depth

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._own.adapters

    @adapters.setter
    def adapters(self, by_digest: Mapping[str, Adapter]) -> None:
        self._own.adapters = by_digest

    def continues(self, new: RowInit) -> bool:
        return self._own.continues(new)

    def launch(self, plan: StepPlan) -> int:
        self._followers.raise_failure()
        with reported(self._group, self._followers):
            for message in adapter_messages(plan, self.adapters):
                self._followers.send(message)
            self._followers.send(LAUNCH + encode_plan(plan))
            return self._own.launch(plan)

    def draw(self, ticket: int, masks: StepMasks) -> None:
        with reported(self._group, self._followers):
            self._followers.send(DRAW + _encoder.encode(SentMasks.of(ticket, masks, self._own.guided_rows(ticket))))
            self._own.draw(ticket, masks)

    def collect(self, ticket: int) -> StepResult:
        with reported(self._group, self._followers):
            self._followers.send(COLLECT + _encoder.encode(ticket))
            result = self._own.collect(ticket)
            if self._group.is_aborted:  # kernels stopped waiting for the other ranks, so the result is wrong
                raise PeerDied("another rank has ended")
            return result

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Prepare all ranks. Rank 0 compiles first, so that the others find most kernels on disk."""
        self._own.compile_first(token_budget, while_compiling)
        with reported(self._group, self._followers):
            self._followers.send(LARGEST + encode_largest(LargestStep(token_budget, step_bytes)))
            self._own.hold(step_bytes)
            self._own.run_widest_step(token_budget)
            self._own.capture_largest()
        self.next_idle_task()  # load the other kernels on all ranks now: not while the first exchanges run

    def next_idle_task(self) -> bool:
        with reported(self._group, self._followers):
            self._followers.send(IDLE)
            return self._own.next_idle_task()


def mirror(runner: CudaRunner, message: bytes) -> None:
    """Repeat a call of rank 0's runner on this rank."""
    if take_adapter(runner, message):
        return
    kind, body = message[:1], message[1:]
    if kind == LAUNCH:
        runner.launch(decode_plan(body))
        runner.adapters = {}  # the plan has loaded them into their slots
    elif kind == DRAW:
        sent = _masks_decoder.decode(body)
        runner.draw(sent.ticket, sent.masks())
    elif kind == COLLECT:
        runner.collect(_ticket_decoder.decode(body))
    elif kind == LARGEST:
        largest = decode_largest(body)
        runner.run_largest_step(largest.token_budget, largest.step_bytes, lambda: None)
    else:
        assert kind == IDLE, "another message of rank 0"
        runner.next_idle_task()
