"""Ranks as threads that take turns: each runs until it gathers, then the next one does.

Only one thread runs at a time, so all of them may put their work on one stream of one GPU: what a rank reads was
enqueued before by the rank that computed it, and one graph can capture the step of all ranks. For testing several ranks
on one device: results are those of separate devices, speed is not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tokenmill.errors import PeerDied
from tokenmill.parallel.joined_parts import JoinedParts

WAIT_LIMIT_S = 600.0


@dataclass
class TurnState:
    """State that the ranks of a group share: whose turn it is, and each one's tensor, in two alternating buffers."""

    size: int
    turn: int = 0
    is_aborted: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    places: list[list[torch.Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [[None] * self.size, [None] * self.size]


class TurnGroup(JoinedParts):
    def __init__(self, rank: int, shared: TurnState) -> None:
        self.rank = rank
        self._round = shared
        self._parity = 0

    @classmethod
    def make(cls, size: int) -> list[TurnGroup]:
        """Make the groups of all ranks; each rank begins with `wait_turn` and ends with `pass_turn`."""
        shared = TurnState(size)
        return [cls(rank, shared) for rank in range(size)]

    @property
    def size(self) -> int:
        return self._round.size

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        places = self._round.places[self._parity]
        self._parity ^= 1
        places[self.rank] = x
        self.pass_turn()
        self.wait_turn()  # all others have handed theirs over since
        return [place for place in places if place is not None]

    def wait_turn(self) -> None:
        shared = self._round
        with shared.changed:
            is_due = shared.changed.wait_for(lambda: shared.turn == self.rank or shared.is_aborted, WAIT_LIMIT_S)
            if shared.is_aborted or not is_due:
                raise PeerDied("another rank has ended, or does not answer")

    def pass_turn(self) -> None:
        shared = self._round
        with shared.changed:
            shared.turn = (self.rank + 1) % shared.size
            shared.changed.notify_all()

    def abort(self) -> None:
        with self._round.changed:
            self._round.is_aborted = True
            self._round.changed.notify_all()

    def close(self) -> None:
        pass
