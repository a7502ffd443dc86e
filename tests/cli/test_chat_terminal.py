"""`tokenmill chat` at a terminal: typing, pasting, and answers as they are shown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from tests.support.cli_process import in_terminal, scripted
from tokenmill.cli.answer_screen import AnswerScreen, say, width_of

PASTE = b"\x1b[200~first line\nsecond line\n\nlast line\x1b[201~"


def test_a_pasted_text_is_one_turn_and_the_history_is_the_owners(environment: dict[str, str]) -> None:
    with in_terminal({**environment, "TERM": "xterm"}, "chat") as screen:
        screen.expect(b">>> ")
        screen.type(PASTE)
        screen.expect(b"last line")
        screen.type(b"\r")
        screen.expect(b"first line\\nsecond line\\n\\nlast line")  # in what the model was sent, as JSON
        screen.expect(b">>> ")
        screen.type(b"one\x1b\rtwo\r")  # Alt-Enter
        screen.expect(b"one\\ntwo")
        screen.expect(b">>> ")
        screen.type(b"/exit\r")
        screen.expect(b"model closed")
    history = Path(environment["TOKENMILL_HOME"]) / "chat_history.txt"
    assert "second line" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_run_without_a_prompt_on_a_terminal_is_a_chat(environment: dict[str, str]) -> None:
    with in_terminal({**environment, "TERM": "dumb"}, "run", "--no-context-shift") as screen:
        screen.expect(b"/help for help")
        screen.type(b"hi\n")
        screen.expect(b'"context_shift": false')
        screen.type(b"/exit\n")
        screen.expect(b"model closed")


def test_commands_of_a_conversation(environment: dict[str, str], tmp_path: Path) -> None:
    notes, saved = tmp_path / "notes.txt", tmp_path / "saved.json"
    notes.write_text("the text of a file")
    said = (
        f"one\n/retry\n/undo\n/read {notes}\ntwo\n/save {saved}\n/clear\n/load {saved}\n/stats\n/model other\nthree\n"
    )
    done = scripted(environment, "chat", stdin=said + "/undo\n/undo\n/undo\n/load nowhere\n/image x\n")
    sent = [json.loads(line)["messages"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert [len(messages) for messages in sent] == [1, 1, 1, 3] and sent[0] == sent[1]
    assert sent[2][0]["content"] == "notes.txt:\n\nthe text of a file\n\ntwo"
    assert (
        "prompt 3 tokens (" in done.stdout
        and "context 8 of 100 tokens, 8 % full" in done.stdout
        and "(other)" in done.stdout
    )
    assert json.loads(saved.read_text())["messages"][0] == sent[2][0]
    complaints = [line for line in done.stderr.splitlines() if line.startswith("!")]
    assert "no turn yet" in complaints[0] and "nowhere" in complaints[1] and "images are not supported" in complaints[2]


@pytest.mark.parametrize(
    ("flags", "shifts"), [((), True), (("--threads", "2"), True), (("--no-context-shift",), False)]
)
def test_conversations_go_on_past_the_context(
    environment: dict[str, str], flags: tuple[str, ...], shifts: bool
) -> None:
    done = scripted(environment, "chat", *flags, stdin="hi\n")
    assert json.loads(done.stdout.splitlines()[0])["context_shift"] is shifts


@pytest.mark.parametrize(("flags", "shifts"), [((), None), (("--context-shift",), True)])
def test_one_answer_ends_at_the_context_unless_told(
    environment: dict[str, str], flags: tuple[str, ...], shifts: bool | None
) -> None:
    done = scripted(environment, "run", "a-model", "hi", *flags)
    assert json.loads(done.stdout.splitlines()[0])["context_shift"] is shifts


# ── answers on the screen ──────────────────────────────────────────────────────────────────────────────


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(text: str, monkeypatch: pytest.MonkeyPatch, columns: int, **environment: str) -> str:
    for name, value in {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm", "NO_COLOR": "", **environment}.items():
        monkeypatch.setenv(name, value)
    out = FakeTerminal()
    screen = AnswerScreen(out)
    for character in text:  # as it streams
        screen.write(character)
    screen.close()
    return out.getvalue()


def test_lines_of_the_program_keep_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    narrow, piped = FakeTerminal(), io.StringIO()
    for out in (narrow, piped):
        say("a line that is longer than thirty columns are wide", out)
    assert narrow.getvalue() == "a line that is longer than\nthirty columns are wide\n"
    assert piped.getvalue().count("\n") == 1


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


ANSWER = """# A heading

Some **bold words** and `code here` in a paragraph that is longer than the line is.

- an item that is longer than a line of the narrow terminal, so that it is wrapped
- 日本語のとても長い文章 and more words after it

```python
x = "a line of code that is much longer than the terminal is wide"  # **not bold**
```
the end"""


@pytest.mark.parametrize("columns", [100, 44])
def test_words_stay_whole_and_marks_become_styles(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    styled = shown(ANSWER, monkeypatch, columns)
    lines = plain(styled).splitlines()
    code = [line for line in lines if line.startswith("x = ")]
    assert code == [ANSWER.splitlines()[8]]  # as it is
    assert all(width_of(line) <= columns for line in lines if line not in code)
    words = plain(styled).replace("•", "-").split()
    assert words == ANSWER.replace("`code here`", "code here").replace("**bold words**", "bold words").split()
    assert "\x1b[1mbold words\x1b[0m" in styled.replace("\n", " ") and "\x1b[36mcode here" in styled
    if columns == 44:
        assert "\n  " in plain(styled)  # an item's second line stands below its first


def test_no_colour_keeps_the_marks_and_a_pipe_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in shown(ANSWER, monkeypatch, 44, NO_COLOR="1")
    assert shown(ANSWER, monkeypatch, 44, NO_COLOR="1").split() == ANSWER.split()
    assert shown(ANSWER, monkeypatch, 44, TERM="dumb") == ANSWER
    out = io.StringIO()
    AnswerScreen(out).write(ANSWER)
    assert out.getvalue() == ANSWER
