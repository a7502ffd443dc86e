"""Lark grammars rewritten for the inside of a JSON string accept the JSON of what they accepted before."""

from __future__ import annotations

import json

import llguidance
import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.guided.json_escape import json_escaped_lark

TOKENIZER = llguidance.LLTokenizer("byte")
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update
add_hunk: "*** Add File: " filename LF add_line+   // a new file
update: "*** Update File: " filename LF change+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("+" | "-" | " ") /(.*)/ LF
LF: /\n/
"""
CODEX = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""  # as it sends it with its tool apply_patch
UPDATE = '*** Begin Patch\n*** Update File: a.py\n@@ def f("x"):\n-\told \\ line\n+\tnew line\n*** End Patch'


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PATCH, '*** Begin Patch\n*** Add File: a.py\n+print("hi\\n")\n+\t# ok\n*** End Patch\n', "*** Begin Patch\n"),
        (CODEX, UPDATE, UPDATE.replace("@@ ", "@")),
        ("start: (A | B)+\n%import common (INT, WS_INLINE)\nA: INT\nB: WS_INLINE", "12 \t3", "1\n"),
        ("start: N\n%import common.SIGNED_NUMBER -> N", "-1.5e3", "1.5.2"),
        (r"start: /[^a]+/", 'x"\\\n\té', "a"),
        (r"start: /(?s:.*)x/", 'a"\nyx', "a"),
        (r"start: /.+/", 'a"\\y', "a\nb"),
        (r'start: /a\/b\\c"+/', 'a/b\\c""', "a/b\\c"),
        (r'start: "a\"b\n" /\d{2,3}/', 'a"b\n123', 'a"b\n1'),
        (r"start: /[\w.-]+@x|q\s/", "q\n", "q"),
        (r'start: (A | B)* "!"' "\n" r'A: "a".."f"' "\n" r"B: /[\"\\]/", 'ab"\\f!', "g!"),
        (r'start: "x" | /^y?(z|)$/', "yz", "yy"),
    ],
)
def test_the_same_texts_with_escapes(grammar: str, good: str, bad: str) -> None:
    inside = json_escaped_lark(grammar)
    assert accepts(grammar, good) and accepts(inside, escaped(good))
    assert not accepts(grammar, bad) and not accepts(inside, escaped(bad))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: %json {}",
        "start: X\n%import other.X",
        "start: X\n%import common.X",
        "start: /a/i",
        "%ignore /x/\nstart: /a/",
        r"start: /\bx/",
        "start: /(?=x)y/",
        "start: /[a/",
    ],
)
def test_what_has_no_form_inside_json_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="tool calls as JSON"):
        json_escaped_lark(grammar)
