"""The SQLite file and the thread that alone touches it, so that the event loop never waits for a disk.

    await database.write(work)     work(connection) in one transaction: all of it is kept, or nothing
    await database.read(work)      the same without changes

A call that was begun is finished even if its caller is cancelled. The file is in WAL mode, so several servers with one
TOKENMILL_HOME share it; what was committed survives kill -9. It is made, readable by its owner alone, when something is
first kept. Without a path everything is in memory and gone with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenmill.errors import TokenmillError
from tokenmill.server.state.schema import VERSIONS

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
BUSY_S = 20.0  # for other servers with the same file to finish their transactions
MOUNTS = Path("/proc/self/mountinfo")
REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "glusterfs", "fuse.")  # WAL needs memory shared by all users


class StateFailed(TokenmillError):
    """The state file can't be read or written."""

    code = "state_unavailable"


class Database:
    """One file of state (or memory, without a path), used by one thread."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")

    @property
    def is_new(self) -> bool:
        """Nothing was ever kept."""
        return self._connection is None and (self.path is None or not self.path.exists())

    async def write(self, work: Work[T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._in_transaction, work, "BEGIN IMMEDIATE"))

    async def read(self, work: Work[T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._in_transaction, work, "BEGIN"))

    async def close(self) -> None:
        """Finish what was begun, and close the file."""
        await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)

    # ── in the thread ──────────────────────────────────────────────────────────────────────────────────

    def _in_transaction(self, work: Work[T], begin: str) -> T:
        try:
            if self._connection is None:
                self._connection = opened(self.path)
            with transaction(self._connection, begin):
                return work(self._connection)
        except (sqlite3.Error, OSError) as error:
            where = "in memory" if self.path is None else f"file {self.path}"
            raise StateFailed(f"the state {where} can't be used: {error}", hint="--no-state keeps none") from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def opened(path: Path | None) -> sqlite3.Connection:
    """Open a connection to a file, and bring its tables up to date."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives the files beside it the same mode
        path.chmod(0o600)
    connection = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts for a new file only
        if path is not None and not is_remote(path):
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA secure_delete = ON")  # what a client deletes is overwritten
        with transaction(connection, "BEGIN IMMEDIATE"):
            migrate(connection)
    except (sqlite3.Error, StateFailed):
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    with connection:  # commits, or rolls back what an exception interrupts
        yield


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the tables to the newest version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(VERSIONS):
        raise StateFailed(
            f"the state file has version {version}, this Tokenmill knows {len(VERSIONS)}",
            hint="it was written by a newer one; --no-state runs without it",
        )
    for script in VERSIONS[version:]:
        for statement in statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {len(VERSIONS)}")


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would commit the transaction they belong to."""
    gathered = ""
    for line in script.splitlines():
        gathered += line + "\n"
        if sqlite3.complete_statement(gathered):
            yield gathered
            gathered = ""


def is_remote(path: Path) -> bool:
    """True if a file is on a disk of another machine, as far as this system tells."""
    if not MOUNTS.exists():
        return False
    kinds: dict[str, str] = {}
    for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kinds[before.split()[4]] = after.split()[0]
    parents = (str(parent) for parent in path.resolve().parents)
    kind = next((kinds[parent] for parent in parents if parent in kinds), "")
    return kind.startswith(REMOTE)
