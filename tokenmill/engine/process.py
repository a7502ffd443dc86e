"""The core in a process of its own, behind a unix socket that only this user can reach.

    front: ProcessLink ──(zmq PAIR, msgpack)──► child: `python -m tokenmill.engine.process SOCKET`

Nothing is pickled. The child ends when it is told to, when its parent is gone, and on SIGTERM; the front learns of a
child's death from its exit, not from silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tokenmill.config import EngineConfig
from tokenmill.engine.link import Receive
from tokenmill.engine.loop import run_loop
from tokenmill.engine.messages import Failed, FromCore, Shutdown, Start, ToCore
from tokenmill.errors import TokenmillError

ORPHAN_CHECK_MS = 1000
EXIT_PATIENCE_S = 3.0

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


class ProcessLink:
    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._start = Start(config, str(model_path))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self, receive: Receive) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-")  # mode 0700
        address = f"ipc://{self._folder.name}/core"
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)  # the side that connects may send before the other one is there
        # A group of its own: Ctrl-C in a terminal reaches the front only, which then drains.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tokenmill.engine.process", address, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.send(self._start)
        self._tasks = [asyncio.create_task(self._listen(receive)), asyncio.create_task(self._watch(receive))]

    def send(self, message: ToCore) -> None:
        # PAIR with no high-water mark never blocks; what a dead child leaves unread is dropped with the socket.
        zmq.Socket.shadow(self._socket.underlying).send(_encoder.encode(message), zmq.DONTWAIT)

    async def close(self) -> None:
        self._is_closing = True
        if self._child is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.send(Shutdown())
            await asyncio.to_thread(end_child, self._child)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()

    async def _listen(self, receive: Receive) -> None:
        while True:
            receive(_from_core.decode(await self._socket.recv()))

    async def _watch(self, receive: Receive) -> None:
        assert self._child is not None
        code = await asyncio.to_thread(self._child.wait)
        if not self._is_closing:
            receive(Failed(f"the engine process ended with {describe_exit(code)}"))


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Ask, then insist."""
    for insist in (child.terminate, child.kill):
        try:
            child.wait(timeout=EXIT_PATIENCE_S)
            return
        except subprocess.TimeoutExpired:
            insist()
    child.wait()


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class SocketMailbox:
    """The child's end of the socket. Waiting, it looks up now and then whether its parent still lives."""

    def __init__(self, address: str, parent_pid: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._parent_pid = parent_pid

    def take(self, *, wait: bool) -> list[ToCore]:
        if wait:
            while not self._socket.poll(ORPHAN_CHECK_MS):
                if os.getppid() != self._parent_pid:
                    return [Shutdown()]
        elif os.getppid() != self._parent_pid:
            return [Shutdown()]
        messages: list[ToCore] = []
        while self._socket.poll(0):
            messages.append(_to_core.decode(self._socket.recv()))
        return messages

    def send(self, message: FromCore) -> None:
        self._socket.send(_encoder.encode(message))

    def close(self) -> None:
        self._socket.close(linger=1000)
        zmq.Context.instance().term()


def main() -> int:
    address, parent_pid = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    mailbox = SocketMailbox(address, parent_pid)
    try:
        return _serve(mailbox)
    finally:
        mailbox.close()


def _serve(mailbox: SocketMailbox) -> int:
    from tokenmill.engine.build import build_core  # torch is imported here, after the socket is open
    from tokenmill.observe.log import configure_logging

    configure_logging()
    start = mailbox.take(wait=True)[0]
    if not isinstance(start, Start):  # the parent went away before it said anything
        return 0
    try:
        core = build_core(start.config, Path(start.model_path))
    except TokenmillError as error:
        mailbox.send(Failed(error.message, error.hint, error.exit_code))
        return error.exit_code
    run_loop(core, mailbox)
    return 0


if __name__ == "__main__":
    sys.exit(main())
