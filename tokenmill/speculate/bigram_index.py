"""Index of token pairs: where did the last two tokens of a sequence occur before, and what followed?

    tokens   … a b c d … a b          the last pair (a, b) occurred at ▲ before: c d … may follow again
                 ▲
    _last      (a, b) ──► its latest position
    _before    position ──► the previous position of the same pair

Among the latest few positions of a pair, the one with the longest matching context wins: the longer the match, the more
likely the continuation. This is the match search of LZ77 compressors. Adding a token takes well under a microsecond,
a search a few; the list is never scanned.

`RecentOutputs` applies the same index to what other requests were answered lately, in bounded memory. Requests with
different cache salts share nothing, as in the prefix cache: the speed of an answer would reveal what others received.

    older segment    [ output | output | output ]      searched, no longer extended; dropped when the newer one is full
    newer segment    [ output | output | ...    ]
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_POSITIONS = 8  # positions of one pair that are compared
LONGEST_MATCH = 16  # tokens; longer matches are not more reliable
SEPARATOR = -1  # between two outputs; no match reaches across it
SEGMENT_TOKENS = 16_384  # about 2 MB with its index
MAX_SALTS = 16


class Match(NamedTuple):
    """An earlier occurrence: where its continuation starts, and how many tokens before it match."""

    start: int
    length: int


class BigramIndex:
    """Index of token pairs over one growing list of tokens, which the caller keeps."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # pair → index of its second token
        self._before = array("i", [-1])  # one entry a token

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were added to the list since the last call."""
        last, before = self._last, self._before
        for position in range(len(before), len(tokens)):
            pair = _pair(tokens, position)
            before.append(last.get(pair, -1))
            if tokens[position] != SEPARATOR:
                last[pair] = position

    def find(self, tokens: Sequence[int], tail: Sequence[int]) -> Match | None:
        """Find the position in `tokens` (the indexed list) whose context matches the end of `tail` best."""
        if len(tail) < 2:
            return None
        position, best = self._last.get(_pair(tail, len(tail) - 1), -1), None
        if position == len(tokens) - 1 and tokens is tail:  # the end itself
            position = self._before[position]
        for _ in range(MAX_POSITIONS):
            if position < 0:
                break
            length = _match_length(tokens, position, tail)
            if best is None or length > best.length:
                best = Match(position + 1, length)
                if length == LONGEST_MATCH:
                    break
            position = self._before[position]
        return best


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """The `count` tokens from `start`; past the end of the list it repeats itself, as a repeating passage would."""
    found = list(tokens[start : start + count])
    if SEPARATOR in found:
        return found[: found.index(SEPARATOR)]
    period = len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def _pair(tokens: Sequence[int], position: int) -> int:
    return tokens[position - 1] << 32 | tokens[position]


def _match_length(tokens: Sequence[int], position: int, tail: Sequence[int]) -> int:
    length, most = 2, min(LONGEST_MATCH, position + 1, len(tail))
    end = len(tail) - 1
    while length < most and tokens[position - length] == tail[end - length]:
        length += 1
    return length


class Segment:
    """Outputs one after another, with separators, and their index."""

    def __init__(self) -> None:
        self.tokens: list[int] = [SEPARATOR]
        self._index = BigramIndex()

    def add(self, output: Sequence[int]) -> None:
        self.tokens += output
        self.tokens.append(SEPARATOR)
        self._index.extend(self.tokens)

    def find(self, tail: Sequence[int]) -> Match | None:
        return self._index.find(self.tokens, tail)


class SaltedOutputs:
    """Recent outputs of the requests with one salt, in two segments."""

    def __init__(self) -> None:
        self._segments = [Segment()]

    def add(self, output: Sequence[int]) -> None:
        self._segments[0].add(output[-SEGMENT_TOKENS:])
        if len(self._segments[0].tokens) > SEGMENT_TOKENS:
            self._segments = [Segment(), self._segments[0]]

    def find(self, tail: Sequence[int]) -> tuple[Sequence[int], Match] | None:
        """Find the segment with the longest match; returns its tokens and the match."""
        found = [(one.tokens, match) for one in self._segments if (match := one.find(tail)) is not None]
        return max(found, key=lambda pair: pair[1].length) if found else None


class RecentOutputs:
    """Recent outputs by salt; the least recently used salt is dropped first."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, SaltedOutputs] = OrderedDict()

    def of(self, salt: str) -> SaltedOutputs | None:
        if salt in self._salts:
            self._salts.move_to_end(salt)
        return self._salts.get(salt)

    def add(self, salt: str, output: Sequence[int]) -> None:
        outputs = self.of(salt)
        if outputs is None:
            outputs = self._salts[salt] = SaltedOutputs()
            if len(self._salts) > MAX_SALTS:
                self._salts.popitem(last=False)
        outputs.add(output)
