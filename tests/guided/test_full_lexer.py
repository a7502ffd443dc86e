"""A lexer that many answers have filled: the next ones get another, and only an answer that is too much alone fails."""

from __future__ import annotations

import llguidance
import numpy as np
import pytest
from numpy.typing import NDArray

from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.guided import compile as compiling
from tokenmill.guided.compile import Compiled, Compiler, compile_grammar
from tokenmill.guided.masks import fill_draft_masks
from tokenmill.guided.matcher import RowGrammar
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided

STRINGS = Guided.schema({"type": "array", "items": {"type": "string", "maxLength": 2000}})


@pytest.fixture
def compiled(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    limits = llguidance.LLParserLimits(max_lexer_states=3000, verbose_errors=False)
    monkeypatch.setattr(compiling, "LIMITS", limits)
    return compile_grammar(STRINGS, vocabulary)


def opened(compiled: Compiled) -> RowGrammar:
    return RowGrammar(compiled.matcher.fork(), [], source=compiled)


def speak(grammar: RowGrammar, text: bytes) -> RowGrammar:
    for byte in text:
        grammar.advance(byte)
        grammar.recover()
    return grammar


def fill_up(compiled: Compiled) -> None:
    """Let one answer fill the shared lexer, as many requests do together."""
    matcher, mask = compiled.matcher.fork(), np.zeros(9, np.int32)
    matcher.advance(b'["')
    while matcher.error is None:
        matcher.advance(b"a")
        matcher.fill(mask)
    assert matcher.has_exceeded_limit


def allows(mask: NDArray[np.int32], char: str) -> bool:
    return bool(mask.view(np.uint8)[ord(char) // 8] >> ord(char) % 8 & 1)


def test_a_full_lexer_is_replaced_for_all_who_come_later(compiled: Compiled) -> None:
    running = speak(opened(compiled), b'["abc')
    fill_up(compiled)
    assert speak(running, b'de"]').failure is None and running.matcher.is_complete
    later = speak(opened(compiled), b'["xyz"]')
    assert later.failure is None and later.matcher.is_complete
    assert later.matcher.lexer is running.matcher.lexer, "one new lexer serves all"


def test_an_answer_that_fills_a_lexer_alone_is_the_clients_error(compiled: Compiled) -> None:
    mask, grammar = np.zeros(9, np.int32), speak(opened(compiled), b'["')
    for _ in range(2000):
        speak(grammar, b"a")
        if grammar.failure is None:
            grammar.matcher.fill(mask)
    assert isinstance(grammar.failure, InvalidRequest) and "too complex" in grammar.failure.message
    assert speak(opened(compiled), b'["abc"]').failure is None, "others go on"


def test_masks_of_drafts_survive_a_full_lexer(compiled: Compiled) -> None:
    grammar, masks = speak(opened(compiled), b'["'), np.zeros((3, 9), np.int32)
    fill_up(compiled)
    fill_draft_masks(grammar, list(b'ab"'), masks)
    assert grammar.failure is None
    assert [allows(mask, "c") for mask in masks] == [True, True, False]
    assert [allows(mask, "]") for mask in masks] == [True, True, True]


def test_a_grammar_that_is_slow_to_compile_is_made_anew_by_a_worker(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_RECOMPILE_S", 0.0)
    running = speak(opened(compiled), b'["abc')
    fill_up(compiled)
    assert isinstance(speak(running, b'de"]').failure, Overloaded)
    compiler = Compiler(lambda: None)  # type: ignore[arg-type,return-value]
    compiler._keep(STRINGS, compiled)
    assert compiler.known(STRINGS) is compiled and compiler.usable(STRINGS) is None


def test_a_schema_answers_however_many_have_used_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=1500, verbose_errors=False)
    monkeypatch.setattr(compiling, "LIMITS", limits)
    fields = {f"p{i}": {"type": "string", "maxLength": 40 + i} for i in range(6)}
    schema = Guided.schema({"type": "object", "properties": fields, "required": list(fields)})
    for seed in range(3):
        params = SamplingParams(guided=schema, max_tokens=200, seed=seed, temperature=1.5)
        answer = llm.generate(["Once"], params, progress=False)[0].outputs[0]
        assert answer.finish_reason in ("stop", "length"), f"request {seed}: {answer}"
