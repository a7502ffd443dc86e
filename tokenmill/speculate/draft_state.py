"""What speculation keeps of one sequence, and what a proposer is asked with.

`DraftState` lives as long as the sequence: its index of token pairs, its acceptance statistics, and the last proposal,
which is compared with the tokens that came when the next one is asked for.

How likely draft tokens are to be accepted is learned from the tokens that were really sampled. A draft token is more
likely to be right the longer the matching context before it, so `AcceptanceRates` keeps one rate per match length for
all requests together. Some requests repeat themselves more than others: `RequestAcceptance` says how one request does
against those rates. A draft token need not have been computed to be learned from: it is compared with the token that
was sampled in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenmill.params import SamplingParams
from tokenmill.speculate.bigram_index import BigramIndex

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
    """How one request's draft tokens do, compared with the rates of all requests."""

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
        """Probability that a draft token with the general acceptance rate `rate` is right in this request: the odds,
        multiplied by how much better or worse this request has done than expected."""
        wrong, expected_wrong = self._seen - self._right, self._seen - self._expected
        better = (self._right + REQUEST_PRIOR_WEIGHT) * (expected_wrong + REQUEST_PRIOR_WEIGHT)
        worse = (wrong + REQUEST_PRIOR_WEIGHT) * (self._expected + REQUEST_PRIOR_WEIGHT)
        odds = rate / (1.0 - rate) * better / worse
        return odds / (1.0 + odds)


class DraftPosition(NamedTuple):
    """Where a proposal was read from."""

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
        self.match_length = 0  # tokens before the proposal that agree with what it was read from
        self.num_seen = 0  # tokens of the sequence when the proposal was made
        self.position: DraftPosition | None = None  # where it was read

    def propose(
        self, proposal: list[int], match_length: int, num_seen: int, position: DraftPosition | None = None
    ) -> None:
        """Keep `proposal` as the last one."""
        self.proposal, self.match_length, self.num_seen, self.position = proposal, match_length, num_seen, position

    def learn(self, tokens: list[int], rates: AcceptanceRates, class_of: Callable[[int], int]) -> int:
        """Compare the last proposal with the tokens that came and return how many of it were right.

        The comparison ends at the first wrong token: nothing is known about those behind it. `class_of` maps a match
        length to its class in `rates`.
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
    """A sequence that samples in the next step, as far as a proposer must know it."""

    draft_state: DraftState
    tokens: list[int]  # prompt and output so far
    prompt_len: int
    max_drafts: int  # more could not be used
    row: int
    params: SamplingParams
    seed: int
