"""Pipeline stages on other machines, which join their core over TCP.

    core, stage 0: listens ◄── hello ───  tokenmill host --join tcp://core:8200
                           ── invite ──►  starts the other ranks of its stage, which say hello with the stage's ticket
                           ◄── port ────  each rank listens for the one in its place of the stage before
                           ── start ──►   connects to the one in its place of the stage behind
                           ═══ plans ═══►  stage 1 ══► stage 2 ══► ... ══► core

Both sides of a connection prove that they have the group's key (TOKENMILL_RANK_KEY). The data is not encrypted, so
ranks must be on a private network. A machine that stops responding is treated as lost after `TCP_TIMEOUT_MS`.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeVar

import msgspec

from tokenmill.errors import InvalidConfig, PeerDied
from tokenmill.observe.log import get_log
from tokenmill.parallel.stages import Mesh

log = get_log("ranks")

KEY_VARIABLE = "TOKENMILL_RANK_KEY"
MIN_KEY_BYTES = 16
JOIN_S = 120.0  # until all ranks have joined
HANDSHAKE_S = 10.0
TCP_TIMEOUT_MS = 5000  # without an acknowledgement of the other machine
MAX_MESSAGE = 1 << 10  # bytes of a hello
RANK, STREAM = b"rank", b"stream"  # kinds of connections


class RankHello(msgspec.Struct, frozen=True):
    """A rank's first message to its core: from a rank of an invited stage, or from the first rank of a new machine."""

    ticket: str = ""  # of its stage; empty: of a machine that has just joined
    place: int = 0  # index among the ranks of the stage


class StageInvite(msgspec.Struct, frozen=True):
    """The core's reply to a new machine: the ticket of its stage, and how the ranks of the stage meet."""

    ticket: str
    num_ranks: int
    file_bytes: int  # of the file that they share


class RankPort(msgspec.Struct, frozen=True):
    """The port of a rank's machine at which the same rank of the previous stage can connect."""

    port: int


@dataclass(frozen=True)
class JoinedRank:
    """A rank on another machine, before it knows what to load."""

    connection: Connection
    address: tuple[str, int]  # where the rank of the stage before may connect


def group_key() -> bytes:
    key = os.environ.get(KEY_VARIABLE, "").encode()
    if len(key) < MIN_KEY_BYTES:
        hint = f"set {KEY_VARIABLE} to the same {MIN_KEY_BYTES} characters or more on all machines"
        problem = "ranks on other machines need a key, and none is set"
        raise InvalidConfig(problem, param="stages_at", hint=hint)
    return key


def split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"{text!r} is not HOST:PORT", param="stages_at")
    return host.strip("[]"), int(port)


class RankListener:
    """A listening port that accepts authenticated connections of two kinds, RANK and STREAM."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise InvalidConfig(f"can't listen on {host}:{port}: {error.strerror}", param="stages_at") from None
        self.port: int = self._socket.getsockname()[1]

    def accept(self, kind: bytes, until_s: float) -> tuple[Connection, str]:
        """Return the next connection of this kind and the address of its machine; refuse connections without the
        key."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                accepted, address = self._socket.accept()
            except TimeoutError:
                break
            connection = _connection(accepted)
            with suppress(OSError, EOFError, AuthenticationError):
                if connection.poll(HANDSHAKE_S) and connection.recv_bytes(64) == kind:
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    return connection, str(address[0])
            connection.close()
        raise PeerDied(f"no {kind.decode()} has connected to port {self.port} within {JOIN_S:.0f} s")

    def close(self) -> None:
        self._socket.close()


def accept_stages(listener: RankListener, mesh: Mesh, file_bytes: int, until_s: float) -> dict[int, JoinedRank]:
    """Wait until a machine has joined for each later stage and has started its ranks; return them by rank."""
    found: dict[int, JoinedRank] = {}
    stages: dict[str, int] = {}  # by ticket
    while len(found) < mesh.size - mesh.tp:
        connection, machine = listener.accept(RANK, until_s)
        hello = _receive(connection, RankHello)
        if not hello.ticket and len(stages) < mesh.pp - 1:
            ticket = secrets.token_hex(16)
            stages[ticket] = len(stages) + 1
            connection.send_bytes(msgspec.msgpack.encode(StageInvite(ticket, mesh.tp, file_bytes)))
            hello = RankHello(ticket)
        rank = stages.get(hello.ticket, mesh.pp) * mesh.tp + hello.place
        is_expected = rank < mesh.size and rank not in found and 0 <= hello.place < mesh.tp
        if not is_expected:  # a surplus machine, or a rank of a group that has ended
            connection.close()
            continue
        found[rank] = JoinedRank(connection, (machine, _receive(connection, RankPort).port))
        log.info("rank %d of %d has joined from %s", rank, mesh.size, machine)
    return found


_Message = TypeVar("_Message", RankHello, RankPort, StageInvite)


def _receive(connection: Connection, kind: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(MAX_MESSAGE), type=kind)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise PeerDied(f"a rank ended before it had joined: {error}") from None


def send_hello(leader: Connection, hello: RankHello) -> StageInvite | None:
    """Send a rank's hello to the core; return its invitation to the first rank of a machine, None to others."""
    leader.send_bytes(msgspec.msgpack.encode(hello))
    return None if hello.ticket else _receive(leader, StageInvite)


def send_port(leader: Connection, port: int) -> None:
    leader.send_bytes(msgspec.msgpack.encode(RankPort(port)))


def connect(host: str, port: int, kind: bytes, key: bytes, until_s: float) -> Connection:
    """Connect to a listener; retry until `until_s`, since it may start listening later."""
    while True:
        try:
            connection = _connection(socket.create_connection((host, port), timeout=HANDSHAKE_S))
            connection.send_bytes(kind)
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return connection
        except AuthenticationError:
            raise InvalidConfig(f"{host}:{port} has a different key", param="stages_at") from None
        except (OSError, EOFError) as error:
            if time.monotonic() >= until_s:
                raise PeerDied(f"{host}:{port} can't be reached: {error}") from None
            threading.Event().wait(0.1)


def _connection(sock: socket.socket) -> Connection:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": TCP_TIMEOUT_MS}
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(sock.detach())


def call_when_closed(connection: Connection, callback: Callable[[], None]) -> None:
    """Call `callback` in a thread once the other end of a connection is closed; nothing is read from it."""
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLRDHUP)

    def watch() -> None:
        with suppress(OSError, ValueError):
            poller.poll()
        callback()

    threading.Thread(target=watch, name="rank-connection", daemon=True).start()


def hang_up(connection: Connection) -> None:
    """Shut down a connection that a thread polls: closing it alone would not end the connection before that thread."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def ring_ends(
    listener: RankListener, host: str, port: int, key: bytes, until_s: float
) -> tuple[Connection, Connection]:
    """Open the two connections of a rank in the ring of stages: accept one from the previous stage, and connect to the
    next stage at `host` and `port`. Both at the same time, otherwise the ranks of the ring would wait for each
    other."""
    accepted: list[Connection] = []

    def accept() -> None:
        with suppress(PeerDied, OSError):
            accepted.append(listener.accept(STREAM, until_s)[0])

    accepting = threading.Thread(target=accept, name="stage-before", daemon=True)
    accepting.start()
    behind = connect(host, port, STREAM, key, until_s)
    accepting.join()
    if not accepted:
        behind.close()
        raise PeerDied("the previous stage has not connected")
    return accepted[0], behind
