"""Where has this been said before? An index of token pairs, grown by a token at a time, never read through again.

    tokens   … a b c d … a b          the last pair (a, b) stood at ▲ before: c d … may follow again
                 ▲
    last     (a, b) ──► its latest place          before[place] ──► the place before that of the same pair

Of the latest few places of a pair the one is taken before which most tokens agree: the longer the agreement, the surer
the continuation. This is how LZ77 compressors look for matches, and costs as little: a few microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MAX_POSITIONS = 8  # of one pair that are compared
LONGEST_MATCH = 16  # tokens; longer agreement says nothing more
SEPARATOR = -1  # stands between texts; no match reaches across it


class Match(NamedTuple):
    start: int  # of what followed
    length: int  # how many tokens agree before it


class BigramIndex:
    """An index over one growing list of tokens, which its owner keeps."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # pair → index of its second token
        self._before = array("i", [-1])  # one entry a token

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what has been added to the list since the last call."""
        last, before = self._last, self._before
        for place in range(len(before), len(tokens)):
            pair = _pair(tokens, place)
            before.append(last.get(pair, -1))
            if tokens[place] != SEPARATOR:
                last[pair] = place

    def find(self, tokens: Sequence[int], tail: Sequence[int]) -> Match | None:
        """The best earlier place in `tokens` (the indexed list) that agrees with the end of `tail`."""
        if len(tail) < 2:
            return None
        place, best = self._last.get(_pair(tail, len(tail) - 1), -1), None
        if place == len(tokens) - 1 and tokens is tail:  # the end itself
            place = self._before[place]
        for _ in range(MAX_POSITIONS):
            if place < 0:
                break
            length = _agreement(tokens, place, tail)
            if best is None or length > best.length:
                best = Match(place + 1, length)
                if length == LONGEST_MATCH:
                    break
            place = self._before[place]
        return best


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """What followed; where that reaches the end of the list it goes on with itself, as a repeated passage would."""
    found = list(tokens[start : start + count])
    if SEPARATOR in found:
        return found[: found.index(SEPARATOR)]
    period = len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def _pair(tokens: Sequence[int], place: int) -> int:
    return tokens[place - 1] << 32 | tokens[place]


def _agreement(tokens: Sequence[int], place: int, tail: Sequence[int]) -> int:
    length, most = 2, min(LONGEST_MATCH, place + 1, len(tail))
    end = len(tail) - 1
    while length < most and tokens[place - length] == tail[end - length]:
        length += 1
    return length
