"""Ranks on other machines: those of later stages, which join their core over TCP.

    core, stage 0: listens ◄── hello ──  tokenmill host --join tcp://core:8200    listens for the stage before it
                           ── start ──►                                           connects to the stage behind it
                           ═══ plans ═══►  stage 1 ══► stage 2 ══► ... ══► core

Who connects proves that it has the group's key (TOKENMILL_RANK_KEY), and so does who listens; what follows is not
encrypted: ranks must be on a private network. A machine that goes silent is given up after seconds.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from tokenmill.errors import InvalidConfig, PeerDied

KEY_VARIABLE = "TOKENMILL_RANK_KEY"
MIN_KEY_BYTES = 16
JOIN_S = 120.0  # until all ranks are there
HANDSHAKE_S = 10.0
SILENCE_S = 5  # without an answer of the other machine
RANK, STREAM = b"rank", b"stream"  # what a connection is for


class RankHello(msgspec.Struct, frozen=True):
    """A rank's first word to its core: where the stage before it may connect, on the machine that it comes from."""

    port: int


def group_key() -> bytes:
    key = os.environ.get(KEY_VARIABLE, "").encode()
    if len(key) < MIN_KEY_BYTES:
        hint = f"set {KEY_VARIABLE} to the same {MIN_KEY_BYTES} characters or more on all machines"
        raise InvalidConfig("ranks of other machines join with a key, and there is none", param="stages_at", hint=hint)
    return key


def split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"{text!r} is no HOST:PORT", param="stages_at")
    return host.strip("[]"), int(port)


class RankListener:
    """A port at which others connect, each for one thing."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise InvalidConfig(f"{host}:{port} can't be listened at: {error.strerror}", param="stages_at") from None
        self.port: int = self._socket.getsockname()[1]

    def accept(self, kind: bytes, until_s: float) -> tuple[Connection, str]:
        """The next connection of this kind, and the machine that it comes from; those without the key are refused."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                accepted, place = self._socket.accept()
            except TimeoutError:
                break
            connection = _connection(accepted)
            with suppress(OSError, EOFError, AuthenticationError):
                if connection.poll(HANDSHAKE_S) and connection.recv_bytes(64) == kind:
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    return connection, str(place[0])
            connection.close()
        raise PeerDied(f"no {kind.decode()} has come to port {self.port} within {JOIN_S:.0f} s")

    def close(self) -> None:
        self._socket.close()


def connect(host: str, port: int, kind: bytes, key: bytes, until_s: float) -> Connection:
    """Connect to a listener, which may open a little later."""
    while True:
        try:
            connection = _connection(socket.create_connection((host, port), timeout=HANDSHAKE_S))
            connection.send_bytes(kind)
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return connection
        except AuthenticationError:
            raise InvalidConfig(f"{host}:{port} has another key", param="stages_at") from None
        except (OSError, EOFError) as error:
            if time.monotonic() >= until_s:
                raise PeerDied(f"{host}:{port} can't be reached: {error}") from None
            threading.Event().wait(0.1)


def _connection(found: socket.socket) -> Connection:
    found.settimeout(None)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(found.detach())


def when_closed(connection: Connection, tell: Callable[[], None]) -> None:
    """Call `tell` in a thread once the other end of a connection is gone; nothing is read from it."""
    watching = select.poll()
    watching.register(connection.fileno(), select.POLLRDHUP)

    def watch() -> None:
        with suppress(OSError, ValueError):
            watching.poll()
        tell()

    threading.Thread(target=watch, name="rank-connection", daemon=True).start()


def hang_up(connection: Connection) -> None:
    """End a connection that a thread watches: closing alone would wait for that thread."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as found:
        found.shutdown(socket.SHUT_RDWR)


def ring_ends(
    listener: RankListener, host: str, port: int, key: bytes, until_s: float
) -> tuple[Connection, Connection]:
    """Open the two connections of a rank in the ring of stages: the stage before connects here, this one connects to
    the next stage at `host` and `port`. Both at the same time, or the ranks of the ring would wait for each other."""
    came: list[Connection] = []

    def accept() -> None:
        with suppress(PeerDied, OSError):
            came.append(listener.accept(STREAM, until_s)[0])

    accepting = threading.Thread(target=accept, name="stage-before", daemon=True)
    accepting.start()
    behind = connect(host, port, STREAM, key, until_s)
    accepting.join()
    if not came:
        behind.close()
        raise PeerDied("the stage before this one has not connected")
    return came[0], behind
