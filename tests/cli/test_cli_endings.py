"""How commands end where their output goes nowhere, or before they have begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.cli import main

ROOT = Path(__file__).resolve().parents[2]
TALKING = [[], ["--version"], ["list", "--catalog"]]


def buffered(arguments: list[str], stdout: int) -> tuple[int, str]:
    """Exit code and complaints of a process whose output waits in a buffer, as outside of tests and containers."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "tokenmill", *arguments]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", TALKING)
def test_a_reader_that_left_before_anything_was_written(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert buffered(arguments, writer) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("arguments", TALKING)
def test_output_that_does_not_fit_the_disk(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as disk:
        assert buffered(arguments, disk.fileno()) == (1, "tokenmill: No space left on device\n")


def test_ctrl_c_while_the_command_line_is_still_being_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(verb: str, arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenmill.engine.startup.core_prestart.prestart_core", interrupted)
    assert main(["run", "hi"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_of_a_verb_can_be_asked_for_in_either_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--help"]) == 0
    usual = capsys.readouterr().out
    assert main(["help", "list"]) == 0
    assert capsys.readouterr().out == usual and "--catalog" in usual
