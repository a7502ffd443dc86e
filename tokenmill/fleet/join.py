"""The front's side of machines that join a cluster: each becomes a place on which cores can be started.

    JoinListener     accepts machines with the key; runs as long as the engine
    HostPlace        one machine: its capacity, its link
    RemoteCoreClient the client of a core there, with the same interface as that of a local core

Cores fetch blocks from each other. Here cores on other machines have addresses `session:number`, which are reached over
the links (`block_relay.py`).

A machine whose connection is cut reconnects within seconds, and nothing is lost. If it does not, its cores count as
dead, and their requests continue on other cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import time
from dataclasses import replace
from pathlib import Path

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode

from tokenmill.config import EngineConfig
from tokenmill.config.cluster import MAX_REPLICAS, listen_address
from tokenmill.engine.core_client import CoreClient, Receive
from tokenmill.engine.messages import Beat, Failed, FromCore, Ready, Shutdown, ToCore
from tokenmill.engine.replicas import Replicas
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.block_relay import TARGET_SEPARATOR, Connect, LinkedStreams, Pipe, RelaySocket, joined_pipes
from tokenmill.fleet.link import (
    HANDSHAKE_S,
    MAX_FRAME,
    PING_S,
    PING_TIMEOUT_S,
    REFUSED,
    BlockBytes,
    CloseBlocks,
    CoreEnded,
    CoreMail,
    FromHost,
    Hello,
    HostInfo,
    LinkError,
    OpenBlocks,
    ReliableLink,
    StartCore,
    StopCore,
    ToHost,
    front_handshake,
)
from tokenmill.fleet.places import NoCapacity, Places
from tokenmill.observe.log import get_log
from tokenmill.version import VERSION

log = get_log("fleet")

AWAY_S = 15.0  # how long a machine may be disconnected before its cores count as dead
END_S = 5.0  # how long a core on another machine may take to end

_encoder = msgspec.msgpack.Encoder()
_from_host = msgspec.msgpack.Decoder(FromHost)
_from_core = msgspec.msgpack.Decoder(FromCore)


class RemoteCoreClient:
    """A core on another machine."""

    def __init__(self, number: int, place: HostPlace, config: EngineConfig) -> None:
        self._number = number
        self._place = place
        self._config = config
        self._receive: Receive | None = None
        self._heard_s = time.monotonic()
        self._has_ended = asyncio.Event()
        self._is_closing = False
        self.block_path = ""  # of its socket for blocks, on its machine

    async def start(self, receive: Receive) -> None:
        self._receive = receive
        self._place.send(StartCore(self._number, self._config, self._place.digest))

    def send(self, message: ToCore) -> None:
        if not self._has_ended.is_set():
            self._place.send(CoreMail(self._number, _encoder.encode(message)))

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def kill(self) -> None:
        self._place.send(StopCore(self._number, is_killed=True))

    async def close(self) -> None:
        """End the core and free its capacity. Does not wait for a machine whose connection is lost."""
        self._is_closing = True
        if not self._has_ended.is_set():
            self.send(Shutdown())
            self._place.send(StopCore(self._number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), END_S if self._place.is_connected else 0.0)
        self._place.leave(self._number)

    # ── from the place ─────────────────────────────────────────────────────────────────────────────────

    def note_mail(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        message = _from_core.decode(data)
        if isinstance(message, Ready) and message.info.block_address:
            self.block_path = message.info.block_address
            address = f"{self._place.session}:{self._number}"
            message = Ready(msgspec.structs.replace(message.info, block_address=address))
        if not isinstance(message, Beat):
            self._deliver(message)

    def note_end(self, ended: CoreEnded) -> None:
        if not self._has_ended.is_set():
            self._has_ended.set()
            self._deliver(Failed(f"{self._place.name}: {ended.how}", ended.hint, ended.exit_code))

    def _deliver(self, message: FromCore) -> None:
        if self._receive is not None and not self._is_closing:
            self._receive(message)


class HostPlace:
    """A machine that has joined."""

    def __init__(self, info: HostInfo, session: str, base: EngineConfig, digest: str, connect: Connect) -> None:
        """`base`: the settings of a core, which its host adapts to its machine. `digest`: of the model. `connect`:
        opens a pipe to another machine's core from which its cores fetch blocks."""
        self.name = info.name
        self.relay_path = info.relay
        self.session = session
        self.digest = digest
        self.link = ReliableLink(self._note)
        self.streams = LinkedStreams(self.link, self.send, connect, first=1)
        self.has_joined = False  # it was added to the places
        self.connection: ServerConnection | None = None
        self.away: asyncio.TimerHandle | None = None
        self._capacity = info.capacity
        self._base = base
        self._cores: dict[int, RemoteCoreClient] = {}
        self._numbers = itertools.count(1)

    @property
    def is_connected(self) -> bool:
        return self.connection is not None

    def num_free(self) -> int:
        return self._capacity - len(self._cores) if self.is_connected else 0

    def take(self, config: EngineConfig) -> CoreClient:
        if self.num_free() < 1:
            raise NoCapacity
        number = next(self._numbers)
        own = replace(self._base, parallel=config.parallel)
        client = self._cores[number] = RemoteCoreClient(number, self, own)
        return client

    def leave(self, number: int) -> None:
        self._cores.pop(number, None)

    def send(self, message: ToHost) -> None:
        self.link.send(_encoder.encode(message))

    def block_path(self, number: str) -> str:
        """Return the path of a core's block socket on its machine; empty if there is no such core."""
        core = self._cores.get(int(number)) if number.isdecimal() else None
        return "" if core is None else core.block_path

    def give_up(self, how: str) -> None:
        self.streams.close()
        for core in list(self._cores.values()):
            core.note_end(CoreEnded(0, how))

    def _note(self, data: bytes) -> None:
        try:
            message = _from_host.decode(data)
        except msgspec.DecodeError as problem:
            raise LinkError(f"{self.name} has sent an invalid message: {problem}") from None
        if isinstance(message, OpenBlocks | BlockBytes | CloseBlocks):
            self.streams.note(message)
            return
        core = self._cores.get(message.core)
        if core is None:  # it was dropped meanwhile
            return
        if isinstance(message, CoreMail):
            core.note_mail(message.data)
        else:
            core.note_end(message)


