"""A server that is stopped before it listens ends without a failure, also where Python drops that exception."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

IN_A_DESTRUCTOR = """
import signal
from tokenmill.server.early_stop import EARLY_STOP

class Careless:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

EARLY_STOP.install()
Careless()
print(EARLY_STOP.is_requested)
"""
IN_A_CLASS = """
import signal
from tokenmill.cli.exit_codes import exit_code_of
from tokenmill.server.early_stop import EARLY_STOP

class Careless:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGTERM)

def command():
    class Owner:
        attribute = Careless()
    return 1

EARLY_STOP.install()
raise SystemExit(exit_code_of(command))
"""
NOTED = """
import sys
from tokenmill.cli import main
from tokenmill.server.early_stop import EARLY_STOP

EARLY_STOP.is_requested = True
raise SystemExit(main(sys.argv[1:]))
"""


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)


def test_a_stop_whose_exception_python_drops_is_noted() -> None:
    ended = python(IN_A_DESTRUCTOR)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", ""), "it went on, and said nothing of it"


def test_a_stop_whose_exception_python_wraps_is_no_failure() -> None:
    ended = python(IN_A_CLASS)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_server_that_was_told_to_stop_before_it_listened_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"say": "Hello."}]))
    ended = python(NOTED, "serve", f"scripted:{script}", "--port", "0", "--no-state")
    assert ended.returncode == 0, ended.stderr
    assert "is ready" not in ended.stdout
