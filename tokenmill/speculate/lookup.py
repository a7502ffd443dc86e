"""Guesses from what was said before: in the request's own prompt and answer, or else in recent answers.

A proposal keeps the length of the agreement behind which each of its tokens stands; the chance that a token is right
follows from it (`acceptance`). What became of the last proposal is seen when the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.acceptance import AcceptanceRates, length_class
from tokenmill.speculate.bigram_index import continuation
from tokenmill.speculate.draft_state import DraftPosition, DraftState
from tokenmill.speculate.recent_outputs import RecentOutputs

REMEMBERED_PROMPT = 4  # tokens of the prompt that are kept before an answer, so that its beginning can be found
LEAST_ANSWER = 8  # tokens; shorter answers are not kept


class Lookup:
    def __init__(self) -> None:
        self._guesses = AcceptanceRates()
        self._archive = RecentOutputs()

    def propose(self, draft_state: DraftState, tokens: list[int], most: int) -> None:
        """Up to `most` tokens that may follow become the trail's proposal."""
        num_right, num_new = draft_state.learn(tokens, self._guesses, length_class), len(tokens) - draft_state.num_seen
        draft_state.index.extend(tokens)
        if num_right == num_new and self._goes_on(draft_state, tokens, most, num_new):
            return
        place, length = self._found(draft_state, tokens)
        draft_state.propose(_read(place, tokens, most), length, len(tokens), place)

    def _goes_on(self, draft_state: DraftState, tokens: list[int], most: int, num_new: int) -> bool:
        """All came as proposed: what agreed before agrees by so much more, and no search finds a better place."""
        if draft_state.place is None:
            return False
        place = DraftPosition(draft_state.place.answers, draft_state.place.start + num_new)
        proposal = _read(place, tokens, most)
        draft_state.propose(proposal, draft_state.length + num_new, len(tokens), place)
        return bool(proposal)

    def chances(self, draft_state: DraftState, least: float) -> list[float]:
        """Of the tokens of the last proposal: that each is right and all before it are, as long as it is likely."""
        if not draft_state.proposal:
            return []
        chance, found, skill = 1.0, [], draft_state.skill
        kind, right = -1, 0.0
        for length in range(draft_state.length, draft_state.length + len(draft_state.proposal)):
            if length_class(length) != kind:  # a handful of kinds: the rest of a long proposal is of the last one
                kind = length_class(length)
                right = skill.chance(self._guesses.rate(kind))
            chance *= right
            if chance < least:
                break
            found.append(chance)
        return found

    def remember(self, draft_state: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        """The sequence is over; others may say the same."""
        if len(tokens) - prompt_len >= LEAST_ANSWER:
            self._archive.add(draft_state.salt, tokens[max(0, prompt_len - REMEMBERED_PROMPT) :])

    def _found(self, draft_state: DraftState, tokens: list[int]) -> tuple[DraftPosition | None, int]:
        """Where to read on, and how many tokens agree before it."""
        own = draft_state.index.find(tokens, tokens)
        answers = self._archive.of(draft_state.salt)
        other = answers.find(tokens) if answers is not None else None
        if other is not None and (own is None or other[1].length > own.length):
            return DraftPosition(other[0], other[1].start), other[1].length
        return (DraftPosition(None, own.start), own.length) if own is not None else (None, 0)


def _read(place: DraftPosition | None, tokens: list[int], most: int) -> list[int]:
    if place is None:
        return []
    return continuation(tokens if place.answers is None else place.answers, place.start, most)
