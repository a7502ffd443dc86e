"""Draft tokens in a tool call that a grammar holds: looking ahead, however far, leaves the grammar where it was."""

from __future__ import annotations

import json
from pathlib import Path

from tokenmill.config.by_name import engine_config
from tokenmill.engine.frontend import load_frontend
from tokenmill.guided.compile import compile_grammar
from tokenmill.guided.matcher import RowGrammar
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.types import ChatRequest, Message, Tool, ToolChoice

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def test_a_grammar_is_where_it_was_after_any_drafts(tmp_path: Path) -> None:
    script = {"added_tokens": ["<tool_call>", "</tool_call>"], "answers": [{"say": CALL}]}
    (tmp_path / "script.json").write_text(json.dumps(script))
    frontend = load_frontend(engine_config(f"scripted:{tmp_path / 'script.json'}", {}))
    asked = ChatRequest(
        messages=[Message(role="user", content="What is 3 + 4?")],
        tools=[Tool(name="add", parameters=NUMBERS)],
        tool_choice=ToolChoice(mode="required"),
    )
    processor = frontend.input_processor(4096)
    guided = processor.process(asked).params.guided
    assert guided is not None
    vocabulary = Vocabulary(processor.tokenizer, frontend.spec.vocab_size, list(frontend.eos_token_ids))
    grammar = compile_grammar(guided, vocabulary).matcher
    ids = processor.tokenizer.encode(CALL, add_special_tokens=False)
    for start in range(0, len(ids), 3):
        row = RowGrammar(grammar.fork(), ids[:start])
        assert len(list(row.walk(ids[start:]))) == len(ids) - start
        for token_id in ids[start:]:
            row.advance(token_id)
        assert row.matcher.error is None and row.matcher.is_complete, start
