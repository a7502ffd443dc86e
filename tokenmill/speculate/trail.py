"""What speculation remembers of one sequence while it lives: its index, how its guesses do, and the last of them."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.speculate.acceptance import RightGuesses, Skill
from tokenmill.speculate.lookback import LookBack


class Trail:
    __slots__ = ("index", "length", "num_seen", "proposal", "salt", "skill")

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.index = LookBack()
        self.skill = Skill()
        self.proposal: list[int] = []  # the last one
        self.length = 0  # of the agreement it stands behind
        self.num_seen = 0  # tokens of the sequence when it was made

    def propose(self, proposal: list[int], length: int, num_seen: int) -> None:
        self.proposal, self.length, self.num_seen = proposal, length, num_seen

    def learn(self, tokens: list[int], guesses: RightGuesses, kind_of: Callable[[int], int]) -> None:
        """Compares the last proposal with what came, up to the first wrong guess; behind that nothing is known.

        `kind_of`: the kind of guess that stands behind so many agreeing tokens.
        """
        for place, guess in enumerate(self.proposal[: len(tokens) - self.num_seen]):
            kind = kind_of(self.length + place)
            is_right = guess == tokens[self.num_seen + place]
            self.skill.learn(guesses.rate(kind), is_right)
            guesses.learn(kind, is_right)
            if not is_right:
                break
