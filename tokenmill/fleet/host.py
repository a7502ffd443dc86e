"""A machine that runs cores for a front on another machine: `tokenmill host --join ws://front:8100`.

It connects to the front, so no port is open on this machine. The front sends the model and the cores to start; each
core is a process as on the front's machine, and its messages are forwarded unchanged. The model's files must be the
same on both machines: the front sends a digest of its files.

When the connection is cut, the cores continue, and their messages are kept and sent after a reconnect. After a minute
without the front the cores are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidURI, WebSocketException

from tokenmill.arch.read import read_spec
from tokenmill.config import EngineConfig
from tokenmill.engine.core_client import ProcessCoreClient, Receive, start_core_process
from tokenmill.engine.core_process import block_socket
from tokenmill.engine.messages import Failed, FromCore
from tokenmill.errors import InvalidConfig, TokenmillError
from tokenmill.fleet.block_relay import LinkedStreams, Pipe, RelaySocket
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
    HostInfo,
    LinkError,
    OpenBlocks,
    ReliableLink,
    Seal,
    StartCore,
    StopCore,
    StreamMessage,
    ToHost,
    Welcome,
    host_handshake,
)
from tokenmill.observe.log import get_log
from tokenmill.store import is_scripted, resolve_model
from tokenmill.version import VERSION

log = get_log("host")

ALONE_S = 60.0  # without the front, before the cores are ended
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # between attempts to reconnect
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")

Fit = Callable[[EngineConfig, Path], EngineConfig]  # settings for this machine: threads, KV pool
_encoder = msgspec.msgpack.Encoder()
_to_host = msgspec.msgpack.Decoder(ToHost)


def model_digest(config: EngineConfig, path: Path) -> str:
    """Return a digest of what must be equal on two machines for the same tokens: version, architecture, sizes of the
    weight files."""
    found = hashlib.sha256(VERSION.encode())
    if is_scripted(config.model.model):
        found.update(path.read_bytes())
        return found.hexdigest()
    found.update(repr(read_spec(path)).encode())
    files = [path] if path.is_file() else sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
    for file in files:
        found.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size}\n".encode())
    return found.hexdigest()


def is_front_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("ws", "wss") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, or too large
        return False


class RelayedCoreClient(ProcessCoreClient):
    """A client of a core process that forwards the core's messages without decoding them."""

    def __init__(self, config: EngineConfig, path: Path, forward: Callable[[bytes], None]) -> None:
        super().__init__(config, path, start_core_process(config))
        self._forward = forward

    @property
    def block_address(self) -> str:
        """The path of the socket at which the core serves blocks to other cores."""
        assert self._child is not None
        return block_socket(self._child.folder)

    def _dispatch(self, data: bytes, receive: Receive) -> None:
        self._forward(data)


