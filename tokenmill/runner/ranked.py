"""A step on several ranks: the core's own rank leads, the others follow.

    core: RankedRunner.collect(step)  ──► plan as msgpack ──►  follow(): the same plan on ranks 1 … n-1
              │                                                  │
              └── ModelRunner of rank 0 ══ collectives ══════════┘  (inside the model)

One scheduler plans for all ranks, and each has its own part of the weights and of the KV cache under the same block
ids. A follower computes what a plan asks for and keeps nothing of what comes out: tokens reach it with the next plan.
So only rank 0 samples; the others compute their part of the logits and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import msgspec

from tokenmill.errors import PeerDied
from tokenmill.guided.masks import StepMasks
from tokenmill.lora.adapter import Adapter
from tokenmill.parallel.group import RankGroup
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.samples import HeadOutput, Sample
from tokenmill.types import RowInit, RowPlan, StepPlan, StepResult


class StepAck(msgspec.Struct, frozen=True):
    """A follower's answer: it has computed a step, or why it could not."""

    rank: int
    step: int
    seconds: float
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_ack_decoder = msgspec.msgpack.Decoder(StepAck)


class RankedRunner:
    """Runs each step on all ranks; to its core it is a runner like any other."""

    depth = 1

    def __init__(self, own: ModelRunner, group: RankGroup, followers: Sequence[Connection]) -> None:
        """`followers`: the connections to ranks 1 and up, in order."""
        self._own = own
        self._group = group
        self._followers = followers
        self._plans: dict[int, StepPlan] = {}
        self.adapters: Mapping[str, Adapter] = {}  # none can be loaded
        self.step_seconds = [0.0] * group.size  # of the last step that each rank has answered for

    def continues(self, new: RowInit) -> bool:
        return self._own.continues(new)

    def launch(self, plan: StepPlan) -> int:
        self._plans[plan.step] = plan
        return self._own.launch(plan)

    def draw(self, ticket: int, masks: StepMasks) -> None:
        self._own.draw(ticket, masks)

    def collect(self, ticket: int) -> StepResult:
        self._read_acks()
        self._send(_encoder.encode(self._plans.pop(ticket)))
        try:
            result = self._own.collect(ticket)
        except (PeerDied, RuntimeError) as error:  # native kernels know no errors of ours
            if not self._group.is_aborted and not isinstance(error, PeerDied):
                raise
            self._read_acks()  # a follower that failed says why before it ends the group's waits
            raise PeerDied(str(error)) from None
        self.step_seconds[0] = result.step_s
        return result

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        self._own.run_largest_step(token_budget, step_bytes, while_compiling)

    def next_idle_task(self) -> bool:
        return self._own.next_idle_task()

    def _send(self, data: bytes) -> None:
        try:
            for follower in self._followers:
                follower.send_bytes(data)
        except OSError as error:
            raise PeerDied(f"a rank can't be reached: {error}") from None

    def _read_acks(self) -> None:
        """Take what followers have said so far, without waiting."""
        for follower in self._followers:
            try:
                while follower.poll(0):
                    ack = _ack_decoder.decode(follower.recv_bytes())
                    if ack.error is not None:
                        raise PeerDied(f"rank {ack.rank} failed: {ack.error}")
                    self.step_seconds[ack.rank] = ack.seconds
            except (EOFError, OSError):
                raise PeerDied("a rank has closed its connection") from None


class FollowingSampler(Sampler):
    """Answers what decides which part of a model is called, as rank 0's sampler does, and samples nothing."""

    def observe(self, rows: Sequence[RowPlan]) -> None:
        """Histories matter to those who sample only."""

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]:
        return [[] for _ in rows]


def follow(runner: ModelRunner, group: RankGroup, leader: Connection) -> None:
    """Run the plans of rank 0 until it closes the connection. A plan that fails ends the whole group's waits."""
    while True:
        try:
            plan = _plan_decoder.decode(leader.recv_bytes())
        except (EOFError, OSError):
            return
        began_s = time.perf_counter()
        try:
            runner.collect(runner.launch(plan))
        except Exception as error:
            _answer(leader, StepAck(group.rank, plan.step, 0.0, f"{type(error).__name__}: {error}"))
            group.abort()
            raise
        _answer(leader, StepAck(group.rank, plan.step, time.perf_counter() - began_s))


def _answer(leader: Connection, ack: StepAck) -> None:
    try:
        leader.send_bytes(_encoder.encode(ack))
    except OSError:
        return  # rank 0 is gone: the next read says so
