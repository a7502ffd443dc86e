"""Speculation without a second model: look up what may follow, feed as much of it as pays."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.ask import Ask
from tokenmill.speculate.depth import MOST_DRAFTS, Depth
from tokenmill.speculate.lookup import Lookup
from tokenmill.speculate.step_cost import StepCost
from tokenmill.speculate.trail import Trail


class Guessing:
    def __init__(self, depth: Depth, cost: StepCost) -> None:
        self._lookup = Lookup()
        self._depth = depth
        self._cost = cost

    def propose(self, asks: Sequence[Ask], num_rows: int, num_tokens: int) -> list[list[int]]:
        """Drafts for each of `asks`, in a step that draws for `num_rows` and feeds `num_tokens` besides them."""
        least = self._depth.least_chance(num_rows, num_tokens)
        chances = [self._chances(ask, least) for ask in asks]
        if not any(chances):
            return [[] for _ in asks]
        depths = self._depth.choose(chances, num_rows, num_tokens)
        return [ask.trail.proposal[:depth] for ask, depth in zip(asks, depths, strict=True)]

    def _chances(self, ask: Ask, least: float) -> list[float]:
        self._lookup.propose(ask.trail, ask.tokens, min(ask.most, MOST_DRAFTS))
        return self._lookup.chances(ask.trail, least)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._cost.note(num_tokens, seconds)

    def note_end(self, trail: Trail, tokens: Sequence[int], prompt_len: int) -> None:
        self._lookup.remember(trail, tokens, prompt_len)
