"""The parent's handle of a core process: start it, stop it, kill it.

Starting the process needs none of the engine's imports, so a command that will need a core starts one first and then
imports modules and reads files: the slowest part of the child's start, importing torch, runs at the same time. The
child (`core_main.py`) waits for its `Start` message.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

EXIT_TIMEOUT_S = 3.0
STOPPED = "was stopped"
STOPPED_GRACE_S = 0.5  # a debugger stops a process briefly; one stopped for longer counts as lost
STOP_SIGNAL = signal.SIGUSR1  # parent to a child that does not read messages; SIGTERM may come from other senders
MAX_SOCKET_PATH = 70  # bytes; the names of the folder and the socket take 29 more
SECRETS = (
    "TOKENMILL_API_KEY",
    "TOKENMILL_CLUSTER_KEY",
)  # only the front needs them: removed from the core's environment
FOLDER_PREFIX = "tokenmill-"
LOCK = "owner"
UNLOCKED_GRACE_S = 60.0  # the owner of a younger folder may not have locked it yet
NO_FAST_START = "--no-fast-start"  # the child's last argument, to turn the start-up optimisations off


class CoreProcess:
    def __init__(
        self,
        program: Sequence[str] = ("-m", "tokenmill.engine.core_main"),
        *,
        fast_start: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`program`: what Python runs; its arguments are the socket folder and the parent's pid. `fast_start`: whether
        the child may use the start-up optimisations (`engine/startup`). `environment`: variables in addition to this
        process's."""
        parent_folder = socket_path(tempfile.gettempdir())
        remove_abandoned(parent_folder)
        # The folder of the child's sockets, with mode 0700.
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent_folder, ignore_cleanup_errors=True)
        self._lock: int | None = None
        switch = [] if fast_start else [NO_FAST_START]
        try:
            self._lock = lock_folder(self._folder.name)
            # A separate process group: Ctrl-C in a terminal reaches the front only, which then drains.
            self._process = subprocess.Popen(
                [*python_command(), *program, self._folder.name, str(os.getpid()), *switch],
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
        return not self.has_ended() and is_stopped(self.process_id)

    def wait(self) -> str:
        """Wait until the process has ended; return its exit code or signal as text."""
        return describe_exit(self._process.wait())

    def stop(self, *, is_responsive: bool = True) -> None:
        """Wait `EXIT_TIMEOUT_S` for a process that was sent Shutdown, then signal it, then kill it. A process that is
        still loading does not read its messages (`is_responsive` is False), so it is signalled immediately."""
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
        self._folder.cleanup()  # if this fails, the next start of a core removes the unlocked folder
        lock, self._lock = self._lock, None  # two threads may call `stop`: the descriptor must not be closed twice
        if lock is not None:
            os.close(lock)

    def send_kill(self) -> None:
        """Send SIGKILL to a process that does not respond; whoever is in `wait` gets the exit."""
        self._process.kill()

    def kill(self) -> None:
        """Kill a process that has not received a message, so has nothing to finish, and clean up after it."""
        self._process.kill()
        self._process.wait()
        self._clean_up()


def python_command() -> list[str]:
    """Return the command that runs this Python for a child process of this package. It imports nothing from the
    current folder, which may hold an untrusted model, unless the package itself is there."""
    root = os.path.realpath(__file__)
    for _ in ("core_process.py", "engine", "tokenmill"):
        root = os.path.dirname(root)
    try:
        is_here = os.getcwd() == root
    except OSError:  # the current folder was removed
        is_here = False
    return [sys.executable] if is_here else [sys.executable, "-P"]


def lock_folder(folder: str) -> int:
    """Lock a folder for the lifetime of this process; return the descriptor of the lock."""
    lock = os.open(os.path.join(folder, LOCK), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def remove_abandoned(parent_folder: str) -> None:
    """Remove the socket folders of this user's processes that were killed together with their cores."""
    for name in os.listdir(parent_folder):
        folder = os.path.join(parent_folder, name)
        if not name.startswith(FOLDER_PREFIX) or not _is_abandoned(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: str) -> bool:
    """Tell whether the owner of a folder has ended: its lock file exists and nothing holds the lock."""
    try:
        found = os.lstat(folder)
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < UNLOCKED_GRACE_S:
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
    """Return a folder for sockets with a short path: a socket's path is limited to about 100 bytes, and some machines
    have a longer temporary folder."""
    return usual if len(os.fsencode(usual)) <= MAX_SOCKET_PATH else "/tmp"


def to_core(folder: str) -> str:
    """Return the address of messages to the core."""
    return f"ipc://{folder}/to-core"


def from_core(folder: str) -> str:
    return f"ipc://{folder}/from-core"


def beats_from_core(folder: str) -> str:
    """Return the address of the core's heartbeat, which a separate thread sends."""
    return f"ipc://{folder}/beats"


def block_socket(folder: str) -> str:
    """Return the path of the socket at which a core serves blocks of its KV cache to other cores."""
    return f"{folder}/blocks"


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def wait_for_trouble(pid: int) -> str:
    """Wait until a child has ended, or was stopped and stays stopped; return which."""
    while True:
        try:
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        except ChildProcessError:  # another thread has waited for it
            return "has ended"
        if state is None or state.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            return "has ended"
        if stays_stopped(pid):
            return STOPPED


def stays_stopped(pid: int) -> bool:
    """Tell whether a child that is stopped still is after `STOPPED_GRACE_S`."""
    threading.Event().wait(STOPPED_GRACE_S)
    return is_stopped(pid)


def is_stopped(pid: int) -> bool:
    """Tell whether a signal has stopped a child."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has waited for it
        return False