class HostAgent:
    """Runs cores for a front."""

    def __init__(
        self,
        url: str,
        key: bytes,
        info: HostInfo,
        fit: Fit,
        *,
        tls: ssl.SSLContext | None = None,
        alone_s: float = ALONE_S,
    ) -> None:
        """`fit`: adapts the settings of a core to this machine."""
        if not is_front_address(url):
            raise InvalidConfig(f"{url!r} is not the address of a front", param="join", hint="use ws://front:8100")
        self._url = url
        self._key = key
        self._info = info
        self._fit = fit
        self._tls = tls if url.startswith("wss://") else None
        self._alone_s = alone_s
        self._reset_session()
        self._relay_socket = RelaySocket(lambda target, pipe: self._streams.carry(target, pipe))
        self._cores: dict[int, RelayedCoreClient] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def _reset_session(self) -> None:
        self._session = secrets.token_hex(16)
        self._reset_link()

    def _reset_link(self) -> None:
        self._link = ReliableLink(self._handle)
        self._streams = LinkedStreams(self._link, self._send, self._block_pipe, first=2)

    async def run(self) -> None:
        """Serve the front until cancelled; raise `LinkError` if it refuses this machine."""
        pause_s, left_s = FIRST_PAUSE_S, None
        loop = asyncio.get_running_loop()
        await self._relay_socket.open()
        self._info = msgspec.structs.replace(self._info, relay=self._relay_socket.path)
        try:
            while True:
                try:
                    await self._connect()
                    pause_s = FIRST_PAUSE_S
                except (OSError, WebSocketException, TimeoutError) as problem:
                    log.info("%s can't be reached: %s", self._url, problem)
                left_s = loop.time() if left_s is None or pause_s == FIRST_PAUSE_S else left_s
                if self._cores and loop.time() - left_s >= self._alone_s:
                    log.warning("no connection to the front for %g s: ending its engine processes", self._alone_s)
                    await self._end_all()
                    self._reset_session()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            await self._end_all()
            await self._relay_socket.close()

    async def _connect(self) -> None:
        """Connect and serve until the connection ends."""
        try:
            opened = connect(
                self._url,
                ssl=self._tls,
                compression=None,
                max_size=MAX_FRAME,
                open_timeout=HANDSHAKE_S,
                ping_interval=PING_S,
                ping_timeout=PING_TIMEOUT_S,
                proxy=None,
            )
            connection = await opened
        except InvalidURI as problem:
            raise InvalidConfig(f"{self._url!r} is not the address of a front: {problem}", param="join") from None
        async with connection:
            welcome, sends, receives = await self._shake_hands(connection)
            if not welcome.is_known:
                if self._cores or self._link.num_received:  # the front has dropped this session, or is another front
                    await self._end_all()
                    self._reset_link()
                log.info("joined %s", self._url)
            else:
                log.info("reconnected to %s", self._url)
            try:
                await self._run_link(connection, sends, receives, welcome.num_received)
            except* (WebSocketException, OSError) as problems:
                log.info("the link was cut: %s", problems.exceptions[0])
            except* LinkError as problems:
                log.error("%s; starting over", problems.exceptions[0])
                await self._end_all()
                self._reset_session()

    async def _run_link(self, connection: ClientConnection, sends: Seal, receives: Seal, num_received: int) -> None:
        """Exchange messages until the connection ends. Where this machine is told to end, it takes leave, so that the
        front does not wait for it."""
        try:
            await self._link.run(connection, sends, receives, num_received)
        except asyncio.CancelledError:
            await connection.close()
            raise

    async def _shake_hands(self, connection: ClientConnection) -> tuple[Welcome, Seal, Seal]:
        try:
            return await asyncio.wait_for(
                host_handshake(connection, self._key, self._info, self._session, self._link.num_received), HANDSHAKE_S
            )
        except WebSocketException as problem:
            if connection.close_code == REFUSED:
                raise LinkError(
                    "the front refuses this machine: its log says why", hint="is the key the same?"
                ) from None
            raise problem

    # ── messages of the front ──────────────────────────────────────────────────────────────────────────

    def _handle(self, data: bytes) -> None:
        message = _to_host.decode(data)
        match message:
            case StartCore():
                self._starting[message.core] = asyncio.create_task(self._start(message))
            case StopCore(core, is_killed):
                self._stop(core, is_killed)
            case CoreMail(core, mail):
                if (client := self._cores.get(core)) is not None:
                    client.send_encoded(mail)
            case OpenBlocks() | BlockBytes() | CloseBlocks():
                self._streams.note(message)

    async def _block_pipe(self, target: str) -> Pipe:
        """Open a pipe to a core of this machine, by its number."""
        client = self._cores.get(int(target)) if target.isdecimal() else None
        if client is None:
            raise OSError("there is no such engine process on this machine")
        return await asyncio.open_unix_connection(client.block_address)

    async def _start(self, message: StartCore) -> None:
        try:
            model = await asyncio.to_thread(resolve_model, message.config.model.model)
            if await asyncio.to_thread(model_digest, message.config, model.path) != message.digest:
                raise InvalidConfig(f"the model {message.config.model.model} differs from the front's")
            config = await asyncio.to_thread(self._fit, message.config, model.path)
            client = RelayedCoreClient(config, model.path, lambda data: self._send(CoreMail(message.core, data)))
            self._cores[message.core] = client
            await client.start(lambda failure: self._note_end(message.core, failure))
        except (TokenmillError, OSError) as problem:
            how = problem if isinstance(problem, TokenmillError) else InvalidConfig(str(problem))
            self._send(CoreEnded(message.core, how.message, how.hint, how.exit_code))
        finally:
            self._starting.pop(message.core, None)

    def _note_end(self, core: int, message: FromCore) -> None:
        """Report to the front that a core has ended by itself."""
        assert isinstance(message, Failed)
        self._send(CoreEnded(core, message.message, message.hint, message.exit_code))
        self._drop(core)

    def _stop(self, core: int, is_killed: bool) -> None:
        client = self._cores.get(core)
        if client is None:
            if (starting := self._starting.pop(core, None)) is not None:
                starting.cancel()
            self._send(CoreEnded(core, "the engine process was stopped"))
        elif is_killed:
            client.kill()
        else:
            self._drop(core, "the engine process was stopped")

    def _drop(self, core: int, how: str | None = None) -> None:
        async def end(client: RelayedCoreClient) -> None:
            await client.close()
            if how is not None:
                self._send(CoreEnded(core, how))

        client = self._cores.pop(core, None)
        if client is not None:
            ending = asyncio.create_task(end(client))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _send(self, message: CoreMail | CoreEnded | StreamMessage) -> None:
        self._link.send(_encoder.encode(message))

    async def _end_all(self) -> None:
        self._streams.close()
        for starting in self._starting.values():
            starting.cancel()
        cores, self._cores = list(self._cores.values()), {}
        with contextlib.suppress(OSError):
            await asyncio.gather(*(core.close() for core in cores), *self._ending, return_exceptions=True)
