"""Speculation with a draft model: how its guesses do, how deep it goes, and the guesses."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.acceptance import AcceptanceRates
from tokenmill.speculate.depth import DraftDepth
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.draft_request import DraftRequest
from tokenmill.speculate.draft_state import DraftState
from tokenmill.speculate.step_cost import StepCost

MAX_DRAFTS = 8  # each is a step of the draft model
FIRST_RATE = 0.7


class DraftModelProposer:
    def __init__(self, model: DraftModel, depth: int | None = None) -> None:
        """`depth`: always so many drafts, instead of as many as pay."""
        self._model = model
        self._cost = StepCost()
        self._depth = DraftDepth(self._cost, model.cost)
        self._fixed = depth
        self._guesses = AcceptanceRates([FIRST_RATE])

    def propose(self, requests: Sequence[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]:
        for request in requests:
            request.draft_state.learn(request.tokens, self._guesses, _only_kind)
            request.draft_state.propose([], 0, len(request.tokens))
        depth = self._fixed
        if depth is None:
            chances = [self._chances(request) for request in requests]
            num_behind = sum(self._model.num_behind(request) for request in requests)
            depth = self._depth.choose(chances, num_rows, num_tokens, num_behind)
        drafts = self._model.draft(requests, [min(depth, request.most) for request in requests])
        for request, found in zip(requests, drafts, strict=True):
            request.draft_state.propose(found, 0, len(request.tokens))
        return [list(found) for found in drafts]

    def _chances(self, request: DraftRequest) -> list[float]:
        chance = request.draft_state.skill.chance(self._guesses.rate(0))
        return [chance**place for place in range(1, min(request.most, MAX_DRAFTS) + 1)]

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._cost.note(num_tokens, seconds)

    def note_end(self, draft_state: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        """Its row is taken over by the next sequence that gets it."""


def _only_kind(_length: int) -> int:
    return 0
