"""Heads without end, and heads that never end: refused, or the connection is closed, before anybody is known."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.support.loopback import RunningServer
from tests.support.timing import SOON_S
from tokenmill.server import http_protocol

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
