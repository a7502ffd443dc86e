"""Files that clients keep on the server: a row with their facts, and their content beside it on the disk.

    state/files/file-<id>         the content, named by the id and never by what the client called it
    state/files/incoming-<id>     content that is still being written: not a file yet

Content is hashed while it is written, and is on the disk before its row is. A file that a running batch reads can't be
deleted. Without a folder for state, contents are in a temporary one that goes with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tokenmill.engine.request_ids import new_id
from tokenmill.errors import InvalidRequest
from tokenmill.server.state.database import StateFailed
from tokenmill.server.state.rows import Bound, get, unknown
from tokenmill.server.state.server_state import ServerState

MAX_FILES = 100_000
ABANDONED_S = 3600.0  # content without a row, once nothing was written to it for so long
HIDDEN = "message_batch"  # the purpose of files that belong to a batch, and that no client sees
IN_USE = "SELECT input FROM batches WHERE status IN ('validating', 'in_progress', 'cancelling', 'finalizing')"


class FileInUse(InvalidRequest):
    """A batch that has not ended reads this file."""

    code = "file_in_use"
    http_status = 409


class FileWriter:
    """Content that is being written: hashed on the way, a file only once it is kept."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / new_id("incoming-")
        self.num_bytes = 0
        self._hash = hashlib.sha256()
        with self._told_failures():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file: BinaryIO = os.fdopen(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Append bytes; blocks, so event loops call `add`."""
        with self._told_failures():
            self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    async def add(self, data: bytes) -> None:
        await asyncio.to_thread(self.write, data)

    def finish(self) -> str:
        """Bring all of it to the disk; the SHA-256 of it."""
        with self._told_failures():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._hash.hexdigest()

    def drop(self) -> None:
        """Forget what was written, unless it became a file."""
        with contextlib.suppress(OSError):  # what is left in its buffer can't be written either
            self._file.close()
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _told_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StateFailed(f"no file can be written to {self.path.parent}: {error.strerror}") from error


class StoredFiles:
    """The files of all keys."""

    def __init__(self, state: ServerState, max_bytes: int) -> None:
        """`max_bytes`: of all files together; those that were not used for longest go first."""
        self._state = state
        self._bound = Bound("files", MAX_FILES, max_bytes, f"id NOT IN ({IN_USE})")
        self._temporary: Path | None = None

    @property
    def folder(self) -> Path:
        if self._state.folder is not None:
            return self._state.folder / "files"
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="tokenmill-files-"))
            self._remove_temporary = weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content; `file_id` must come from a row."""
        return self.folder / file_id

    def writer(self) -> FileWriter:
        return FileWriter(self.folder)

    async def keep(
        self, writer: FileWriter, owner: str, *, name: str, purpose: str, expires_s: float | None
    ) -> sqlite3.Row:
        """Make a file of what was written."""
        sha256 = await asyncio.to_thread(writer.finish)

        def work(connection: sqlite3.Connection) -> sqlite3.Row:
            return self.insert(connection, writer, sha256, owner, name=name, purpose=purpose, expires_s=expires_s)

        return await self._state.database.write(work)

    def insert(
        self,
        connection: sqlite3.Connection,
        writer: FileWriter,
        sha256: str,
        owner: str,
        *,
        name: str,
        purpose: str,
        expires_s: float | None,
    ) -> sqlite3.Row:
        """Make a file of finished content, within a transaction of the caller's."""
        file_id, now = new_id("file-"), time.time()
        self._remove_contents(self._bound.make_room(connection, writer.num_bytes))
        writer.path.rename(self.path(file_id))
        connection.execute(
            "INSERT INTO files (id, owner, created_s, used_s, expires_s, purpose, name, sha256, num_bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (file_id, owner, now, now, expires_s, purpose, name, sha256, writer.num_bytes),
        )
        return get(connection, "files", file_id, owner)

    async def get(self, owner: str, file_id: str) -> sqlite3.Row:
        """A file of an owner; an error (404) if there is none."""
        return await self._state.database.read(lambda connection: visible(connection, owner, file_id))

    async def use(self, owner: str, file_id: str, param: str = "id") -> sqlite3.Row:
        """The same, and remember that it was used: what was not used for longest makes room."""

        def work(connection: sqlite3.Connection) -> sqlite3.Row:
            row = visible(connection, owner, file_id, param)
            connection.execute("UPDATE files SET used_s = ? WHERE id = ?", (time.time(), file_id))
            return row

        return await self._state.database.write(work)

    async def open(self, owner: str, file_id: str) -> BinaryIO:
        """The content of a file, which stays readable if the file is deleted meanwhile."""
        row = await self.use(owner, file_id)
        try:
            return await asyncio.to_thread(self.path(row["id"]).open, "rb")
        except FileNotFoundError:  # deleted since its row was read
            raise unknown("files", file_id) from None

    async def list_of(self, owner: str, purpose: str | None, is_descending: bool) -> list[sqlite3.Row]:
        order = "DESC" if is_descending else "ASC"
        query = (
            "SELECT * FROM files WHERE owner = ? AND purpose != ? AND (? IS NULL OR purpose = ?)"
            f" AND (expires_s IS NULL OR expires_s > ?) ORDER BY created_s {order}, rowid {order}"
        )
        values = (owner, HIDDEN, purpose, purpose, time.time())
        return await self._state.database.read(lambda connection: connection.execute(query, values).fetchall())

    async def delete(self, owner: str, file_id: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            visible(connection, owner, file_id)
            if connection.execute(f"SELECT 1 WHERE ? IN ({IN_USE})", (file_id,)).fetchone():
                raise FileInUse("a batch that has not ended reads this file", param="file_id", hint="cancel it first")
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._state.database.write(work)
        self._remove_contents([file_id])

    def remove(self, connection: sqlite3.Connection, file_id: str) -> None:
        """Delete a file within a transaction of the caller's."""
        connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._remove_contents([file_id])

    async def sweep(self) -> None:
        """Delete files whose time is over, and content that never became a file."""
        if self._state.database.is_new:
            return
        self._remove_contents(await self._state.database.write(self._bound.expire))
        old = [path.name for path in await asyncio.to_thread(self._untouched)]
        kept = await self._state.database.read(
            lambda connection: {row["id"] for row in connection.execute("SELECT id FROM files")}
        )
        self._remove_contents([name for name in old if name not in kept])

    def _untouched(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        before = time.time() - ABANDONED_S
        return [path for path in self.folder.iterdir() if path.stat().st_mtime < before]

    def _remove_contents(self, names: list[str]) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._temporary is not None:
            self._remove_temporary()


def visible(connection: sqlite3.Connection, owner: str, file_id: str, param: str = "id") -> sqlite3.Row:
    """Return a file that a client may see; raise an error (404) that names `param` if there is none."""
    row = get(connection, "files", file_id, owner, param)
    if row["purpose"] == HIDDEN:
        raise unknown("files", file_id, param)
    return row
