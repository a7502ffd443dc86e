"""A link between a front and another machine that loses nothing when its connection is cut.

    front                                              host
      challenge: nonce ───────────────────────────────►
      ◄─────────────── hello: nonce, proof, what it is, session, how many frames it has received
      welcome: proof, how many frames were received ───►
      frame 1, 2, 3, …  ◄────────────────────────────►  frame 1, 2, 3, …

Both sides have a key and prove it without sending it: the proof is a keyed hash of both nonces. Every frame carries a
keyed hash too, over its number and its direction, with a key of this connection only, so an attacker can't change,
repeat or insert frames, with or without TLS. (Without TLS an attacker can read them: token ids and KV blocks, never
text.)

Frames are numbered. Each side keeps sent frames until the other acknowledges them. After a cut the host reconnects,
both sides exchange how many frames they have received, and the rest is sent again: the link's users see only a pause.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import struct
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig, TokenmillError

MIN_KEY = 16  # characters
NONCE = 16  # bytes
MAC = 16
HEADER = struct.Struct("<QQ")  # number of the frame (0: only an acknowledgement), number of the last received frame
ACK_EVERY = 32  # frames
ACK_S = 0.5
MAX_FRAME = 256 << 20
MAX_UNACKNOWLEDGED = 64  # frames, beyond which senders of bulk data wait
HANDSHAKE_S = 20.0
PING_S = 2.0
PING_TIMEOUT_S = 10.0  # without a reply to a ping: the connection is dead
PROTOCOL = 1
REFUSED = 4403  # close code of a refused connection


class LinkError(TokenmillError):
    """The other side does not have the key, or violates the protocol."""

    code = "link_refused"
    http_status = 403


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────


class Challenge(msgspec.Struct, frozen=True):
    nonce: bytes
    protocol: int = PROTOCOL


class HostInfo(msgspec.Struct, frozen=True):
    """A machine that offers to run cores."""

    name: str
    capacity: int
    device: str
    version: str
    relay: str = ""  # the socket at which its cores request blocks of cores on other machines


class Hello(msgspec.Struct, frozen=True):
    nonce: bytes
    proof: bytes
    info: HostInfo
    session: str
    num_received: int


class Welcome(msgspec.Struct, frozen=True):
    proof: bytes
    is_known: bool  # False: the front does not know the session, so both sides start from frame 1
    num_received: int


class StartCore(msgspec.Struct, frozen=True, tag=True):
    """Message to a host: start a core for this model."""

    core: int
    config: EngineConfig
    digest: str  # of the model's files: the host's must be the same


class StopCore(msgspec.Struct, frozen=True, tag=True):
    core: int
    is_killed: bool = False


class CoreMail(msgspec.Struct, frozen=True, tag=True):
    """A message to or from a core, encoded as on a local pipe."""

    core: int
    data: bytes


class CoreEnded(msgspec.Struct, frozen=True, tag=True):
    core: int
    how: str
    hint: str | None = None
    exit_code: int = 1


class OpenBlocks(msgspec.Struct, frozen=True, tag=True):
    """Open a stream of blocks to a core on the other side (`block_relay.py`). The opening side chooses the number: a
    machine even numbers, the front odd ones."""

    stream: int
    target: str


class BlockBytes(msgspec.Struct, frozen=True, tag=True):
    stream: int
    data: bytes


class CloseBlocks(msgspec.Struct, frozen=True, tag=True):
    stream: int


StreamMessage = OpenBlocks | BlockBytes | CloseBlocks
ToHost = StartCore | StopCore | CoreMail | StreamMessage
FromHost = CoreMail | CoreEnded | StreamMessage


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_key(path: Path | None, variable: str | None) -> bytes:
    """Read the key of a cluster from a file or a variable's value; refuse a missing or short key."""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise InvalidConfig(f"the cluster's key {path} can't be read: {problem}", param="key_file") from None
    else:
        text = (variable or "").strip()
    if not text:
        raise InvalidConfig(
            "a cluster needs a key that all its machines have",
            param="key_file",
            hint="set --key-file, or TOKENMILL_CLUSTER_KEY",
        )
    if len(text) < MIN_KEY:
        raise InvalidConfig(f"the cluster's key must have at least {MIN_KEY} characters", param="key_file")
    return blake2b(text.encode(), digest_size=32, person=b"cluster key").digest()


def proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return blake2b(b"".join(nonces), key=key, digest_size=32, person=who).digest()


class Seal:
    """The keyed hash of one direction of one connection."""

    def __init__(self, key: bytes, nonces: bytes, direction: bytes) -> None:
        self._key = blake2b(nonces, key=key, digest_size=32, person=direction).digest()

    def sealed(self, body: bytes) -> bytes:
        return blake2b(body, key=self._key, digest_size=MAC).digest() + body

    def opened(self, frame: bytes) -> bytes:
        body = frame[MAC:]
        if not hmac.compare_digest(blake2b(body, key=self._key, digest_size=MAC).digest(), frame[:MAC]):
            raise LinkError("a frame of the link was altered in transit")
        return body


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────


class LinkConnection(Protocol):
    """The methods of a websocket that a link uses."""

    async def send(self, message: bytes) -> None: ...
    async def recv(self) -> str | bytes: ...
    async def close(self) -> None: ...


