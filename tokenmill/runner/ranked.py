"""A step on several ranks: the core's own rank leads, the others follow.

    core: RankedRunner.collect(step)  ──► plan as msgpack ──►  follow(): the same plan on ranks 1 … n-1
              │                                                  │
              └── ModelRunner of rank 0 ══ collectives ══════════┘  (inside the model)

One scheduler plans for all ranks, and each has its own part of the weights and of the KV cache under the same block
ids. A follower runs each plan and discards the results: sampled tokens reach it with the next plan. So only rank 0
samples; the others only compute their part of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec
import torch

from tokenmill.errors import PeerDied
from tokenmill.guided.masks import StepMasks
from tokenmill.lora.adapter import Adapter
from tokenmill.ops.low_rank import LowRank
from tokenmill.parallel.group import RankGroup
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.samples import HeadOutput, Sample
from tokenmill.types import RowInit, RowPlan, StepPlan, StepResult


class RankFailure(msgspec.Struct, frozen=True):
    """A follower's last message: why it could not compute a step."""

    rank: int
    error: str


class SentNumbers(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a message to another rank."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SentNumbers:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def tensor(self) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)


class SentAdapter(msgspec.Struct, frozen=True):
    """An adapter that the next plan loads into a slot; each rank uses its own part of the rows."""

    digest: str
    matrices: dict[str, tuple[SentNumbers, SentNumbers, SentNumbers | None]]  # a, b, gain

    @classmethod
    def of(cls, adapter: Adapter) -> SentAdapter:
        sent = {}
        for name, part in adapter.matrices.items():
            gain = None if part.gain is None else SentNumbers.of(part.gain)
            sent[name] = SentNumbers.of(part.a), SentNumbers.of(part.b), gain
        return cls(adapter.digest, sent)

    def adapter(self) -> Adapter:
        matrices = {
            name: LowRank(a.tensor(), b.tensor(), None if gain is None else gain.tensor())
            for name, (a, b, gain) in self.matrices.items()
        }
        return Adapter(self.digest, matrices)


ADAPTER = b"a"  # first byte of a message with an adapter; no plan begins with it
_encoder = msgspec.msgpack.Encoder()
_adapter_decoder = msgspec.msgpack.Decoder(SentAdapter)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_failure_decoder = msgspec.msgpack.Decoder(RankFailure)


def encode_plan(plan: StepPlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    return _plan_decoder.decode(data)


def adapter_messages(plan: StepPlan, adapters: Mapping[str, Adapter]) -> Iterator[bytes]:
    """Yield messages with the adapters that other ranks must receive before they can run a plan."""
    for _, digest in plan.adapter_loads:
        yield ADAPTER + _encoder.encode(SentAdapter.of(adapters[digest]))


class TakesAdapters(Protocol):
    """A runner that receives adapters before the plan that loads them into slots."""

    adapters: Mapping[str, Adapter]


def take_adapter(runner: TakesAdapters, message: bytes) -> bool:
    """Store the adapter of a message for the next plan, which loads it; return False if the message has none."""
    if message[:1] != ADAPTER:
        return False
    adapter = _adapter_decoder.decode(message[1:]).adapter()
    runner.adapters = {**runner.adapters, adapter.digest: adapter}
    return True


class Followers:
    """The connections of rank 0 to ranks 1 and up, in order."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def send(self, data: bytes, first: int | None = None) -> None:
        """Send a message to all followers, or to the first `first` of them."""
        try:
            for follower in self._connections[:first]:
                follower.send_bytes(data)
        except OSError as error:
            raise PeerDied(f"a rank can't be reached: {error}") from None

    def ask(self, question: bytes) -> list[bytes]:
        """Send a question to all followers and return their answers, in order."""
        self.send(question)
        try:
            return [follower.recv_bytes() for follower in self._connections]
        except (EOFError, OSError):
            raise PeerDied("a rank has closed its connection") from None

    def raise_failure(self) -> None:
        """Raise PeerDied if a follower has reported a failure or closed its connection. Does not wait."""
        for follower in self._connections:
            try:
                if follower.poll(0):
                    failure = _failure_decoder.decode(follower.recv_bytes())
                    raise PeerDied(f"rank {failure.rank} failed: {failure.error}")
            except (EOFError, OSError):
                raise PeerDied("a rank has closed its connection") from None


@contextmanager
def reported(group: RankGroup, followers: Followers) -> Iterator[None]:
    """Run rank 0's part of a step. If it fails, the group is aborted, since other ranks may be waiting in that step."""
    try:
        yield
    except Exception as error:
        group.abort()
        followers.raise_failure()  # a follower that failed sends the reason before it aborts the group
        raise PeerDied(f"a step on several ranks failed: {error}") from error


class RankedRunner:
    """Runs each step on all ranks; the core uses it like any other runner."""

    depth = 1

    def __init__(self, own: ModelRunner, group: RankGroup, followers: Followers) -> None:
        self._own = own
        self._group = group
        self._followers = followers
        self._plans: dict[int, StepPlan] = {}

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._own.adapters

    @adapters.setter
    def adapters(self, by_digest: Mapping[str, Adapter]) -> None:
        self._own.adapters = by_digest

    def continues(self, new: RowInit) -> bool:
        return self._own.continues(new)

    def launch(self, plan: StepPlan) -> int:
        self._plans[plan.step] = plan
        return self._own.launch(plan)

    def draw(self, ticket: int, masks: StepMasks) -> None:
        self._own.draw(ticket, masks)

    def collect(self, ticket: int) -> StepResult:
        self._followers.raise_failure()
        plan = self._plans.pop(ticket)
        for message in adapter_messages(plan, self.adapters):
            self._followers.send(message)
        self._followers.send(encode_plan(plan))
        with reported(self._group, self._followers):
            return self._own.collect(ticket)

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        self._own.run_largest_step(token_budget, step_bytes, while_compiling)

    def next_idle_task(self) -> bool:
        return self._own.next_idle_task()


class FollowingSampler(Sampler):
    """Selects the parts of the model to call, as rank 0's sampler does, but samples nothing."""

    def observe(self, rows: Sequence[RowPlan]) -> None:
        """Do nothing: only sampling needs the rows' histories."""

    def sample(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[Sample]:
        return [Sample(token_id=0) for _ in rows]

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]:
        return [[] for _ in rows]


def follow(run: Callable[[bytes], bytes | None], rank: int, group: RankGroup, leader: Connection) -> None:
    """Run the messages of rank 0 until it closes the connection. A failure aborts the whole group."""
    while True:
        try:
            message = leader.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer = run(message)
            if answer is not None:
                leader.send_bytes(answer)
        except Exception as error:
            with suppress(OSError):  # rank 0 may be gone
                leader.send_bytes(_encoder.encode(RankFailure(rank, f"{type(error).__name__}: {error}")))
            group.abort()
            raise


def run_plan(runner: ModelRunner, message: bytes) -> None:
    """Run a plan of rank 0 on this rank."""
    if take_adapter(runner, message):
        return
    runner.collect(runner.launch(decode_plan(message)))
    runner.adapters = {}  # the plan has loaded them into their slots
