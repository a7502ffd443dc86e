"""Speculation without a second model: look up what may follow, feed as much of it as pays."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.depth import MAX_DRAFTS, Depth
from tokenmill.speculate.draft_request import DraftRequest
from tokenmill.speculate.draft_state import DraftState
from tokenmill.speculate.lookup import Lookup
from tokenmill.speculate.step_cost import StepCost


class NgramProposer:
    def __init__(self, depth: Depth, cost: StepCost) -> None:
        self._lookup = Lookup()
        self._depth = depth
        self._cost = cost

    def propose(self, requests: Sequence[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]:
        """Drafts for each of `asks`, in a step that draws for `num_rows` and feeds `num_tokens` besides them."""
        least = self._depth.least_chance(num_rows, num_tokens)
        chances = [self._chances(request, least) for request in requests]
        if not any(chances):
            return [[] for _ in requests]
        depths = self._depth.choose(chances, num_rows, num_tokens)
        return [request.draft_state.proposal[:depth] for request, depth in zip(requests, depths, strict=True)]

    def _chances(self, request: DraftRequest, least: float) -> list[float]:
        self._lookup.propose(request.draft_state, request.tokens, min(request.most, MAX_DRAFTS))
        return self._lookup.chances(request.draft_state, least)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._cost.note(num_tokens, seconds)

    def note_end(self, draft_state: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        self._lookup.remember(draft_state, tokens, prompt_len)
