"""Clients that offer other protocols, talk on while they are answered, leave behind a queue, or speak HTTP/1.0."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import orjson
import pytest

from tests.support.fake_engine import STORY
from tests.support.loopback import RunningServer
from tests.support.timing import eventually
from tokenmill.server import body as request_body
from tokenmill.server import http_protocol

CHAT = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hi"}]}
JAVA = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


def request(body: dict[str, object], extra: str = "", version: str = "1.1") -> bytes:
    content = orjson.dumps(body)
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def connection_to(server: RunningServer) -> Iterator[socket.socket]:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        yield connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Up to `end`; everything until the server closes when that is empty."""
    said = b""
    while not end or end not in said:
        piece = connection.recv(1 << 16)
        if not piece:
            assert not end, said
            break
        said += piece
    return said


@pytest.mark.parametrize("in_two", [True, False], ids=["body later", "in one piece"])
@pytest.mark.parametrize("offer", [JAVA, "Connection: upgrade\r\nUpgrade: websocket\r\n"], ids=["h2c", "websocket"])
def test_offers_of_other_protocols_are_declined(server: RunningServer, offer: str, in_two: bool) -> None:
    asked = request(CHAT, offer)
    border = asked.index(b"\r\n\r\n") + 4 if in_two else len(asked)
    with connection_to(server) as connection:
        for _ in range(2):  # on one connection
            connection.sendall(asked[:border])
            assert server.get("/ping").status_code == 200  # the first piece was read
            connection.sendall(asked[border:])
            said = read_until(connection, b'"usage"')
            assert said.startswith(b"HTTP/1.1 200") and b"Once upon" in said


def test_offers_may_be_queued(server: RunningServer) -> None:
    with connection_to(server) as connection:
        connection.sendall(request(CHAT, JAVA) * 3 + request(CHAT, "Connection: close\r\n"))
        assert read_until(connection, b"").count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_with_requests_in_the_queue_is_noticed(server: RunningServer, stream: bool) -> None:
    server.engine.delay_s = 0.2
    with connection_to(server) as connection:
        connection.sendall(request({**CHAT, "stream": stream}) * 3)
        assert eventually(lambda: len(server.engine.running) == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets
    assert eventually(lambda: len(server.engine.aborted) == 1) and server.engine.running == {}
    assert len(server.engine.seen) == 1


@pytest.mark.parametrize("rest", [b"GARBAGE\r\n\r\n", b"GET /" + b"a" * 70_000], ids=["no HTTP", "an endless head"])
def test_nothing_comes_into_an_answer(server: RunningServer, rest: bytes) -> None:
    server.engine.delay_s = 0.02
    with connection_to(server) as connection:
        connection.sendall(request({**CHAT, "stream": True}))
        said = read_until(connection, b"data:")
        connection.sendall(rest)
        said += read_until(connection, b"")
    assert said.count(b"HTTP/1.1") == 1 and said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_line_break_after_the_body_starts_no_clock(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.engine.delay_s = 0.02
    with connection_to(server) as connection:
        connection.sendall(request({**CHAT, "stream": True}))
        read_until(connection, b"data:")
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
        connection.sendall(b"\r\n")
        read_until(connection, b"[DONE]")


def test_the_rest_of_a_refused_body_is_not_waited_for(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connection_to(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
        assert read_until(connection, b"unsupported_media_type")
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
        connection.sendall(b"x")
        read_until(connection, b"")


def test_all_bodies_together_are_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_RECEIVING_BYTES", 200_000)
    large, small = {"prompt": "Hi", "more": "x" * 100_000}, {"prompt": "Hi"}
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 400000\r\n\r\n"
    assert server.post("/tokenize", large).status_code == 200
    with connection_to(server) as connection:
        connection.sendall(head + b" " * 150_000)
        assert eventually(lambda: server.post("/tokenize", large).status_code == 429)
        refused = server.post("/tokenize", large)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded" and refused.headers["retry-after"] == "2"
        assert server.post("/tokenize", small).status_code == 200
    assert eventually(lambda: server.post("/tokenize", large).status_code == 200)


def test_who_asks_before_sending_too_much_is_told_so(server: RunningServer) -> None:
    with connection_to(server) as connection:
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        connection.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
        assert read_until(connection, b"body_too_large").startswith(b"HTTP/1.1 413")


def test_http_1_0_gets_no_chunks(server: RunningServer) -> None:
    with connection_to(server) as connection:
        connection.sendall(request({**CHAT, "stream": True}, version="1.0"))
        head, _, body = read_until(connection, b"").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    *events, done, nothing = body.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    texts = [orjson.loads(one.removeprefix(b"data: "))["choices"][0]["delta"].get("content") for one in events]
    assert "".join(text or "" for text in texts) == STORY


def test_http_1_0_with_a_length(server: RunningServer) -> None:
    with connection_to(server) as connection:
        connection.sendall(request(CHAT, version="1.0"))
        head, _, body = read_until(connection, b"").partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head and orjson.loads(body)["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "http://"),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", "not valid"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not valid"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", "not valid"),
    ],
    ids=["TLS", "a tunnel", "HTTP/2", "a wrong chunk"],
)
def test_what_is_not_http_gets_a_readable_answer(server: RunningServer, sent: bytes, word: str) -> None:
    with connection_to(server) as connection:
        connection.sendall(sent)
        head, _, body = read_until(connection, b"").rpartition(b"\r\n\r\n")
    error = orjson.loads(body)["error"]
    assert b"HTTP/1.1 400" in head and error["code"] == "unreadable_request" and word in error["message"]
