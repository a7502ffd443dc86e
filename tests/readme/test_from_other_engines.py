"""docs/from-other-engines.md says what happens: every command of it is translated, and its program runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.cli.dispatch import build_app, flags_of, with_our_names
from tokenmill.errors import InvalidConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/from-other-engines.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)
TAKEN = [(there, here) for there, here in ROWS if here.startswith("tokenmill ")]
REFUSED = [(there, words) for there, words in ROWS if not words.startswith("tokenmill ")]
FLAGS = {verb: flags_of(build_app(verb, None), verb) for verb in ("serve", "run")}


def arguments(command: str) -> list[str]:
    """The arguments behind the program and its verb."""
    words = shlex.split(command)
    return words[2 if words[0] in ("vllm", "sglang", "ollama", "tokenmill") else 1 :]


def test_the_page_has_its_commands() -> None:
    assert len(TAKEN) == 20 and len(REFUSED) == 10


@pytest.mark.parametrize(("there", "here"), TAKEN)
def test_a_command_is_taken(there: str, here: str) -> None:
    if there == "ollama serve":  # listens on Ollama's port
        return
    assert with_our_names(arguments(there), FLAGS[here.split()[1]]) == arguments(here)


@pytest.mark.parametrize(("there", "words"), REFUSED)
def test_a_command_is_refused_with_what_to_use(there: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        with_our_names(arguments(there), FLAGS["serve"])


@pytest.mark.slow
def test_the_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
