"""`--help` on one screen, `--help-all`, and the completion of shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenmill.cli import VERBS, main
from tokenmill.cli.dispatch import build_app
from tokenmill.cli.help_screen import COMMON_FLAGS, requested_help


@pytest.mark.parametrize("command", COMMON_FLAGS)
def test_help_fits_a_screen_and_names_flags_that_exist(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Usage: tokenmill {command} ") and any(
        "--help-all lists" in line for line in lines[-2:]
    )
    assert all(any(line.split()[:1] == [flag] for line in lines) for flag in COMMON_FLAGS[command])


def test_all_flags_are_listed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help-all"]) == 0
    shown = capsys.readouterr().out
    known = build_app("run", None)["run"].assemble_argument_collection()
    settings = {one.names[0] for one in known if one.parse and one.names[0].startswith("--")}
    assert settings > set(COMMON_FLAGS["run"]) and not [flag for flag in settings if flag not in shown]
    assert main(["bench", "--help"]) == 0 and "compare" in capsys.readouterr().out
    assert requested_help("run", ["--", "--help"]) is None  # after --, it is the prompt
    assert requested_help("run", ["hi", "--help-all"]) == ("run", True)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("keys add", "--tokens-per-day"),
        ("keys revoke", "NAME"),
        ("service install", "--user"),
        ("audit verify", "FILE"),
    ],
)
def test_subcommands_have_help_of_their_own(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ("--help", "--help-all"):
        assert main([*command.split(), asked]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"Usage: tokenmill {command} ") and flag in shown


def test_a_shell_completes_verbs_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    ask = 'source "$0"; COMP_WORDS=(tokenmill "$@"); COMP_CWORD=$#; _tokenmill; echo "${COMPREPLY[@]}"'
    asked = ((["ser"], "serve service"), (["run", "--temp"], "--temperature"), (["bench", "sea"], "search"))
    for words, found in asked:
        done = subprocess.run([bash, "-c", ask, str(script), *words], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == found.split(), done
    assert all(verb in script.read_text() for verb in VERBS)


def test_a_shell_must_be_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["completion"]) == 2 and "bash, zsh, fish" in capsys.readouterr().err
