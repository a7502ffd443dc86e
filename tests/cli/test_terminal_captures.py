"""A conversation as a person sees it on a wide and on a narrow terminal, compared with the captures that are kept in
tests/goldens/terminal: a paste, wrapped words, an interrupted answer, a picture, markdown.

The model is scripted; engine, chat and terminal are real. TOKENMILL_TEST_RECORD=1 writes the captures anew, for people
to look at.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.cli_process import TerminalScreen, in_terminal
from tests.support.emulated_screen import EmulatedScreen

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "terminal"
PASTE = "What does this print?\n\n    for n in range(3):\n        print(n)\n"
WORDS = (
    "A terminal has as many columns as its window is wide, and a word that does not fit into the rest of a line "
    "belongs to the next one: 日本語の文章も, https://example.org/a/path, and an-unusually-long-compound-word too."
)
MARKDOWN = """## Capitals

Some **bold words**, `code`, and a sentence that goes on until the line of a narrow terminal is full.

- **Paris** is the capital of France, on the Seine, a river that flows into the Channel.
- Rome
  1. an item below an item, which is long enough to be wrapped as well on a narrow screen

> A quotation, which is wrapped too where the terminal is narrow.

```python
def capital(country: str) -> str:  # a line of code stays as it is, whatever the width of the window
    return CAPITALS[country]
```
"""
ANSWERS = [  # the last turn first: all of the conversation is in the prompt
    {"match": "story", "say": "Once upon a time there was a mill. ", "repeat": True, "token_delay_s": 0.01},
    {"match": "capitals", "say": MARKDOWN},
    {"match": "columns", "say": WORDS},
    {"match": "range", "say": "It prints 0, 1 and 2."},
]


def hold_conversation(screen: TerminalScreen) -> None:
    num_prompts = 0

    def is_asked(lines: list[str]) -> bool:
        return lines[-1:] == [">>>"] and sum(line.startswith(">>>") for line in lines) == num_prompts

    pasted = b"\x1b[200~" + PASTE.encode() + b"\x1b[201~"
    turns = [pasted, b"Tell me about columns.", b"Write about capitals.", b"Tell me a story."]
    for turn in [*turns, b"/stats", b"/image cat.png", b"/undo", b"/hlep", b"/help", b""]:
        num_prompts += 1
        screen.expect_seen(is_asked)
        if turn:
            screen.type(turn + b"\r")
        if turn == b"Tell me a story.":
            screen.expect(b"a mill")
            screen.type(b"\x03")
    screen.type(b"\x04")


def steady(text: str) -> str:
    """The capture without what differs from run to run: how long the story became, how much and how fast."""
    text = re.sub(r"(Tell me a story\.\nOnce upon a time).*?(\n\(stopped\))", r"\1 …\2", text, flags=re.DOTALL)
    stats = re.search(r"^\(prompt.*?full\)$", text, re.DOTALL | re.MULTILINE)
    assert stats is not None, text
    flat = " ".join(stats.group().split())
    assert int(re.findall(r"answer ([\d,]+) tokens", flat)[0].replace(",", "")) > 3  # what came before Ctrl-C
    return text.replace(stats.group(), re.sub(r"\d[\d.,]*( ms| s| µs)?(?!\w)", "…", flat))


@pytest.mark.parametrize("columns", [100, 44])
def test_a_conversation_looks_as_it_did(
    columns: int, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(ANSWERS))
    place = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40", "PYTHONUNBUFFERED": "1"}
    program = ("-m", "tokenmill", "chat", "scripted:model.json", "--temperature", "0")
    with in_terminal({**environment, **place}, columns=columns, program=program) as screen:
        hold_conversation(screen)
    seen = steady("\n".join(screen.emulated.lines())) + "\n"
    golden = GOLDENS / f"chat-{columns}.txt"
    if os.environ.get("TOKENMILL_TEST_RECORD"):
        golden.write_text(seen, encoding="utf-8")
    assert seen == golden.read_text(encoding="utf-8")


def test_the_emulated_screen_does_what_a_terminal_does() -> None:
    screen = EmulatedScreen(10, rows=3)
    screen.feed("0123456789ab\r\x1b[Kxy\n\rthree\x1b[2D\x1b[1P!\x1b")
    screen.feed("[6n")
    assert screen.lines() == ["0123456789", "xy", "thr!"] and screen.reply == b"\x1b[3;5R"
    screen.feed("\r\n日本語日本語")
    assert screen.lines() == ["0123456789", "xy", "thr!", "日本語日本", "語"]
    screen.feed("\r\x1b[?7l0123456789abc\x1b[?7h\x1b[2A\x1b[5G\x1b[J.")
    assert screen.lines() == ["0123456789", "xy", "thr!."]
