"""The server that works on a row: a response that is being generated, a batch that runs.

A server holds a lock on a file of its own for as long as it lives; the system lets go of it however the process ends,
kill -9 included. A row names the server that works on it, so after a restart, or beside other servers with the same
file, it can be told whether anyone still does.

    state/servers/<id>.lock       locked: that server lives        free or missing: its work is abandoned
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from tokenmill.engine.request_ids import new_id


class ServerInstance:
    """This server, as rows name it. Without a folder it is the only one, as its state is in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.id = new_id("server-")
        self._folder = folder
        self._descriptor: int | None = None

    def enter(self) -> None:
        """Take the lock; a row that names this server counts as worked on from now on."""
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
        """True if a server still runs; the lock of one that does not is removed."""
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
