"""OpenAI's Files with the real openai package, and uploads that are wrong, too large, slow or another key's."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import select
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.loopback import RunningServer, Serving
from tests.support.timing import SOON_S
from tokenmill.config.server import ServerConfig
from tokenmill.server.state import files as files_module
from tokenmill.server.state.files import StoredFiles
from tokenmill.server.state.rows import UnknownRow
from tokenmill.server.state.server_state import ServerState

LINES = b'{"custom_id": "a"}\n' * 3


def test_a_file_comes_back_as_it_was_sent(client: openai.OpenAI) -> None:
    sent = client.files.create(file=("../../etc/passwd", LINES), purpose="batch")
    assert (sent.object, sent.bytes, sent.purpose, sent.status) == ("file", len(LINES), "batch", "processed")
    assert sent.filename == "../../etc/passwd" and sent.id.startswith("file-")
    assert sent.expires_at is not None and sent.expires_at - sent.created_at == 30 * 86_400
    assert client.files.retrieve(sent.id) == sent
    assert client.files.content(sent.id).read() == LINES
    deleted = client.files.delete(sent.id)
    assert deleted.deleted and deleted.id == sent.id
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(sent.id)


def test_lists_have_pages_purposes_and_an_order(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=("lists",)))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="lists", max_retries=0) as client:
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        sent = [client.files.create(file=b"x", purpose="user_data", expires_after=expiry).id for _ in range(3)]
        kept = client.files.create(file=b"x", purpose="assistants")
        assert kept.expires_at is None
        assert [file.id for file in client.files.list(limit=2)] == [kept.id, *reversed(sent)], "over all pages"
        first = client.files.list(limit=2)
        assert len(first.data) == 2 and first.has_more
        assert [file.id for file in client.files.list(purpose="user_data", order="asc")] == sent
        with pytest.raises(openai.BadRequestError, match="after is not in this list"):
            client.files.list(after="file-x")


def test_a_file_belongs_to_its_key(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=("one", "two")))
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    with one, two:
        sent = one.files.create(file=b"mine", purpose="user_data")
        assert list(two.files.list()) == []
        for ask in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(sent.id)
        assert one.files.content(sent.id).read() == b"mine"


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "batch"}, None, None),
        ({"purpose": "fine-tune"}, {"file": b"x"}, "purpose"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch"}, {"document": b"x"}, "file"),
        ({"purpose": "batch"}, [("file", b"x"), ("file", b"y")], "file"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, {"file": b"x"}, "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            {"file": b"x"},
            "expires_after[seconds]",
        ),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "123456789 seconds"},
            {"file": b"x"},
            "expires_after[seconds]",
        ),
        ({"purpose": "x" * 20_000}, {"file": b"x"}, "purpose"),
    ],
)
def test_wrong_uploads_are_refused_by_name(server: RunningServer, data: Any, files: Any, param: str | None) -> None:
    if files is None:  # no file at all: httpx would send a plain form
        files = [("purpose", (None, "batch"))]
        data, param = {}, "file"
    reply = server.http.post(f"{server.url}/v1/files", data=data, files=files)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_limits_of_many_digits_are_refused(server: RunningServer) -> None:
    for path, limit in (("/v1/files", "9" * 5000), ("/v1/files", "000000001" + "9" * 5000), ("/v1/batches", "0" * 9)):
        reply = server.get(f"{path}?limit={limit}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")


def test_bodies_that_are_no_form(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{server.url}/v1/files"
    assert server.http.post(url, json={"purpose": "batch"}).status_code == 415
    form = {"content-type": "multipart/form-data; boundary=b"}
    packed = server.http.post(url, content=b"x", headers={**form, "content-encoding": "gzip"})
    assert packed.status_code == 415 and "compressed" in packed.text
    whole = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n'
    for body in (b"", b"--b", b"nonsense", whole[:-10], whole.replace(b"content-disposition", b"x")):
        reply = server.http.post(url, content=body, headers=form)
        assert reply.status_code == 400, body
    assert server.http.post(url, content=whole, headers=form).json()["error"]["param"] == "purpose"
    assert not [one for one in caplog.records if one.name.startswith("python_multipart")], "or anyone fills the log"


def test_what_is_too_large_is_refused_and_leaves_nothing(serving: Serving, tmp_path: Path) -> None:
    server = serving(ServerConfig(max_file_bytes=1000, state_dir=tmp_path))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        assert client.files.create(file=b"x" * 1000, purpose="batch").bytes == 1000
        for size in (1001, 3 << 20):  # found out while it comes, and known from its announced length
            with pytest.raises(openai.APIStatusError) as refused:
                client.files.create(file=b"x" * size, purpose="batch")
            assert refused.value.status_code == 413
    assert [path.stat().st_size for path in (tmp_path / "files").iterdir()] == [1000]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "files").iterdir())


def test_a_full_disk_is_told_and_leaves_nothing(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server = serving(ServerConfig(state_dir=tmp_path))
    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(os, "fsync", full)
        upload = {"file": ("a", b"x" * 1000)}
        refused = httpx.post(f"{server.url}/v1/files", files=upload, data={"purpose": "user_data"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "state_unavailable")
    assert os.strerror(errno.ENOSPC) in refused.json()["error"]["message"]
    assert list((tmp_path / "files").iterdir()) == []


def test_a_client_that_stalls_or_leaves_holds_nothing(serving: Serving, tmp_path: Path) -> None:
    server = serving(ServerConfig(body_timeout_s=0.2, state_dir=tmp_path))
    port = httpx.URL(server.url).port
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        b'content-length: 5000\r\n\r\n--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nabc'
    )
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(head)
        assert b" 408 " in slow.recv(1000)
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(head)
    deadline = time.monotonic() + SOON_S
    while any((tmp_path / "files").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_old_files_and_abandoned_uploads_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        files = StoredFiles(ServerState(tmp_path), 1 << 20)
        writer = files.writer()
        await writer.add(b"abc")
        row = await files.keep(writer, "me", name="n", purpose="batch", expires_s=time.time() + 3600.0)
        assert row["sha256"] == hashlib.sha256(b"abc").hexdigest()
        stays, abandoned = files.writer(), files.writer()
        kept = await files.keep(stays, "me", name="n", purpose="user_data", expires_s=None)
        abandoned.write(b"half")
        abandoned._file.close()
        end = ("UPDATE files SET expires_s = 1.0 WHERE id = ?", (row["id"],))
        await files._state.database.write(lambda connection: connection.execute(*end))
        monkeypatch.setattr(files_module, "STALE_S", -3600.0)  # as if an hour had passed
        await files.sweep()
        assert [path.name for path in files.folder.iterdir()] == [kept["id"]]
        await files._state.close()

    asyncio.run(work())


def test_a_file_deleted_while_it_is_asked_for_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        files = StoredFiles(ServerState(tmp_path), 1 << 20)
        writer = files.writer()
        await writer.add(b"abc")
        row = await files.keep(writer, "me", name="n", purpose="batch", expires_s=None)
        content = await files.open("me", row["id"])

        async def use_then_delete(owner: str, file_id: str) -> Any:
            await files.delete(owner, file_id)
            return row

        monkeypatch.setattr(files, "use", use_then_delete)
        with pytest.raises(UnknownRow, match="there is no file"):
            await files.open("me", row["id"])
        with content:
            assert content.read() == b"abc", "whoever has opened it reads all of it"
        await files._state.close()

    asyncio.run(work())


def test_least_used_files_make_room(tmp_path: Path) -> None:
    async def work() -> None:
        files = StoredFiles(ServerState(tmp_path), 1000)
        ids = []
        for _ in range(4):
            writer = files.writer()
            await writer.add(b"x" * 300)
            ids.append((await files.keep(writer, "me", name="n", purpose="batch", expires_s=None))["id"])
        assert sorted(path.name for path in files.folder.iterdir()) == sorted(ids[-3:])
        await files._state.close()

    asyncio.run(work())


def test_uploads_at_the_same_time_are_bounded(server: RunningServer) -> None:
    port = httpx.URL(server.url).port
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(17)]
    try:
        for one in sockets:
            one.sendall(head + b"content-length: 99\r\n\r\n")
        answered, _, _ = select.select(sockets, [], [], 5)
        assert len(answered) == 1 and b" 429 " in answered[0].recv(100)
    finally:
        for one in sockets:
            one.close()


def test_web_pages_of_others_can_not_send_files(serving: Serving) -> None:
    server = serving(ServerConfig(cors_origin=("https://friend.example",)))

    def status(origin: str) -> int:
        form: Any = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
        return server.http.post(f"{server.url}/v1/files", headers={"origin": origin}, **form).status_code

    assert status("https://evil.example") == status("null") == 403
    assert status("https://friend.example") == status(server.url) == 200
