"""The server process that works on a row, such as a running batch, and whether it is still alive.

A server holds a lock on a file of its own while it runs; the system releases it however the process ends, including
kill -9. A row names the server that works on it, so that other servers with the same state, and the next one, know
whether it is still being worked on.

    state/servers/<id>.lock       locked: that server is alive     unlocked or missing: its rows are abandoned
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from tokenmill.server.request_ids import new_id


class ServerInstance:
    """The identity of this server in rows. Without a folder there are no other servers: the state is in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.id = new_id("server-")
        self._folder = folder
        self._descriptor: int | None = None

    def enter(self) -> None:
        """Take the lock, before the first row names this server."""
        if self._folder is not None and self._descriptor is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(self._file(self.id), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def leave(self) -> None:
        if self._descriptor is not None:
            self._file(self.id).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def is_alive(self, server: str) -> bool:
        """Return whether a server is alive; remove the lock file of one that is not."""
        if server == self.id or self._folder is None:
            return server == self.id
        try:
            descriptor = os.open(self._file(server), os.O_RDWR)
        except FileNotFoundError:
            return False
        with contextlib.closing(os.fdopen(descriptor)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            self._file(server).unlink(missing_ok=True)
            return False

    def _file(self, server: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{server}.lock"
