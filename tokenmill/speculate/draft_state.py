"""The drafting state of one sequence, and the request that a proposer receives.

`DraftState` lives as long as the sequence: its index of token pairs, its acceptance statistics, and the last proposal,
which is compared with the sampled tokens when the next one is requested.

`BigramIndex` answers: where did the last two tokens of a sequence occur before, and what followed?

    tokens   … a b c d … a b          the last pair (a, b) occurred at ▲ before: c d … may follow again
                 ▲
    _last      (a, b) ──► its latest position
    _before    position ──► the previous position of the same pair

Among the latest few positions of a pair, the one with the longest matching context is chosen: the longer the match, the
more likely the continuation. This is the match search of LZ77 compressors. Adding a token takes well under a
microsecond and a search a few; the list is never scanned.

`RecentOutputs` applies the same index to recent outputs of other requests, in bounded memory. Requests with different
cache salts share nothing, as in the prefix cache: the speed of an answer would reveal the outputs of others.

    older segment    [ output | output | output ]      searched, no longer extended; dropped when the newer one is full
    newer segment    [ output | output | ...    ]

Acceptance rates are learned from the sampled tokens. A draft token is more likely to be right the longer the matching
context before it, so `AcceptanceRates` keeps one rate per class of match lengths over all requests. Some requests are
more repetitive than others: `RequestAcceptance` compares one request with those rates. Draft tokens that were not fed
are also compared with the token that was sampled in their place.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenmill.params import SamplingParams

MAX_POSITIONS = 8  # positions of one pair that are compared
LONGEST_MATCH = 16  # tokens; longer matches are not more reliable
SEPARATOR = -1  # between two outputs; no match reaches across it
SEGMENT_TOKENS = 16_384  # about 2 MB with its index
MAX_SALTS = 64  # every API key has its own salt


class Match(NamedTuple):
    """An earlier occurrence: where its continuation starts, and how many tokens before it match."""

    start: int
    length: int


class BigramIndex:
    """Index of token pairs over one growing list of tokens, which the caller keeps."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # pair → index of its second token
        self._before = array("i", [-1])  # one entry per token

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
        if position == len(tokens) - 1 and tokens is tail:  # the pair at the end itself
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
    """Return `count` tokens from `start`; beyond the end of the list, the tokens from `start` are repeated."""
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
    """Concatenated outputs, with separators, and their index."""

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
        """Return the tokens of the segment with the longest match, and the match."""
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


# Prior rates for matches of 2, 3, 4 to 5, 6 to 9, and 10 or more tokens.
FIRST_RATES = (0.35, 0.5, 0.65, 0.8, 0.9)
_CLASS_OF_LENGTH = (0, 0, 0, 1, 2, 2, 3, 3, 3, 3)
FIRST_RATE_WEIGHT = 8.0
MAX_OBSERVATIONS = 256.0  # per length class; beyond, the older ones are halved
MAX_REQUEST_OBSERVATIONS = 32.0
REQUEST_PRIOR_WEIGHT = 2.0


def length_class(length: int) -> int:
    return _CLASS_OF_LENGTH[length] if length < len(_CLASS_OF_LENGTH) else len(FIRST_RATES) - 1


class AcceptanceRates:
    """Acceptance rates over all requests, one per class of match length."""

    def __init__(self, first_rates: Sequence[float] = FIRST_RATES) -> None:
        self._first = first_rates
        self._right = [0.0] * len(first_rates)
        self._seen = [0.0] * len(first_rates)

    def rate(self, kind: int) -> float:
        weight = FIRST_RATE_WEIGHT
        return (self._right[kind] + weight * self._first[kind]) / (self._seen[kind] + weight)

    def learn(self, kind: int, is_right: bool) -> None:
        if self._seen[kind] >= MAX_OBSERVATIONS:
            self._right[kind] /= 2
            self._seen[kind] /= 2
        self._right[kind] += is_right
        self._seen[kind] += 1


class RequestAcceptance:
    """The acceptance rate of one request's draft tokens, relative to the rates of all requests."""

    __slots__ = ("_expected", "_right", "_seen")

    def __init__(self) -> None:
        self._right = self._seen = self._expected = 0.0

    def learn(self, expected: float, is_right: bool) -> None:
        if self._seen >= MAX_REQUEST_OBSERVATIONS:
            self._right, self._seen, self._expected = self._right / 2, self._seen / 2, self._expected / 2
        self._right += is_right
        self._expected += expected
        self._seen += 1

    def chance(self, rate: float) -> float:
        """Return the probability that a draft token with the general acceptance rate `rate` is right in this request:
        the odds, multiplied by the ratio of this request's results to the expected ones."""
        wrong, expected_wrong = self._seen - self._right, self._seen - self._expected
        better = (self._right + REQUEST_PRIOR_WEIGHT) * (expected_wrong + REQUEST_PRIOR_WEIGHT)
        worse = (wrong + REQUEST_PRIOR_WEIGHT) * (self._expected + REQUEST_PRIOR_WEIGHT)
        odds = rate / (1.0 - rate) * better / worse
        return odds / (1.0 + odds)


class DraftPosition(NamedTuple):
    """The position in the history that a proposal was read from."""

    outputs: Sequence[int] | None  # recent outputs of other requests; None: the sequence itself
    start: int


class DraftState:
    """Index, acceptance statistics and last proposal of one sequence."""

    __slots__ = ("acceptance", "index", "match_length", "num_seen", "position", "proposal", "salt")

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.index = BigramIndex()
        self.acceptance = RequestAcceptance()
        self.proposal: list[int] = []  # the last one
        self.match_length = 0  # number of matching tokens before the proposal
        self.num_seen = 0  # tokens of the sequence when the proposal was made
        self.position: DraftPosition | None = None  # where it was read

    def propose(
        self, proposal: list[int], match_length: int, num_seen: int, position: DraftPosition | None = None
    ) -> None:
        """Keep `proposal` as the last one."""
        self.proposal, self.match_length, self.num_seen, self.position = proposal, match_length, num_seen, position

    def learn(self, tokens: list[int], rates: AcceptanceRates, class_of: Callable[[int], int]) -> int:
        """Compare the last proposal with the sampled tokens and return how many of its tokens were right.

        The comparison ends at the first wrong token: nothing is known about later ones. `class_of` maps a match length
        to its class in `rates`.
        """
        num_right = 0
        for draft, token in zip(self.proposal, tokens[self.num_seen :], strict=False):
            kind, is_right = class_of(self.match_length + num_right), draft == token
            self.acceptance.learn(rates.rate(kind), is_right)
            rates.learn(kind, is_right)
            if not is_right:
                break
            num_right += 1
        return num_right


class DraftRequest(NamedTuple):
    """A sequence that samples in the next step, with what a proposer needs to know."""

    draft_state: DraftState
    tokens: list[int]  # prompt and output so far
    prompt_len: int
    max_drafts: int  # more can't be used
    row: int
    params: SamplingParams
    seed: int
