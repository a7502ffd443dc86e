"""Ranks as threads of one process: a barrier, and reads of each other's tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tokenmill.errors import PeerDied
from tokenmill.parallel.joined_parts import JoinedParts

WAIT_LIMIT_S = 600.0


@dataclass
class SharedTensors:
    """State that the ranks of a group share: a barrier, and each one's tensor."""

    size: int
    barrier: threading.Barrier = field(init=False)
    places: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.places = [None] * self.size


class ThreadGroup(JoinedParts):
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
        shared.places[self.rank] = x
        self._wait()
        found = [place.clone() for place in shared.places if place is not None]
        self._wait()  # the next write must wait until all have read
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
            self._shared.barrier.wait(WAIT_LIMIT_S)
        except threading.BrokenBarrierError:
            raise PeerDied("another rank has ended, or does not answer") from None
