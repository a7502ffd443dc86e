"""Guesses from what was said before: in the request's own prompt and answer, or else in recent answers.

A proposal keeps the length of the agreement behind which each of its tokens stands; the chance that a token is right
follows from it (`acceptance`). What became of the last proposal is seen when the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.acceptance import RightGuesses, length_class
from tokenmill.speculate.lookback import continuation
from tokenmill.speculate.recent import Archive
from tokenmill.speculate.trail import Place, Trail

REMEMBERED_PROMPT = 4  # tokens of the prompt that are kept before an answer, so that its beginning can be found
LEAST_ANSWER = 8  # tokens; shorter answers are not kept


class Lookup:
    def __init__(self) -> None:
        self._guesses = RightGuesses()
        self._archive = Archive()

    def propose(self, trail: Trail, tokens: list[int], most: int) -> None:
        """Up to `most` tokens that may follow become the trail's proposal."""
        num_right, num_new = trail.learn(tokens, self._guesses, length_class), len(tokens) - trail.num_seen
        trail.index.extend(tokens)
        if num_right == num_new and self._goes_on(trail, tokens, most, num_new):
            return
        place, length = self._found(trail, tokens)
        trail.propose(_read(place, tokens, most), length, len(tokens), place)

    def _goes_on(self, trail: Trail, tokens: list[int], most: int, num_new: int) -> bool:
        """All came as proposed: what agreed before agrees by so much more, and no search finds a better place."""
        if trail.place is None:
            return False
        place = Place(trail.place.answers, trail.place.start + num_new)
        proposal = _read(place, tokens, most)
        trail.propose(proposal, trail.length + num_new, len(tokens), place)
        return bool(proposal)

    def chances(self, trail: Trail, least: float) -> list[float]:
        """Of the tokens of the last proposal: that each is right and all before it are, as long as it is likely."""
        if not trail.proposal:
            return []
        chance, found, skill = 1.0, [], trail.skill
        kind, right = -1, 0.0
        for length in range(trail.length, trail.length + len(trail.proposal)):
            if length_class(length) != kind:  # a handful of kinds: the rest of a long proposal is of the last one
                kind = length_class(length)
                right = skill.chance(self._guesses.rate(kind))
            chance *= right
            if chance < least:
                break
            found.append(chance)
        return found

    def remember(self, trail: Trail, tokens: Sequence[int], prompt_len: int) -> None:
        """The sequence is over; others may say the same."""
        if len(tokens) - prompt_len >= LEAST_ANSWER:
            self._archive.add(trail.salt, tokens[max(0, prompt_len - REMEMBERED_PROMPT) :])

    def _found(self, trail: Trail, tokens: list[int]) -> tuple[Place | None, int]:
        """Where to read on, and how many tokens agree before it."""
        own = trail.index.find(tokens, tokens)
        answers = self._archive.of(trail.salt)
        other = answers.find(tokens) if answers is not None else None
        if other is not None and (own is None or other[1].length > own.length):
            return Place(other[0], other[1].start), other[1].length
        return (Place(None, own.start), own.length) if own is not None else (None, 0)


def _read(place: Place | None, tokens: list[int], most: int) -> list[int]:
    if place is None:
        return []
    return continuation(tokens if place.answers is None else place.answers, place.start, most)
