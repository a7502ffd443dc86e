"""The core's process, as its parent sees it: started, asked to end, made to end.

Starting it needs none of the engine's imports, so whoever knows that a core will be wanted starts it first and imports
and reads afterwards: the child's longest wait, importing torch, then runs beside all that. It waits for its `Start`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

EXIT_TIMEOUT_S = 3.0
STOP_SIGNAL = signal.SIGUSR1  # what a parent says to a child that does not read its mail; SIGTERM comes from others too
MAX_SOCKET_PATH = 70  # bytes: the folder's own name and the socket's take 29 more


class CoreProcess:
    def __init__(self, program: Sequence[str] = ("-m", "tokenmill.engine.process_core_client")) -> None:
        """`program`: what Python runs; it is told the folder of its sockets and its parent."""
        # Where its sockets lie; of mode 0700.
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-", dir=socket_path(tempfile.gettempdir()))
        # A group of its own: Ctrl-C in a terminal reaches the front only, which then drains.
        self._process = subprocess.Popen(
            [*own_python(), *program, self._folder.name, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def folder(self) -> str:
        return self._folder.name

    def wait(self) -> str:
        """How it ended, in words."""
        return describe_exit(self._process.wait())

    def end(self, *, hears: bool = True) -> None:
        """It was told to stop: wait a moment, ask, then insist. One that still loads does not hear: ask at once."""
        if not hears:
            self._process.send_signal(STOP_SIGNAL)
        for insist in (STOP_SIGNAL, signal.SIGKILL):
            try:
                self._process.wait(timeout=EXIT_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(insist)
        self._process.wait()
        self._folder.cleanup()

    def discard(self) -> None:
        """It was never told anything and has nothing to finish."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def own_python() -> list[str]:
    """Python for parts of this package. It imports nothing from the folder that the user stands in, which may be that
    of a model from anywhere, unless the package itself is found there."""
    root = os.path.realpath(__file__)
    for _ in ("child.py", "engine", "tokenmill"):
        root = os.path.dirname(root)
    try:
        stands_there = os.getcwd() == root
    except OSError:  # the folder is gone
        stands_there = False
    return [sys.executable] if stands_there else [sys.executable, "-P"]


def socket_path(usual: str) -> str:
    """A socket's path has room for a hundred bytes; some machines keep what is temporary in deeper folders."""
    return usual if len(os.fsencode(usual)) <= MAX_SOCKET_PATH else "/tmp"


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
