"""Files that clients store on the server: a row with the metadata, and the content in a file of its own.

    state/files/file-<id>         the content; it is named by its id, never by the client's file name
    state/files/incoming-<id>     content that is still being written

Content is hashed while it is written, and is on the disk before its row is inserted. A file that a running batch reads
can't be deleted. Without a state folder, contents are in a temporary folder, which is removed with the server.
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

from tokenmill.errors import InvalidRequest
from tokenmill.server.request_ids import new_id
from tokenmill.server.state.database import StateFailed
from tokenmill.server.state.rows import Bound, get, unknown
from tokenmill.server.state.server_state import ServerState

MAX_FILES = 100_000
STALE_S = 3600.0  # delete content without a row that was not modified for so long
HIDDEN = "message_batch"  # purpose of the internal files of batches, which clients do not see
IN_USE = "SELECT input FROM batches WHERE status IN ('validating', 'in_progress', 'cancelling', 'finalizing')"


class FileInUse(InvalidRequest):
    """A batch that has not ended reads this file."""

    code = "file_in_use"
    http_status = 409


class FileWriter:
    """Writes and hashes content, which becomes a file when `StoredFiles` inserts its row."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / new_id("incoming-")
        self.num_bytes = 0
        self._hash = hashlib.sha256()
        with self._reported_failures():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file: BinaryIO = os.fdopen(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Append bytes. This blocks; on the event loop use `add`."""
        with self._reported_failures():
            self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    async def add(self, data: bytes) -> None:
        await asyncio.to_thread(self.write, data)

    def finish(self) -> str:
        """Sync the content to the disk; return its SHA-256."""
        with self._reported_failures():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._hash.hexdigest()

    def drop(self) -> None:
        """Delete the content, unless it became a file."""
        with contextlib.suppress(OSError):  # the rest of its buffer may not be writable either
            self._file.close()
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reported_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StateFailed(f"can't write a file to {self.path.parent}: {error.strerror}") from error


class StoredFiles:
    """The files of all API keys."""

    def __init__(self, state: ServerState, max_bytes: int) -> None:
        """`max_bytes`: limit of all files together; the least recently used are deleted first."""
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
        """Store written content as a file."""
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
        """Store finished content as a file, within the caller's transaction."""
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
        """Return a file of an owner; UnknownRow (404) if there is none."""
        return await self._state.database.read(lambda connection: visible(connection, owner, file_id))

    async def use(self, owner: str, file_id: str, param: str = "id") -> sqlite3.Row:
        """The same as `get`, and record the use: the least recently used files are deleted first."""

        def work(connection: sqlite3.Connection) -> sqlite3.Row:
            row = visible(connection, owner, file_id, param)
            connection.execute("UPDATE files SET used_s = ? WHERE id = ?", (time.time(), file_id))
            return row

        return await self._state.database.write(work)

    async def open(self, owner: str, file_id: str) -> BinaryIO:
        """Open the content of a file, which stays readable if the file is deleted meanwhile."""
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
        """Delete a file within the caller's transaction."""
        connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._remove_contents([file_id])

    async def sweep(self) -> None:
        """Delete expired files, and stale content that never became a file."""
        if self._state.database.is_new:
            return
        self._remove_contents(await self._state.database.write(self._bound.expire))
        stale = [path.name for path in await asyncio.to_thread(self._stale_contents)]
        file_ids = await self._state.database.read(
            lambda connection: {row["id"] for row in connection.execute("SELECT id FROM files")}
        )
        self._remove_contents([name for name in stale if name not in file_ids])

    def _stale_contents(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        before = time.time() - STALE_S
        return [path for path in self.folder.iterdir() if path.stat().st_mtime < before]

    def _remove_contents(self, names: list[str]) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._temporary is not None:
            self._remove_temporary()


def visible(connection: sqlite3.Connection, owner: str, file_id: str, param: str = "id") -> sqlite3.Row:
    """Return a file that a client may see; UnknownRow (404) with the field `param` if there is none."""
    row = get(connection, "files", file_id, owner, param)
    if row["purpose"] == HIDDEN:
        raise unknown("files", file_id, param)
    return row
