"""Ranks as threads of one process, which read each other's tensors: for tests, and where native kernels are missing.

`ThreadGroup`: all threads run at the same time and wait for each other at a barrier.

`TurnGroup`: one thread runs at a time, until it gathers; then the next one runs. So all ranks may enqueue work on one
stream of one GPU: what a rank reads was enqueued before, by the rank that computed it, and one graph can capture the
step of all ranks. This tests several ranks on one device: the results are those of separate devices, the speed is not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tokenmill.errors import PeerDied
from tokenmill.parallel.group import BaseGroup

WAIT_TIMEOUT_S = 600.0


@dataclass
class SharedTensors:
    """State that the ranks of a group share: a barrier, and one tensor per rank."""

    size: int
    barrier: threading.Barrier = field(init=False)
    tensors: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.tensors = [None] * self.size


class ThreadGroup(BaseGroup):
    def __init__(self, rank: int, shared: SharedTensors) -> None:
        self.rank = rank
        self._shared = shared

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        """Make the groups of all ranks."""
        shared = SharedTensors(size)
        return [cls(rank, shared) for rank in range(size)]

    @property
    def size(self) -> int:
        return self._shared.size

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        shared = self._shared
        shared.tensors[self.rank] = x
        self._wait()
        found = [tensor.clone() for tensor in shared.tensors if tensor is not None]
        self._wait()  # before all ranks have read, no rank may write again
        return found

    @property
    def is_aborted(self) -> bool:
        return self._shared.barrier.broken

    def abort(self) -> None:
        self._shared.barrier.abort()

    def close(self) -> None:
        pass

    def _wait(self) -> None:
        try:
            self._shared.barrier.wait(WAIT_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise PeerDied("another rank has ended, or does not answer") from None


# ── one at a time ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class TurnState:
    """State that the ranks of a group share: whose turn it is, and one tensor per rank, in two alternating buffers."""

    size: int
    turn: int = 0
    is_aborted: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    tensors: list[list[torch.Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [[None] * self.size, [None] * self.size]


class TurnGroup(BaseGroup):
    def __init__(self, rank: int, shared: TurnState) -> None:
        self.rank = rank
        self._shared = shared
        self._parity = 0

    @classmethod
    def make(cls, size: int) -> list[TurnGroup]:
        """Make the groups of all ranks; each rank begins with `wait_turn` and ends with `pass_turn`."""
        shared = TurnState(size)
        return [cls(rank, shared) for rank in range(size)]

    @property
    def size(self) -> int:
        return self._shared.size

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        tensors = self._shared.tensors[self._parity]
        self._parity ^= 1
        tensors[self.rank] = x
        self.pass_turn()
        self.wait_turn()  # by then all others have stored their tensors
        return [tensor for tensor in tensors if tensor is not None]

    def wait_turn(self) -> None:
        shared = self._shared
        with shared.changed:
            is_own_turn = shared.changed.wait_for(lambda: shared.turn == self.rank or shared.is_aborted, WAIT_TIMEOUT_S)
            if shared.is_aborted or not is_own_turn:
                raise PeerDied("another rank has ended, or does not answer")

    def pass_turn(self) -> None:
        shared = self._shared
        with shared.changed:
            shared.turn = (self.rank + 1) % shared.size
            shared.changed.notify_all()

    def abort(self) -> None:
        with self._shared.changed:
            self._shared.is_aborted = True
            self._shared.changed.notify_all()

    def close(self) -> None:
        pass
