"""Speculation without a second model: n-gram lookup in the request's own text and in recent outputs.

`NgramLookup` finds likely continuations and the probability of each token: a proposal records the length of the match
before it, which determines its acceptance rate (`draft_state.py`). `NgramProposer` drafts as many of these tokens as
pay (`depth.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.depth import MAX_DRAFTS, Depth, StepCost
from tokenmill.speculate.draft_state import (
    AcceptanceRates,
    DraftPosition,
    DraftRequest,
    DraftState,
    RecentOutputs,
    continuation,
    length_class,
)

KEPT_PROMPT_TOKENS = 4  # prompt tokens kept before an output, so that its beginning can be matched
MIN_OUTPUT_TOKENS = 8  # shorter outputs are not kept


class NgramLookup:
    """Proposes continuations found in the sequence itself or in recent outputs, with their probabilities."""

    def __init__(self) -> None:
        self._rates = AcceptanceRates()
        self._recent = RecentOutputs()

    def propose(self, draft_state: DraftState, tokens: list[int], max_drafts: int) -> None:
        """Store up to `max_drafts` tokens that may follow as the proposal of `draft_state`."""
        num_right, num_new = draft_state.learn(tokens, self._rates, length_class), len(tokens) - draft_state.num_seen
        draft_state.index.extend(tokens)
        if num_right == num_new and self._extend(draft_state, tokens, max_drafts, num_new):
            return
        position, length = self._find(draft_state, tokens)
        draft_state.propose(_read(position, tokens, max_drafts), length, len(tokens), position)

    def _extend(self, draft_state: DraftState, tokens: list[int], max_drafts: int, num_new: int) -> bool:
        """Continue reading where the last proposal ended, if all of it was right: no search finds a longer match."""
        if draft_state.position is None:
            return False
        position = DraftPosition(draft_state.position.outputs, draft_state.position.start + num_new)
        proposal = _read(position, tokens, max_drafts)
        draft_state.propose(proposal, draft_state.match_length + num_new, len(tokens), position)
        return bool(proposal)

    def chances(self, draft_state: DraftState, least: float) -> list[float]:
        """Return for each token of the last proposal the probability that it and all before it are right, down to
        `least`."""
        if not draft_state.proposal:
            return []
        chance, found, acceptance = 1.0, [], draft_state.acceptance
        kind, right = -1, 0.0
        for length in range(draft_state.match_length, draft_state.match_length + len(draft_state.proposal)):
            if length_class(length) != kind:  # few classes: most of a long proposal is in the last one
                kind = length_class(length)
                right = acceptance.chance(self._rates.rate(kind))
            chance *= right
            if chance < least:
                break
            found.append(chance)
        return found

    def remember(self, draft_state: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep the output of a finished sequence: other requests may repeat it."""
        if len(tokens) - prompt_len >= MIN_OUTPUT_TOKENS:
            self._recent.add(draft_state.salt, tokens[max(0, prompt_len - KEPT_PROMPT_TOKENS) :])

    def _find(self, draft_state: DraftState, tokens: list[int]) -> tuple[DraftPosition | None, int]:
        """Return the position to read the next proposal from, and the length of the match before it."""
        own = draft_state.index.find(tokens, tokens)
        outputs = self._recent.of(draft_state.salt)
        other = outputs.find(tokens) if outputs is not None else None
        if other is not None and (own is None or other[1].length > own.length):
            return DraftPosition(other[0], other[1].start), other[1].length
        return (DraftPosition(None, own.start), own.length) if own is not None else (None, 0)


def _read(position: DraftPosition | None, tokens: list[int], max_drafts: int) -> list[int]:
    if position is None:
        return []
    return continuation(tokens if position.outputs is None else position.outputs, position.start, max_drafts)


class NgramProposer:
    """Proposes draft tokens by n-gram lookup."""

    def __init__(self, depth: Depth, cost: StepCost) -> None:
        self._lookup = NgramLookup()
        self._depth = depth
        self._cost = cost

    def propose(self, requests: Sequence[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]:
        """Draft tokens for each of `requests`, in a step that samples `num_rows` rows and feeds `num_tokens`."""
        least = self._depth.least_chance(num_rows, num_tokens)
        chances = [self._chances(request, least) for request in requests]
        if not any(chances):
            return [[] for _ in requests]
        depths = self._depth.choose(chances, num_rows, num_tokens)
        return [request.draft_state.proposal[:depth] for request, depth in zip(requests, depths, strict=True)]

    def _chances(self, request: DraftRequest, least: float) -> list[float]:
        self._lookup.propose(request.draft_state, request.tokens, min(request.max_drafts, MAX_DRAFTS))
        return self._lookup.chances(request.draft_state, least)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._cost.note(num_tokens, seconds)

    def note_end(self, draft_state: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        self._lookup.remember(draft_state, tokens, prompt_len)
