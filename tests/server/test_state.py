"""The state file: transactions in a thread of its own, versions, owners, bounds, expiry, and whose work a row is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tokenmill.config.server import ServerConfig
from tokenmill.errors import Overloaded
from tokenmill.server.state import database as database_module
from tokenmill.server.state.database import Database, StateFailed, is_remote, opened
from tokenmill.server.state.instance import ServerInstance
from tokenmill.server.state.rows import Bound, UnknownRow, find, get
from tokenmill.server.state.schema import VERSIONS
from tokenmill.server.state.server_state import ServerState

KEPT = "status NOT IN ('queued', 'in_progress')"


def done(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def add(
    connection: sqlite3.Connection,
    row_id: str,
    *,
    owner: str = "me",
    used_s: float = 0.0,
    expires_s: float | None = None,
    status: str = "completed",
    num_bytes: int = 10,
) -> None:
    connection.execute(
        "INSERT INTO responses (id, owner, created_s, used_s, expires_s, status, request, body, num_bytes)"
        " VALUES (?, ?, 0, ?, ?, ?, '{}', '{}', ?)",
        (row_id, owner, used_s, expires_s, status, num_bytes),
    )
    connection.execute("INSERT INTO items VALUES (?, 0, 'item', ?, 'input', '{}')", (row_id, owner))


def ids(connection: sqlite3.Connection) -> list[str]:
    return [row["id"] for row in connection.execute("SELECT id FROM responses ORDER BY id")]


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_made_when_something_is_first_kept_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    database = Database(tmp_path / "state" / "tokenmill.db")

    async def work() -> None:
        assert database.is_new and not (tmp_path / "state").exists()
        await database.write(lambda connection: add(connection, "one"))
        for file in (tmp_path / "state").iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert (tmp_path / "state" / "tokenmill.db-wal").exists()
        await database.close()

    done(work())
    assert ids(opened(tmp_path / "state" / "tokenmill.db")) == ["one"]


def test_a_transaction_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    database = Database(tmp_path / "t.db")

    def fails(connection: sqlite3.Connection) -> None:
        add(connection, "one")
        raise KeyError("after the first change")

    async def work() -> list[str]:
        with pytest.raises(KeyError):
            await database.write(fails)
        await database.write(lambda connection: add(connection, "two"))
        found = await database.read(ids)
        await database.close()
        return found

    assert done(work()) == ["two"]


def test_the_event_loop_goes_on_while_the_database_works() -> None:
    database = Database(None)

    async def work() -> None:
        gate = threading.Event()
        slow = asyncio.create_task(database.write(lambda connection: gate.wait(30)))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not slow.done()
        gate.set()
        await slow
        await database.close()

    done(work())


def test_work_of_a_caller_that_was_cancelled_is_finished() -> None:
    database = Database(None)

    def slow(connection: sqlite3.Connection) -> None:
        time.sleep(0.05)
        add(connection, "one")

    async def work() -> list[str]:
        task = asyncio.create_task(database.write(slow))
        await asyncio.sleep(0.01)
        task.cancel()
        return await database.read(ids)

    assert done(work()) == ["one"]


def test_a_waiting_call_is_made_although_its_caller_was_cancelled() -> None:
    database = Database(None)

    async def work() -> list[str]:
        gate = threading.Event()
        slow = asyncio.create_task(database.write(lambda connection: gate.wait(30)))
        waiting = asyncio.create_task(database.write(lambda connection: add(connection, "one")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        gate.set()
        await slow
        return await database.read(ids)

    assert done(work()) == ["one"]


def test_a_file_of_an_older_version_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = opened(tmp_path / "t.db")
    add(old, "one")
    old.close()
    later = "CREATE TABLE later (id TEXT);\nCREATE TRIGGER t AFTER DELETE ON later BEGIN\n DELETE FROM items; END;"
    monkeypatch.setattr(database_module, "VERSIONS", (*VERSIONS, later))
    new = opened(tmp_path / "t.db")
    assert new.execute("PRAGMA user_version").fetchone()[0] == len(VERSIONS) + 1
    assert new.execute("SELECT count(*) FROM later").fetchone()[0] == 0
    assert ids(new) == ["one"]
    new.close()
    monkeypatch.undo()
    with pytest.raises(
        StateFailed,
        match=f"has version {len(VERSIONS) + 1}, but this Tokenmill supports versions up to {len(VERSIONS)}",
    ):
        opened(tmp_path / "t.db")


def test_a_file_that_is_no_database_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StateFailed, match=r"t\.db can't be used: file is not a database"):
        done(Database(tmp_path / "t.db").read(ids))


def test_a_disk_of_another_machine_is_known_by_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
        f"23 22 0:50 / {tmp_path}/far rw,relatime shared:1 - nfs4 host:/export rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(database_module, "MOUNTS", tmp_path / "mountinfo")
    assert is_remote(tmp_path / "far" / "state" / "t.db")
    assert not is_remote(tmp_path / "near" / "t.db")


def test_where_nothing_can_be_written_the_state_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new" / "state"
    assert ServerState.of(ServerConfig(state_dir=folder)).folder == folder
    assert ServerState.of(ServerConfig(state=False)).folder is None
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        assert ServerState.of(ServerConfig(state_dir=folder)).folder is None
    assert f"{tmp_path} is not writable" in caplog.text


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_of_another_key_is_not_there() -> None:
    connection = opened(None)
    add(connection, "one", owner="me")
    assert get(connection, "responses", "one", "me")["id"] == "one"
    for row_id, owner in (("one", "you"), ("two", "me"), ("one", "")):
        with pytest.raises(UnknownRow, match=f"there is no response '{row_id}'"):
            get(connection, "responses", row_id, owner)


def test_a_row_that_expired_is_not_there_and_goes_with_its_items() -> None:
    connection = opened(None)
    add(connection, "old", expires_s=time.time() - 1)
    add(connection, "new", expires_s=time.time() + 100)
    assert find(connection, "responses", "old", "me") is None
    assert Bound("responses", 100, 1 << 20).expire(connection) == ["old"]
    assert ids(connection) == ["new"]
    assert [row["holder"] for row in connection.execute("SELECT holder FROM items")] == ["new"]


@pytest.mark.parametrize(("max_rows", "max_bytes"), [(10, 1 << 20), (100, 1 << 20), (1 << 20, 500), (1 << 20, 100)])
def test_a_full_table_gives_up_what_was_not_used_for_longest(max_rows: int, max_bytes: int) -> None:
    connection = opened(None)
    bound = Bound("responses", max_rows, max_bytes, KEPT)
    add(connection, "at work", status="in_progress", used_s=-1.0)
    most = 0
    for number in range(300):
        bound.make_room(connection, 10)
        add(connection, f"{number:03}", used_s=float(number))
        kept = ids(connection)
        assert len(kept) <= max_rows and len(kept) * 10 <= max_bytes
        assert kept == [f"{one:03}" for one in range(number - len(kept) + 2, number + 1)] + ["at work"]
        most = max(most, len(kept))
    assert most >= min(max_rows, max_bytes // 10) * 9 // 10  # and no more than it must


@pytest.mark.parametrize(("max_rows", "num_bytes"), [(100, 1), (1 << 20, 1000)])
def test_a_key_that_fills_a_table_loses_its_own_rows(max_rows: int, num_bytes: int) -> None:
    connection = opened(None)
    bound = Bound("responses", max_rows, 100_000, KEPT)
    for number in range(20):
        bound.make_room(connection, num_bytes)
        add(connection, f"mine {number:02}", owner="me", used_s=-1.0, num_bytes=num_bytes)
    for number in range(500):
        bound.make_room(connection, num_bytes)
        add(connection, f"flood {number:03}", owner="flood", used_s=float(number), num_bytes=num_bytes)
    assert sum(name.startswith("mine") for name in ids(connection)) == 20
    assert 60 <= len(ids(connection)) - 20 <= 80, "those of the other are not worth more than the place there is"
    for number in range(500):  # two that want all of it have about half each
        bound.make_room(connection, num_bytes)
        add(connection, f"mine too {number:03}", owner="me", used_s=float(number), num_bytes=num_bytes)
    assert 40 <= sum(name.startswith("mine") for name in ids(connection)) <= 60


def test_rows_that_are_at_work_are_never_given_up() -> None:
    connection = opened(None)
    bound = Bound("responses", 3, 1 << 20, KEPT)
    for number in range(3):
        bound.make_room(connection, 10)
        add(connection, str(number), status="queued")
    for _ in range(2):
        with pytest.raises(Overloaded, match="no room for more responses"):
            bound.make_room(connection, 10)
    assert len(ids(connection)) == 3


def test_a_file_shrinks_when_rows_go(tmp_path: Path) -> None:
    connection = opened(tmp_path / "t.db")
    bound = Bound("responses", 1 << 20, 1 << 20)
    for number in range(64):
        bound.make_room(connection, 1 << 16)
        add(connection, str(number), used_s=number, num_bytes=1 << 16)
        connection.execute("UPDATE responses SET body = ? WHERE id = ?", (os.urandom(1 << 16), str(number)))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / "t.db").stat().st_size < 1.5 * (1 << 20)


# ── servers ────────────────────────────────────────────────────────────────────────────────────────────

HOLDS_A_LOCK = """
import sys, time
from pathlib import Path
from tokenmill.server.state.instance import ServerInstance
one = ServerInstance(Path(sys.argv[1]))
one.enter()
print(one.id, flush=True)
time.sleep(60)
"""


def test_a_server_counts_as_alive_until_its_process_is_gone_even_by_kill_9(tmp_path: Path) -> None:
    mine = ServerInstance(tmp_path)
    mine.enter()
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_LOCK, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = other.stdout.readline().decode().strip()
        assert mine.is_alive(theirs) and mine.is_alive(mine.id)
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert not mine.is_alive(theirs)
    assert not mine.is_alive("server-never-was")
    assert [file.stem for file in tmp_path.iterdir()] == [mine.id]  # the lock of the dead one is gone
    mine.leave()
    assert list(tmp_path.iterdir()) == []
