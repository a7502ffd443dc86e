"""Speculation with a draft model: how its guesses do, how deep it goes, and the guesses."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.acceptance import RightGuesses
from tokenmill.speculate.ask import Ask
from tokenmill.speculate.depth import DraftDepth
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.step_cost import StepCost
from tokenmill.speculate.trail import Trail

MOST_DRAFTS = 8  # each is a step of the draft model
FIRST_RATE = 0.7


class RunningAhead:
    def __init__(self, model: DraftModel, depth: int | None = None) -> None:
        """`depth`: always so many drafts, instead of as many as pay."""
        self._model = model
        self._cost = StepCost()
        self._depth = DraftDepth(self._cost, model.cost)
        self._fixed = depth
        self._guesses = RightGuesses([FIRST_RATE])

    def propose(self, asks: Sequence[Ask], num_rows: int, num_tokens: int) -> list[list[int]]:
        for ask in asks:
            ask.trail.learn(ask.tokens, self._guesses, _only_kind)
            ask.trail.propose([], 0, len(ask.tokens))
        depth = self._fixed
        if depth is None:
            chances = [self._chances(ask) for ask in asks]
            num_behind = sum(self._model.num_behind(ask) for ask in asks)
            depth = self._depth.choose(chances, num_rows, num_tokens, num_behind)
        drafts = self._model.draft(asks, [min(depth, ask.most) for ask in asks])
        for ask, found in zip(asks, drafts, strict=True):
            ask.trail.propose(found, 0, len(ask.tokens))
        return [list(found) for found in drafts]

    def _chances(self, ask: Ask) -> list[float]:
        chance = ask.trail.skill.chance(self._guesses.rate(0))
        return [chance**place for place in range(1, min(ask.most, MOST_DRAFTS) + 1)]

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._cost.note(num_tokens, seconds)

    def note_end(self, trail: Trail, tokens: Sequence[int], prompt_len: int) -> None:
        """Its row is taken over by the next sequence that gets it."""


def _only_kind(_length: int) -> int:
    return 0
