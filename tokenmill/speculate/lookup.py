"""Guesses from what was said before: in the request's own prompt and answer, or else in recent answers.

A proposal keeps the length of the agreement behind which each of its tokens stands; the chance that a token is right
follows from it (`acceptance`). What became of the last proposal is seen when the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.speculate.acceptance import RightGuesses, length_class
from tokenmill.speculate.lookback import continuation
from tokenmill.speculate.recent import Archive
from tokenmill.speculate.trail import Trail

REMEMBERED_PROMPT = 4  # tokens of the prompt that are kept before an answer, so that its beginning can be found
LEAST_ANSWER = 8  # tokens; shorter answers are not kept


class Lookup:
    def __init__(self) -> None:
        self._guesses = RightGuesses()
        self._archive = Archive()

    def propose(self, trail: Trail, tokens: list[int], most: int) -> None:
        """Up to `most` tokens that may follow become the trail's proposal."""
        trail.learn(tokens, self._guesses, length_class)
        trail.index.extend(tokens)
        trail.propose(*self._found(trail, tokens, most), len(tokens))

    def chances(self, trail: Trail, least: float) -> list[float]:
        """Of the tokens of the last proposal: that each is right and all before it are, as long as it is likely."""
        chance, found = 1.0, []
        for place in range(len(trail.proposal)):
            chance *= trail.skill.chance(self._guesses.rate(length_class(trail.length + place)))
            if chance < least:
                break
            found.append(chance)
        return found

    def remember(self, trail: Trail, tokens: Sequence[int], prompt_len: int) -> None:
        """The sequence is over; others may say the same."""
        if len(tokens) - prompt_len >= LEAST_ANSWER:
            self._archive.add(trail.salt, tokens[max(0, prompt_len - REMEMBERED_PROMPT) :])

    def _found(self, trail: Trail, tokens: list[int], most: int) -> tuple[list[int], int]:
        own = trail.index.find(tokens, tokens)
        answers = self._archive.of(trail.salt)
        other = answers.find(tokens) if answers is not None else None
        if other is not None and (own is None or other[1].length > own.length):
            return continuation(other[0], other[1].start, most), other[1].length
        if own is None:
            return [], 0
        return continuation(tokens, own.start, most), own.length
