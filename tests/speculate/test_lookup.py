"""Guesses while they come true, and what follows when they no longer do."""

from __future__ import annotations

import pytest

from tokenmill.speculate.draft_state import LONGEST_MATCH, BigramIndex, DraftState
from tokenmill.speculate.ngram_proposer import NgramLookup

PASSAGE = [11, 12, 13, 14, 15, 16, 17, 18, 19]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every search of an index."""
    found: list[int] = []
    find = BigramIndex.find

    def counted(self: BigramIndex, tokens: list[int], tail: list[int]) -> object:
        found.append(len(tail))
        return find(self, tokens, tail)

    monkeypatch.setattr(BigramIndex, "find", counted)
    return found


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_guesses_that_come_true_go_on_without_a_search(is_own: bool, step: int, searches: list[int]) -> None:
    lookup, trail = NgramLookup(), DraftState("salt")
    if is_own:
        tokens = [*PASSAGE, 1, *PASSAGE[:2]]
    else:
        lookup.remember(DraftState("salt"), [*PASSAGE, 1, 2, 3], 0)
        tokens = [5, *PASSAGE[:2]]
    following = [*PASSAGE[2:], 1]
    lookup.propose(trail, tokens, 4)
    assert trail.proposal == following[:4] and trail.match_length == 2
    num_searches = len(searches)
    for said in range(step, 6, step):
        tokens += following[said - step : said]
        lookup.propose(trail, tokens, 2)
        assert trail.proposal == following[said : said + 2]
        assert trail.match_length == 2 + said <= LONGEST_MATCH
    assert len(searches) == num_searches
    tokens += [7, 12]  # another turn: what stands behind is looked for anew, and nothing does
    lookup.propose(trail, tokens, 4)
    assert len(searches) > num_searches and trail.proposal == []


def test_the_end_of_an_answer_ends_its_guesses() -> None:
    lookup, trail, tokens = NgramLookup(), DraftState(), [5, 11, 12]
    lookup.remember(DraftState(), PASSAGE, 0)
    lookup.propose(trail, tokens, 7)
    assert trail.proposal == PASSAGE[2:]
    tokens += PASSAGE[2:]
    lookup.propose(trail, tokens, 7)
    assert trail.proposal == [] and lookup.chances(trail, 0.0) == []
