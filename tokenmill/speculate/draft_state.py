"""What speculation remembers of one sequence while it lives: its index, how its guesses do, and the last of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenmill.speculate.acceptance import AcceptanceRates, RequestAcceptance
from tokenmill.speculate.bigram_index import BigramIndex


class DraftPosition(NamedTuple):
    """Where a proposal was read."""

    answers: Sequence[int] | None  # the recent answers it stands in; None: the sequence itself
    start: int


class DraftState:
    __slots__ = ("index", "length", "num_seen", "place", "proposal", "salt", "skill")

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.index = BigramIndex()
        self.skill = RequestAcceptance()
        self.proposal: list[int] = []  # the last one
        self.length = 0  # of the agreement it stands behind
        self.num_seen = 0  # tokens of the sequence when it was made
        self.place: DraftPosition | None = None  # where it was read

    def propose(self, proposal: list[int], length: int, num_seen: int, place: DraftPosition | None = None) -> None:
        self.proposal, self.length, self.num_seen, self.place = proposal, length, num_seen, place

    def learn(self, tokens: list[int], guesses: AcceptanceRates, kind_of: Callable[[int], int]) -> int:
        """Compares the last proposal with what came, up to the first wrong guess; behind that nothing is known.

        `kind_of`: the kind of guess that stands behind so many agreeing tokens. How many were right.
        """
        num_right = 0
        for guess, token in zip(self.proposal, tokens[self.num_seen :], strict=False):
            kind, is_right = kind_of(self.length + num_right), guess == token
            self.skill.learn(guesses.rate(kind), is_right)
            guesses.learn(kind, is_right)
            if not is_right:
                break
            num_right += 1
        return num_right
