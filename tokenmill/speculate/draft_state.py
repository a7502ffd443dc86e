"""What speculation keeps of one sequence, and what a proposer is asked with.

`DraftState` lives as long as the sequence: its index of token pairs, its acceptance statistics, and the last proposal,
which is compared with the tokens that came when the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenmill.params import SamplingParams
from tokenmill.speculate.acceptance import AcceptanceRates, RequestAcceptance
from tokenmill.speculate.bigram_index import BigramIndex


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
