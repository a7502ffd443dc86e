"""docs/from-other-engines.md says what happens: every command of it is translated, and its program runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.cli.dispatch import build_app, flags_of, with_our_names
from tokenmill.errors import InvalidConfig, TokenmillError

PAGE = (Path(__file__).resolve().parents[2] / "docs/from-other-engines.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| (taken|with a note|refused) \|(?: `([^`]+)`)? *\|$", PAGE, re.MULTILINE)
COMMANDS = [row for row in ROWS if row[0].split()[0] in ("vllm", "sglang", "llama-server", "llama-cli", "ollama")]
SNIPPETS = [(there, words) for there, how, words in ROWS if (there, how, words) not in COMMANDS]
TAKEN = [row for row in COMMANDS if row[1] != "refused"]
REFUSED = [(there, words) for there, how, words in COMMANDS if how == "refused"]
FLAGS = {verb: flags_of(build_app(verb, None), verb) for verb in ("serve", "run")}


def arguments(command: str) -> list[str]:
    """The arguments behind the program and its verb."""
    words = shlex.split(command)
    return words[2 if words[0] in ("vllm", "sglang", "ollama", "tokenmill") else 1 :]


def test_the_page_has_its_lines() -> None:
    assert len(TAKEN) == 20 and len(REFUSED) == 10 and len(SNIPPETS) >= 20
    lines = re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE)
    assert len(lines) == len(ROWS), "a row of a table is not as the test reads it"


@pytest.mark.parametrize(("there", "how", "here"), TAKEN)
def test_a_command_is_taken(there: str, how: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    if there == "ollama serve":  # listens on Ollama's port
        return
    assert with_our_names(arguments(there), FLAGS[here.split()[1]]) == arguments(here)
    assert bool(capsys.readouterr().err) == (how == "with a note")


@pytest.mark.parametrize(("there", "words"), REFUSED)
def test_a_command_is_refused_with_what_to_use(there: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        with_our_names(arguments(there), FLAGS["serve"])


@pytest.fixture(scope="module")
def names(stories_dir: Path) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=3)
    path = str(stories_dir)
    return {"LLM": LLM, "SamplingParams": SamplingParams, "M": path, "P": params, "llm": LLM(path, threads=1)}


@pytest.mark.parametrize(("there", "words"), SNIPPETS)
def test_a_line_of_a_program(there: str, words: str, names: dict[str, Any]) -> None:
    if not words:
        assert eval(there, names) is not None
        return
    with pytest.raises((TokenmillError, AttributeError), match=re.escape(words)):
        eval(there, names)


@pytest.mark.slow
def test_the_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
