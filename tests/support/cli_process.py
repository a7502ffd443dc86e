"""The command line as a process: with a scripted model, or as it is installed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("scripted_cli.py")


def scripted(
    environment: dict[str, str], *arguments: str, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **source)


def real(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("tokenmill: ")
    for word in words:
        assert word in done.stderr


def wait_for_no_engine(environment: dict[str, str]) -> None:
    """No process is left that was started with this test's own store in its environment."""
    deadline = time.monotonic() + 10
    while engines_of(environment["TOKENMILL_HOME"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def engines_of(home: str) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    pids = [int(line.split()[0]) for line in listed if "tokenmill.engine.core_main" in line]
    return [pid for pid in pids if f"TOKENMILL_HOME={home}".encode() in started_with(pid)]


def started_with(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
