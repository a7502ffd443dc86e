"""The SQLite file, and the one thread that uses it, so that the event loop never waits for the disk.

    await database.write(work)     run work(connection) in one transaction
    await database.read(work)      the same, for work that changes nothing

A call continues even if its caller is cancelled. The file is in WAL mode, so several servers with one TOKENMILL_HOME
can share it; committed data survives kill -9. The file is created on the first write or read, readable by its owner
alone. Without a path the database is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from tokenmill.errors import TokenmillError
from tokenmill.server.state.schema import VERSIONS

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[[sqlite3.Connection], T]
BUSY_S = 20.0  # longest wait for transactions of other servers with the same file
MOUNTS = Path("/proc/self/mountinfo")
REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "glusterfs", "fuse.")  # without shared memory, which WAL needs


class StateFailed(TokenmillError):
    """The state file can't be read or written."""

    code = "state_unavailable"


class Database:
    """The state database, a file or (without a path) in memory, which one thread uses."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")

    @property
    def is_new(self) -> bool:
        """Return whether nothing was stored so far."""
        return self._connection is None and (self.path is None or not self.path.exists())

    async def write(self, work: Work[T]) -> T:
        return await self._call(self._in_transaction, work, "BEGIN IMMEDIATE")

    async def read(self, work: Work[T]) -> T:
        return await self._call(self._in_transaction, work, "BEGIN")

    async def close(self) -> None:
        """Finish the calls so far, and close the file."""
        await self._call(self._close)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Shielded: cancelling the future of a call that has not begun would drop the call.
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(function, *args, **kwargs)))

    # ── in the thread ──────────────────────────────────────────────────────────────────────────────────

    def _in_transaction(self, work: Work[T], begin: str) -> T:
        try:
            if self._connection is None:
                self._connection = opened(self.path)
            with transaction(self._connection, begin):
                return work(self._connection)
        except (sqlite3.Error, OSError) as error:
            where = "in memory" if self.path is None else f"file {self.path}"
            raise StateFailed(f"the state {where} can't be used: {error}", hint="--no-state stores nothing") from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def opened(path: Path | None) -> sqlite3.Connection:
    """Open a connection to a file and migrate its tables to the newest version."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite creates its WAL files with the same mode
        path.chmod(0o600)
    connection = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only for a new file
        if path is not None and not is_remote(path):
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted data
        with transaction(connection, "BEGIN IMMEDIATE"):
            migrate(connection)
    except (sqlite3.Error, StateFailed):
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    with connection:  # commits, or rolls back after an exception
        yield


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the tables to the newest version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(VERSIONS):
        raise StateFailed(
            f"the state file has version {version}, but this Tokenmill supports versions up to {len(VERSIONS)}",
            hint="a newer Tokenmill wrote it; --no-state runs without it",
        )
    for script in VERSIONS[version:]:
        for statement in statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {len(VERSIONS)}")


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a script one by one: `executescript` would commit the current transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def is_remote(path: Path) -> bool:
    """Return whether a file is on a network file system, as far as the mount table shows."""
    if not MOUNTS.exists():
        return False
    kinds: dict[str, str] = {}
    for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kinds[before.split()[4]] = after.split()[0]
    parents = (str(parent) for parent in path.resolve().parents)
    kind = next((kinds[parent] for parent in parents if parent in kinds), "")
    return kind.startswith(REMOTE)
