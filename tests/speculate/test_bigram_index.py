"""Places where the same was said before, against a search that reads everything again."""

from __future__ import annotations

import random

import pytest

from tokenmill.speculate import draft_state
from tokenmill.speculate.draft_state import (
    LONGEST_MATCH,
    MAX_POSITIONS,
    SEPARATOR,
    BigramIndex,
    Match,
    RecentOutputs,
    SaltedOutputs,
    continuation,
)


def searched(tokens: list[int], tail: list[int], *, is_own: bool) -> Match | None:
    """The latest places of the last pair, read from the end; the longest agreement wins, the latest of equals."""
    ends = [p for p in range(len(tokens) - 1 - is_own, 0, -1) if tokens[p - 1 : p + 1] == tail[-2:]][:MAX_POSITIONS]
    best = None
    for end in ends:
        length = 0
        while length < min(LONGEST_MATCH, end + 1, len(tail)) and tokens[end - length] == tail[-1 - length]:
            length += 1
        if best is None or length > best.length:
            best = Match(end + 1, length)
    return best


@pytest.mark.parametrize("vocab", [2, 3, 8, 40])
def test_an_index_grown_by_pieces_finds_what_a_search_finds(vocab: int) -> None:
    rng = random.Random(vocab)
    tokens: list[int] = []
    index = BigramIndex()
    for _ in range(150):
        tokens += [rng.randrange(vocab) for _ in range(rng.choice([1, 1, 1, 5]))]
        index.extend(tokens)
        if len(tokens) > 1:
            assert index.find(tokens, tokens) == searched(tokens, tokens, is_own=True)
            tail = [rng.randrange(vocab) for _ in range(6)]
            assert index.find(tokens, tail) == searched(tokens, tail, is_own=False)


def test_a_continuation_that_reaches_the_end_goes_on_with_itself() -> None:
    assert continuation([1, 2, 3, 4, 5], 2, 2) == [3, 4]
    assert continuation([9, 1, 2, 3, 1, 2, 3], 4, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert continuation([7, 7, 7], 2, 4) == [7, 7, 7, 7]
    assert continuation([1, 2, SEPARATOR, 4], 0, 4) == [1, 2]


def test_too_little_to_look_for() -> None:
    index = BigramIndex()
    index.extend([5])
    assert index.find([5], [5]) is None


def test_recent_answers_are_found_but_not_across_their_borders() -> None:
    answers = SaltedOutputs()
    answers.add([1, 2, 3, 4])
    answers.add([5, 6, 7, 8])
    found = answers.find([0, 2, 3])
    assert found is not None and continuation(found[0], found[1].start, 5) == [4]
    assert answers.find([4, 5]) is None


def test_salts_do_not_know_of_each_other() -> None:
    archive = RecentOutputs()
    archive.add("a", [1, 2, 3])
    assert archive.of("b") is None
    archive.add("b", [4, 5, 6])
    found = archive.of("b")
    assert found is not None and found.find([1, 2]) is None and found.find([4, 5]) is not None


def test_memory_is_bounded() -> None:
    rng = random.Random(0)
    answers = SaltedOutputs()
    for _ in range(60):
        answers.add([rng.randrange(1000) for _ in range(1000)])
        assert sum(len(one.tokens) for one in answers._segments) <= 2 * (draft_state.SEGMENT_TOKENS + 1002)
    answers.add([1] * 10 * draft_state.SEGMENT_TOKENS)
    assert sum(len(one.tokens) for one in answers._segments) <= 4 * draft_state.SEGMENT_TOKENS
    archive = RecentOutputs()
    for number in range(5 * draft_state.MAX_SALTS):
        archive.add(str(number), [1, 2, 3])
        archive.add("kept", [1, 2, 3])
    assert len(archive._salts) == draft_state.MAX_SALTS and archive.of("kept") is not None
