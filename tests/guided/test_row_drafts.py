"""Masks behind drafts are those that the same tokens would leave if they were taken; trying them leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenmill.guided.compile import compile_grammar
from tokenmill.guided.masks import MaskTable
from tokenmill.guided.matcher import RowGrammar
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided
from tokenmill.text.tokenizer import EOS_ID, byte_tokenizer

CLOSED = {"additionalProperties": False}
GRAMMARS = (
    Guided("regex", r"(ab|abc|x[0-9]{2})+(end|over)"),
    Guided.choice(["one", "once", "two", "twice upon"]),
    Guided.schema({"type": "object", "properties": {"key": {"type": "boolean"}}, "required": ["key"]} | CLOSED),
)


def opened(guided: Guided, vocabulary: Vocabulary, taken: list[int]) -> RowGrammar:
    return RowGrammar(compile_grammar(guided, vocabulary).matcher.fork(), taken)


def allowed(grammar: RowGrammar) -> set[int]:
    return set(bits_of(MaskTable(1, 258).start({0: grammar}, {}).bits([0]))[0])


def bits_of(packed: np.ndarray) -> list[list[int]]:
    return [np.nonzero(np.unpackbits(line, bitorder="little"))[0].tolist() for line in packed]


def random_walk(guided: Guided, vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """A text that follows the grammar, without the end token."""
    grammar, tokens = opened(guided, vocabulary, []), []
    while EOS_ID not in tokens and len(tokens) < 40:
        tokens.append(rng.choice(sorted(allowed(grammar))))
        grammar.advance(tokens[-1])
    return [token for token in tokens if token != EOS_ID]


@pytest.mark.parametrize("guided", GRAMMARS)
@pytest.mark.parametrize("seed", range(6))
def test_masks_behind_drafts(guided: Guided, seed: int, vocabulary: Vocabulary) -> None:
    rng = random.Random(seed)
    text = random_walk(guided, vocabulary, rng)
    start = rng.randrange(len(text))
    drafts = text[start : start + 6]
    if seed % 2:
        drafts[rng.randrange(len(drafts))] = ord("?")
    right = next((place for place, token in enumerate(drafts) if token == ord("?")), len(drafts))
    row, other = (opened(guided, vocabulary, text[:start]) for _ in range(2))
    before = allowed(row)
    assert row.num_allowed(drafts) == right
    masks = MaskTable(3, 258).start({0: row, 2: other}, {0: drafts})
    for count in range(1, right + 1):
        expected = allowed(opened(guided, vocabulary, text[: start + count]))
        assert set(bits_of(masks.bits([0], [count]))[0]) == expected, count
    assert [set(line) for line in bits_of(masks.bits([0, 2], [0, 0]))] == [before, before]
    masks.wait()
    assert allowed(row) == before and row.matcher.error is None


def test_a_forced_token_is_the_only_one_allowed_behind_a_draft(vocabulary: Vocabulary) -> None:
    row = opened(Guided.choice(["abcd", "xyz"]), vocabulary, [])
    masks = MaskTable(1, 258).start({0: row}, {0: [ord("a"), ord("b")]})
    assert bits_of(masks.bits([0, 0], [1, 2])) == [[ord("b")], [ord("c")]]


def test_behind_a_draft_too_an_unwelcome_token_is_not_forced(vocabulary: Vocabulary) -> None:
    """With bytes for tokens there is no other spelling: what is left is for the sampler to refuse."""
    matcher = compile_grammar(Guided.choice(["abcd", "xyz"]), vocabulary).matcher.fork()
    places: list[tuple[int, int]] = []
    row = RowGrammar(matcher, [], lambda token, place: places.append((token, place)) or token == ord("c"))
    assert [list(choices) for choices in row.walk([ord("a"), ord("b")])] == [[ord("b")], [ord("c")]]
    assert places[-1] == (ord("c"), 2)
    row.advance(ord("a"))
    assert row.jump() == [ord("b")] and row.choices == [ord("c")]


def test_other_rows_keep_their_masks_while_the_table_grows(vocabulary: Vocabulary) -> None:
    free, forced, drafted = (
        opened(guided, vocabulary, []) for guided in (GRAMMARS[1], Guided.choice(["ab"]), GRAMMARS[1])
    )
    table = MaskTable(3, 258)
    for drafts in ([], [ord("o")], [ord("o"), ord("n"), ord("c"), ord("e")]):
        masks = table.start({0: free, 1: forced, 2: drafted}, {2: drafts} if drafts else {})
        assert bits_of(masks.bits([0, 1])) == [[ord("o"), ord("t")], [ord("a")]]


MARKED = Guided("lark", 'start: "a" <[258]> ("bc" | "bd") <[259]> "ef"\n')


def test_drafts_over_tokens_that_a_grammar_names_by_id_leave_no_trace() -> None:
    tokenizer = byte_tokenizer(added_tokens=["<call>", "</call>"])
    marked = Vocabulary(tokenizer, 260, [EOS_ID])
    text = tokenizer.encode("a<call>bc</call>ef", add_special_tokens=False)
    assert text[1] == 258 and text[4] == 259
    other = tokenizer.encode("a<call>bd</call>ef", add_special_tokens=False)
    for start in range(len(text)):
        for drafts in (text[start:], other[start:], text[start : start + 3]):
            row = opened(MARKED, marked, text[:start])
            MaskTable(1, 260).start({0: row}, {0: drafts}).bits([0])  # which waits for those behind drafts too
            assert row.matcher.advance(text[start:]) and row.matcher.is_complete, (start, drafts)