class JoinListener:
    """Accepts machines with the cluster's key."""

    def __init__(
        self,
        listen: str,
        key: bytes,
        places: Places,
        base: EngineConfig,
        digest: str,
        *,
        tls: tuple[Path, Path] | None = None,
        away_s: float = AWAY_S,
    ) -> None:
        self._address = listen_address(listen)
        self._key = key
        self._places = places
        self._base = base
        self._digest = digest
        self._tls = tls_context(tls)
        self._away_s = away_s
        self._hosts: dict[str, HostPlace] = {}
        self._expected: dict[str, asyncio.Future[HostPlace]] = {}
        self._server: Server | None = None
        self._replicas: Replicas | None = None
        self._relay_socket = RelaySocket(self._carry_blocks)
        self._carrying: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """The address and port it listens on."""
        assert self._server is not None
        return self._address[0], int(next(iter(self._server.sockets)).getsockname()[1])

    def expect(self, name: str) -> asyncio.Future[HostPlace]:
        """Return a future of the machine with this name, which is reserved for the caller once it has joined."""
        found = self._expected[name] = asyncio.get_running_loop().create_future()
        return found

    def forget(self, name: str) -> None:
        """Cancel the expectation of a machine."""
        self._expected.pop(name, None)

    # ── as the keeper of an engine ─────────────────────────────────────────────────────────────────────

    async def start(self, replicas: Replicas) -> None:
        self._replicas = replicas
        replicas.block_route = self.block_route
        if self._server is None:
            await self.listen()

    async def listen(self) -> None:
        """Start accepting machines."""
        host, port = self._address
        try:
            self._server = await serve(
                self._welcome,
                host,
                port,
                ssl=self._tls,
                compression=None,
                max_size=MAX_FRAME,
                open_timeout=HANDSHAKE_S,
                ping_interval=PING_S,
                ping_timeout=PING_TIMEOUT_S,
                server_header=None,
            )
        except OSError as problem:
            raise InvalidConfig(f"machines can't join at {host}:{port}: {problem.strerror or problem}") from None
        await self._relay_socket.open()
        log.info("other machines join with: tokenmill host --join %s://%s:%d", self.scheme, *self.address)

    @property
    def scheme(self) -> str:
        return "ws" if self._tls is None else "wss"

    def note_open(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        for place in self._hosts.values():
            if place.away is not None:
                place.away.cancel()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for place in self._hosts.values():
            place.streams.close()
        await self._relay_socket.close()

    def set_limits(self, min_replicas: int, max_replicas: int) -> bool:
        return False

    # ── machines ───────────────────────────────────────────────────────────────────────────────────────

    async def _welcome(self, connection: ServerConnection) -> None:
        """Serve one connection until it ends."""
        try:
            shaken = await asyncio.wait_for(front_handshake(connection, self._key, self._found), HANDSHAKE_S)
        except (LinkError, TimeoutError, WebSocketException) as problem:
            log.warning("a machine at %s was refused: %s", connection.remote_address, problem or "it sent no hello")
            await connection.close(REFUSED, "refused")
            return
        hello, link, sends, receives, came = shaken
        place = self._hosts[hello.session]
        if place.connection is not None:  # the machine has noticed before this side that it is dead
            await place.connection.close()
        place.connection = connection
        if place.away is not None:
            place.away.cancel()
            place.away = None
        if place.has_joined:
            log.info("%s has reconnected", place.name)
        else:
            place.has_joined = True
            log.info("%s has joined with room for %d replicas (%s)", place.name, hello.info.capacity, hello.info.device)
            self._let_in(place)
        try:
            await link.run(connection, sends, receives, came)
        except* (WebSocketException, LinkError, OSError) as problems:
            log.debug("the link to %s was cut: %s", place.name, problems.exceptions)
        finally:
            if place.connection is connection:
                self._note_cut(place, has_left=connection.close_code == CloseCode.NORMAL_CLOSURE)

    def _let_in(self, place: HostPlace) -> None:
        """Let a machine take part. If one of its name is away, its process has ended, and this is the next one."""
        for other in list(self._hosts.values()):
            if other.name == place.name and other.away is not None:
                other.away.cancel()
                self._lose(other)
        expected = self._expected.pop(place.name, None)
        if expected is None:
            self._places.add(place)
        elif not expected.done():
            expected.set_result(place)

    def _found(self, hello: Hello) -> tuple[ReliableLink, bool]:
        """Return the link of a machine that reconnects, or a new one."""
        if hello.info.version != VERSION:
            raise LinkError(f"{hello.info.name} runs version {hello.info.version}, this front runs {VERSION}")
        if not 1 <= hello.info.capacity <= MAX_REPLICAS:
            raise LinkError(f"{hello.info.name} offers an invalid capacity of {hello.info.capacity} replicas")
        known = self._hosts.get(hello.session)
        if known is not None:
            return known.link, True
        place = self._hosts[hello.session] = HostPlace(
            hello.info, hello.session, self._base, self._digest, self._block_pipe
        )
        return place.link, False

    def _note_cut(self, place: HostPlace, *, has_left: bool) -> None:
        """Wait for a machine whose connection was cut, but not for one that has closed it: it was told to end."""
        place.connection = None
        if has_left:
            self._lose(place)
            return
        log.warning("the link to %s was cut; its requests wait for %g s", place.name, self._away_s)
        place.away = asyncio.get_running_loop().call_later(self._away_s, self._lose, place)

    def _lose(self, place: HostPlace) -> None:
        log.error("%s has not reconnected: its engine processes count as dead", place.name)
        self._hosts.pop(place.session, None)
        self._places.remove(place)
        place.give_up("the machine was lost")

    # ── blocks ─────────────────────────────────────────────────────────────────────────────────────────

    def block_route(self, asking: str, source: str) -> str:
        """Return the address at which one core can reach another one's block socket, given the front's addresses of
        both; empty if it can't."""
        (here, _), (there, number) = _machine(asking), _machine(source)
        if here == there:
            return source if not there else self._hosts[there].block_path(number) if there in self._hosts else ""
        if not asking or not source or (here and here not in self._hosts):
            return ""
        relay = self._hosts[here].relay_path if here else self._relay_socket.path
        return f"{relay}{TARGET_SEPARATOR}{source}" if relay else ""

    async def _block_pipe(self, target: str) -> Pipe:
        """Open a pipe to the core from which another machine's core fetches blocks."""
        session, _ = _machine(target)
        if not session:
            assert self._replicas is not None
            if not any(one.is_ready and one.info.block_address == target for one in self._replicas.all):
                raise OSError("there is no such engine process on this machine")
            return await asyncio.open_unix_connection(target)
        one, other = await joined_pipes()
        task = asyncio.create_task(self._carry_blocks(target, other))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        return one

    async def _carry_blocks(self, target: str, pipe: Pipe) -> None:
        session, number = _machine(target)
        if (place := self._hosts.get(session)) is not None:
            await place.streams.carry(number, pipe)
        else:
            pipe[1].close()


def _machine(address: str) -> tuple[str, str]:
    """Split a core's address into its machine's session (empty for this machine) and its number there."""
    if address.startswith("/"):
        return "", ""
    session, _, number = address.partition(":")
    return session, number


def tls_context(tls: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*tls)
    except (OSError, ssl.SSLError) as problem:
        raise InvalidConfig(f"the certificate of [hosts] can't be used: {problem}", param="tls_cert") from None
    return context
