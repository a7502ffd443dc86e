"""Heads without end, and heads that never end: refused, or the connection is closed, before anybody is known."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.loopback import CHAT, RunningServer, Serving
from tests.support.timing import SOON_S, eventually
from tokenmill.server import http_protocol
from tokenmill.types import TextPart

START = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


def answer_to(server: RunningServer, pieces: list[bytes]) -> bytes:
    """All that the server says until it closes the connection."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=SOON_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    "head",
    [
        START + b"".join(b"x-%d: y\r\n" % number for number in range(7_000)),
        START + b"x: " + b"y" * 70_000,
        b"GET /" + b"a" * 70_000,
    ],
    ids=["many headers", "a long one", "a long path"],
)
def test_endless_heads_are_refused(server: RunningServer, head: bytes) -> None:
    assert len(head) > http_protocol.MAX_HEAD_BYTES
    said = answer_to(server, [head])  # no more than is read: what is still on its way would be cut off with the answer
    assert said.startswith(b"HTTP/1.1 431") and b"head_too_large" in said
    assert server.get("/health").status_code == 200


def test_an_ordinary_head_and_a_large_body_pass(server: RunningServer) -> None:
    for _ in range(2):  # on one connection
        reply = server.http.post(
            f"{server.url}/tokenize", json={"prompt": "x" * 20_000, "more": "y" * 400_000}, headers={"x": "y" * 20_000}
        )
        assert reply.status_code == 200


def test_a_head_that_does_not_come_is_not_waited_for(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    began = time.monotonic()
    assert answer_to(server, [START]) == b"" and answer_to(server, []) == b""
    whole = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
    assert answer_to(server, [whole, START]).startswith(b"HTTP/1.1 200")
    assert answer_to(server, [whole + START]).startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /ping HTTP/1.1\r\nhost: x\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /ping HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d:\r\n" % i for i in range(1_000)) + b"\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"431"),
        (b"GET /ping\r\n\r\n", b"400"),
    ],
    ids=["a long one", "many headers", "a long path", "HTTP/0.9"],
)
def test_heads_that_come_whole_are_refused_too(server: RunningServer, head: bytes, status: bytes) -> None:
    assert answer_to(server, [head]).startswith(b"HTTP/1.1 " + status)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("is_whole", [False, True])
def test_headers_behind_a_body_are_bounded_and_not_kept(server: RunningServer, is_whole: bool) -> None:
    """Before this bound 64 MB of them took 1.5 GB of memory, whoever sent them."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = json.dumps(CHAT).encode()
    chunks = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    few = b"".join(b"x%d: y\r\n" % number for number in range(50)) + b"\r\n"
    last = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert answer_to(server, [head + chunks + few + last]).startswith(b"HTTP/1.1 200")
    many = b"".join(b"x%d: y\r\n" % number for number in range(1000)) + (b"\r\n" if is_whole else b"")
    assert answer_to(server, [head + chunks + many]).startswith(b"HTTP/1.1 431")
    for begun in (b"x: ", b"0;x="):  # the latter is part of a chunk's head
        whole = head + (chunks if begun == b"x: " else chunks.removesuffix(b"0\r\n")) + begun
        with contextlib.suppress(ConnectionError):  # closed before all was sent
            assert answer_to(server, [whole, b"y" * 1_000_000]).startswith(b"HTTP/1.1 431")
    assert server.get("/health").status_code == 200


def test_a_body_that_is_announced_too_large_is_refused_at_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = START + b"content-type: application/json\r\ncontent-length: 2000000000\r\n\r\n"
    began, parts = time.monotonic(), urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=SOON_S) as connection:
        connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")
        assert time.monotonic() - began < SOON_S
        monkeypatch.setattr(http_protocol, "MAX_UNREAD_BYTES", 100_000)
        with pytest.raises(OSError):  # what comes all the same is dropped, up to a limit
            while True:
                connection.sendall(b" " * 50_000)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_never_reads_is_given_up(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.3)
    server = serving()
    server.engine.parts = [TextPart("a word of many " * 20_000)] * 60  # more than the system's own buffers take
    body = json.dumps({**CHAT, "stream": is_stream}).encode()
    head = START + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    parts = urlsplit(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(head + body)
        assert eventually(lambda: len(server.engine.seen) == 1)
        assert eventually(lambda: not open_connections(server))
        assert eventually(lambda: not server.engine.running)


def open_connections(server: RunningServer) -> bool:
    """Return whether the server still holds the connection of a client that does not read."""
    port = urlsplit(server.url).port
    local = [one for one in psutil.Process().net_connections("tcp") if one.laddr and one.laddr.port == port]
    return any(one.status == psutil.CONN_ESTABLISHED for one in local)


def test_the_log_says_when_descriptors_run_out(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_protocol, "DESCRIPTOR_WATCH", http_protocol.DescriptorWatch())
    monkeypatch.setattr(http_protocol.resource, "getrlimit", lambda _: (20, 20))
    with caplog.at_level("ERROR"):
        for _ in range(3):
            assert answer_to(server, [b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"])
    assert len([one for one in caplog.records if "ulimit -n" in one.getMessage()]) == 1, "once, not for every client"
