"""Runs the command line as a process: with a scripted model, or as installed."""

from __future__ import annotations

import codecs
import fcntl
import math
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.emulated_screen import EmulatedScreen

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("scripted_cli.py")


def scripted(
    environment: dict[str, str], *arguments: str, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **source)


def real(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("tokenmill: ")
    for word in words:
        assert word in done.stderr


def wait_for_no_engine(environment: dict[str, str]) -> None:
    """Wait until no process is left that was started with this test's store in its environment."""
    deadline = time.monotonic() + 60
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


class TerminalScreen:
    """The output of a program in a terminal. `unseen` holds what no `expect` has consumed yet, so text that arrives
    together is not lost between two calls; `emulated` is the screen that a user would see."""

    def __init__(self, terminal: int, columns: int) -> None:
        self.terminal, self.unseen = terminal, b""
        self.emulated = EmulatedScreen(columns)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def expect(self, wanted: bytes, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while wanted not in self.unseen:
            assert time.monotonic() < deadline, f"{wanted!r} did not come; got {self.unseen[-500:]!r}"
            self.unseen += self._read()
        self.unseen = self.unseen.partition(wanted)[2]

    def type_until(self, keys: bytes, wanted: bytes, timeout_s: float = 60.0) -> None:
        """Repeat the same input every second until the expected output arrives."""
        deadline, typed_s = time.monotonic() + timeout_s, -math.inf
        while wanted not in self.unseen:
            assert time.monotonic() < deadline, f"{wanted!r} did not come; got {self.unseen[-500:]!r}"
            if time.monotonic() - typed_s > 1.0:
                self.type(keys)
                typed_s = time.monotonic()
            self.unseen += self._read()
        self.unseen = self.unseen.partition(wanted)[2]

    def expect_seen(self, is_there: Callable[[list[str]], bool], timeout_s: float = 60.0) -> None:
        """Wait until the emulated screen satisfies a condition."""
        deadline = time.monotonic() + timeout_s
        while not is_there(self.emulated.lines()):
            assert time.monotonic() < deadline, "\n".join(["it did not come; there is:", *self.emulated.lines()])
            self._read()

    def _read(self) -> bytes:
        if not select.select([self.terminal], [], [], 0.2)[0]:
            return b""
        try:
            came = os.read(self.terminal, 4096)
        except OSError:
            raise AssertionError("\n".join(["the program ended:", *self.emulated.lines()])) from None
        self.emulated.feed(self._decode(came))
        if self.emulated.reply:
            self.type(self.emulated.reply)
            self.emulated.reply = b""
        return came

    def type(self, keys: bytes) -> None:
        os.write(self.terminal, keys)


@contextmanager
def in_terminal(
    environment: dict[str, str], *arguments: str, columns: int = 100, program: tuple[str, ...] = (str(SCRIPT),)
) -> Iterator[TerminalScreen]:
    """Run the scripted command line, or another program, in a terminal with the given number of columns; require
    that it exits with status 0."""
    child, terminal = pty.fork()
    if child == 0:
        # A test run started in the background of a script ignores SIGINT, and its children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(sys.executable, [sys.executable, *program, *arguments], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    try:
        yield TerminalScreen(terminal, columns)
        _, status = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
