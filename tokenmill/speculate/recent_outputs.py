"""What was answered lately, to all requests that may know of each other: a bounded index per salt.

Requests with different salts share nothing, here as in the prefix cache: how fast an answer comes would tell what
others were answered.

    older   [ answer | answer | answer ]      found, not grown; forgotten when the younger one is full
    younger [ answer | answer | ...          ]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tokenmill.speculate.bigram_index import SEPARATOR, BigramIndex, Match

GENERATION_TOKENS = 16_384  # about 2 MB with its index
MAX_SALTS = 16


class Segment:
    def __init__(self) -> None:
        self.tokens: list[int] = [SEPARATOR]
        self._index = BigramIndex()

    def add(self, answer: Sequence[int]) -> None:
        self.tokens += answer
        self.tokens.append(SEPARATOR)
        self._index.extend(self.tokens)

    def find(self, tail: Sequence[int]) -> Match | None:
        return self._index.find(self.tokens, tail)


class RecentAnswers:
    """Of one salt."""

    def __init__(self) -> None:
        self._generations = [Segment()]

    def add(self, answer: Sequence[int]) -> None:
        self._generations[0].add(answer[-GENERATION_TOKENS:])
        if len(self._generations[0].tokens) > GENERATION_TOKENS:
            self._generations = [Segment(), self._generations[0]]

    def find(self, tail: Sequence[int]) -> tuple[Sequence[int], Match] | None:
        """The list in which the best place was found, and the place."""
        found = [(one.tokens, match) for one in self._generations if (match := one.find(tail)) is not None]
        return max(found, key=lambda pair: pair[1].length) if found else None


class RecentOutputs:
    """All salts; the one that was used least recently is forgotten first."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, RecentAnswers] = OrderedDict()

    def of(self, salt: str) -> RecentAnswers | None:
        if salt in self._salts:
            self._salts.move_to_end(salt)
        return self._salts.get(salt)

    def add(self, salt: str, answer: Sequence[int]) -> None:
        answers = self.of(salt)
        if answers is None:
            answers = self._salts[salt] = RecentAnswers()
            if len(self._salts) > MAX_SALTS:
                self._salts.popitem(last=False)
        answers.add(answer)
