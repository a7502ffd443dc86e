"""The core's process, as its parent sees it: started, asked to stop, killed.

Starting it needs none of the engine's imports, so a command that knows that it will need a core starts one first and
imports and reads afterwards: the child's longest wait, importing torch, then runs beside all that. The child
(`core_main.py`) waits for its `Start` message.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

EXIT_TIMEOUT_S = 3.0
STOP_SIGNAL = signal.SIGUSR1  # from a parent to a child that does not read its messages; SIGTERM comes from others too
MAX_SOCKET_PATH = 70  # bytes: the folder's own name and the socket's take 29 more
SECRETS = ("TOKENMILL_API_KEY", "TOKENMILL_CLUSTER_KEY")  # the front's: a core knows no keys
FOLDER_PREFIX = "tokenmill-"
LOCK = "owner"
YOUNG_S = 60.0  # a folder of this age may be one whose owner is about to lock it
PLAIN_START = "--no-fast-start"  # the child's last argument, where it is not to start fast


class CoreProcess:
    def __init__(
        self,
        program: Sequence[str] = ("-m", "tokenmill.engine.core_main"),
        *,
        fast_start: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`program`: what Python runs; its arguments are the folder of its sockets and its parent's pid. `fast_start`:
        whether the child may use start-up tricks (`engine/startup`). `environment`: variables besides this
        process's."""
        # Where its sockets lie; of mode 0700.
        place = socket_path(tempfile.gettempdir())
        remove_abandoned(place)
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=place, ignore_cleanup_errors=True)
        self._lock: int | None = None
        switch = [] if fast_start else [PLAIN_START]
        try:
            self._lock = hold(self._folder.name)
            # A group of its own: Ctrl-C in a terminal reaches the front only, which then drains.
            self._process = subprocess.Popen(
                [*own_python(), *program, self._folder.name, str(os.getpid()), *switch],
                env={**{name: value for name, value in os.environ.items() if name not in SECRETS}, **environment},
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError:
            self._clean_up()
            raise

    @property
    def folder(self) -> str:
        return self._folder.name

    @property
    def process_id(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_stopped(self) -> bool:
        """Tell whether a signal has stopped it (SIGSTOP), so that it would not answer."""
        if self.has_ended():
            return False
        return os.waitid(os.P_PID, self.process_id, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> str:
        """Wait until it has ended; how, in words."""
        return describe_exit(self._process.wait())

    def stop(self, *, is_responsive: bool = True) -> None:
        """Wait a moment for a process that was told to stop, then signal it, then kill it. One that still loads does
        not read its messages (`is_responsive`): it is signalled at once."""
        if not is_responsive:
            self._process.send_signal(STOP_SIGNAL)
        for number in (STOP_SIGNAL, signal.SIGKILL):
            try:
                self._process.wait(timeout=EXIT_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)
        self._process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        self._folder.cleanup()  # if it can't be removed now, the next start of a core removes it, since it has no lock
        lock, self._lock = self._lock, None  # two threads may stop it: the number must not be closed twice
        if lock is not None:
            os.close(lock)

    def end_at_once(self) -> None:
        """Kill a process that does not react; who waits for it learns of its end."""
        self._process.kill()

    def kill(self) -> None:
        """End a process that was never told anything and has nothing to finish."""
        self._process.kill()
        self._process.wait()
        self._clean_up()


def own_python() -> list[str]:
    """The Python that runs parts of this package. It imports nothing from the current folder, which may hold a model
    from anywhere, unless the package itself is found there."""
    root = os.path.realpath(__file__)
    for _ in ("core_process.py", "engine", "tokenmill"):
        root = os.path.dirname(root)
    try:
        is_here = os.getcwd() == root
    except OSError:  # the folder is gone
        is_here = False
    return [sys.executable] if is_here else [sys.executable, "-P"]


def hold(folder: str) -> int:
    """Lock a folder for as long as this process lives; the descriptor of the lock."""
    lock = os.open(os.path.join(folder, LOCK), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def remove_abandoned(place: str) -> None:
    """Remove the folders of this user's processes that were killed together with their cores."""
    for name in os.listdir(place):
        folder = os.path.join(place, name)
        if not name.startswith(FOLDER_PREFIX) or not _is_abandoned(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: str) -> bool:
    """Tell whether the owner of a folder is gone: nothing holds its lock. One without a lock is left alone."""
    try:
        found = os.lstat(folder)
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
            return False
        lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def socket_path(usual: str) -> str:
    """Return a short enough path for a socket: it may have about a hundred bytes, and some machines keep temporary
    files in deeper folders."""
    return usual if len(os.fsencode(usual)) <= MAX_SOCKET_PATH else "/tmp"


def to_core(folder: str) -> str:
    """The address of messages to the core."""
    return f"ipc://{folder}/to-core"


def from_core(folder: str) -> str:
    return f"ipc://{folder}/from-core"


def beats_from_core(folder: str) -> str:
    """The address of the core's heartbeat, which a thread of its own sends."""
    return f"ipc://{folder}/beats"


def block_socket(folder: str) -> str:
    """The socket at which a core gives blocks of its KV cache to other cores."""
    return f"{folder}/blocks"


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