class ReliableLink:
    """One side of a link, which persists across connections."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        """`deliver` is called with each message of the other side, once and in order."""
        self.num_received = 0
        self._deliver = deliver
        self._num_sent = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._acknowledged = 0  # received frames that were acknowledged to the other side
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._wake = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()

    async def wait_for_capacity(self) -> None:
        """Wait while many frames are unacknowledged; for senders of bulk data."""
        await self._has_capacity.wait()

    def send(self, data: bytes) -> None:
        """Send a message, and resend it after each cut until the other side has received it."""
        self._num_sent += 1
        entry = (self._num_sent, data)
        self._unacknowledged.append(entry)
        if len(self._unacknowledged) >= MAX_UNACKNOWLEDGED:
            self._has_capacity.clear()
        self._outgoing.append(entry)
        self._wake.set()

    async def run(self, connection: LinkConnection, sends: Seal, receives: Seal, num_acknowledged: int) -> None:
        """Transfer frames over a connection until it ends. `num_acknowledged`: frames that the other side has already
        received."""
        if not self._num_sent - len(self._unacknowledged) <= num_acknowledged <= self._num_sent:
            raise LinkError("the other side of the link acknowledges frames that were never sent")
        self._note_acknowledged(num_acknowledged)
        self._outgoing = deque(self._unacknowledged)
        self._wake.set()
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(connection, sends))
            try:
                await self._read(connection, receives)
            finally:
                writing.cancel()

    async def _write(self, connection: LinkConnection, seal: Seal) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._outgoing:
                number, data = self._outgoing.popleft()
                await connection.send(seal.sealed(self._header(number) + data))
            self._wake.clear()
            timer = loop.call_later(ACK_S, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            if not self._outgoing and self._acknowledged < self.num_received:
                await connection.send(seal.sealed(self._header(0)))

    def _header(self, number: int) -> bytes:
        self._acknowledged = self.num_received
        return HEADER.pack(number, self.num_received)

    async def _read(self, connection: LinkConnection, seal: Seal) -> None:
        while True:
            frame = await connection.recv()
            if not isinstance(frame, bytes) or len(frame) < MAC + HEADER.size:
                raise LinkError("the other side of the link has sent an invalid frame")
            body = seal.opened(frame)
            number, num_acknowledged = HEADER.unpack_from(body)
            self._note_acknowledged(num_acknowledged)
            if number == 0 or number <= self.num_received:
                continue
            if number != self.num_received + 1:
                raise LinkError("frames of the link are missing")
            self.num_received = number
            self._deliver(body[HEADER.size :])
            if self.num_received - self._acknowledged >= ACK_EVERY:
                self._wake.set()

    def _note_acknowledged(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()
        if len(self._unacknowledged) < MAX_UNACKNOWLEDGED:
            self._has_capacity.set()


# ── handshakes ───────────────────────────────────────────────────────────────────────────────────────────


async def _received(connection: LinkConnection, kind: type[msgspec.Struct]) -> msgspec.Struct:
    data = await connection.recv()
    try:
        return msgspec.msgpack.decode(data if isinstance(data, bytes) else b"", type=kind)
    except msgspec.DecodeError:
        raise LinkError("the other side has sent an invalid handshake") from None


async def front_handshake(
    connection: LinkConnection, key: bytes, find: Callable[[Hello], tuple[ReliableLink, bool]]
) -> tuple[Hello, ReliableLink, Seal, Seal, int]:
    """Authenticate a host and this front to each other. `find` returns the host's link, and whether it continues an
    earlier one."""
    ours = os.urandom(NONCE)
    await connection.send(msgspec.msgpack.encode(Challenge(ours)))
    hello = await _received(connection, Hello)
    assert isinstance(hello, Hello)
    if len(hello.nonce) != NONCE or not hmac.compare_digest(hello.proof, proof(key, b"host", ours, hello.nonce)):
        raise LinkError("a machine without the cluster's key tried to join")
    link, is_known = find(hello)
    welcome = Welcome(proof(key, b"front", hello.nonce, ours), is_known, link.num_received if is_known else 0)
    await connection.send(msgspec.msgpack.encode(welcome))
    nonces = ours + hello.nonce
    num_acknowledged = hello.num_received if is_known else 0
    return hello, link, Seal(key, nonces, b"to host"), Seal(key, nonces, b"to front"), num_acknowledged


async def host_handshake(
    connection: LinkConnection, key: bytes, info: HostInfo, session: str, num_received: int
) -> tuple[Welcome, Seal, Seal]:
    """Authenticate this host and a front to each other."""
    challenge = await _received(connection, Challenge)
    assert isinstance(challenge, Challenge)
    if challenge.protocol != PROTOCOL or len(challenge.nonce) != NONCE:
        raise LinkError(f"the front uses version {challenge.protocol} of the link, this host version {PROTOCOL}")
    ours = os.urandom(NONCE)
    hello = Hello(ours, proof(key, b"host", challenge.nonce, ours), info, session, num_received)
    await connection.send(msgspec.msgpack.encode(hello))
    welcome = await _received(connection, Welcome)
    assert isinstance(welcome, Welcome)
    if not hmac.compare_digest(welcome.proof, proof(key, b"front", ours, challenge.nonce)):
        raise LinkError("the front does not have the cluster's key")
    nonces = challenge.nonce + ours
    return welcome, Seal(key, nonces, b"to front"), Seal(key, nonces, b"to host")
