"""The core in a process of its own, behind unix sockets that only this user can reach.

    front: ProcessCoreClient ══(two zmq pipes, msgpack)══ child: `python -m tokenmill.engine.process_core_client
    FOLDER PARENT`

Nothing is pickled. The child ends when its parent tells it to, or is gone; not on SIGTERM, which a service manager
sends to all processes of a service: the front then finishes what runs, and needs its core for that. The front learns
of a child's death from its exit, not from silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec
import zmq

from tokenmill.config import EngineConfig
from tokenmill.engine.core_client import Receive
from tokenmill.engine.core_process import STOP_SIGNAL, CoreProcess
from tokenmill.engine.loop import run_loop
from tokenmill.engine.messages import Failed, FromCore, Shutdown, Start, ToCore
from tokenmill.engine.startup.torch_import import gc_paused, without_meta_kernels
from tokenmill.errors import TokenmillError

ORPHAN_CHECK_MS = 1000
LAST_WORDS_S = 0.1  # they were sent before the child ended; only the reading may take a moment

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


class ProcessCoreClient:
    def __init__(self, config: EngineConfig, model_path: Path, child: CoreProcess | None = None) -> None:
        """`child`: a core's process that waits already; by default one is started."""
        self._start = Start(config, str(model_path))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Two pipes, since sending on a socket that the event loop watches can swallow its wake-up.
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._child = child
        self._watching: asyncio.Task[None] | None = None
        self._num_heard = 0
        self._is_closing = False

    async def start(self, receive: Receive) -> None:
        self._child = self._child or CoreProcess()
        folder = self._child.folder
        for pipe, address in ((self._outbox, to_core(folder)), (self._inbox, from_core(folder))):
            pipe.setsockopt(zmq.LINGER, 0)
            pipe.set_hwm(0)
            pipe.setsockopt(zmq.RECONNECT_IVL, 10)
            pipe.connect(address)  # the side that connects may send before the other one is there
        self.send(self._start)
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._drain_socket, receive)
        self._drain_socket(receive)  # the loop is told of changes only
        self._watching = asyncio.create_task(self._watch(receive))

    def send(self, message: ToCore) -> None:
        # Without a high-water mark this never blocks; what a dead child leaves unread is dropped with the pipe.
        if not self._context.closed:  # tasks that are cancelled beside `_watch` at a loop's end still give requests up
            self._outbox.send(_encoder.encode(message), zmq.DONTWAIT)

    async def close(self) -> None:
        self._is_closing = True
        if self._child is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.send(Shutdown())
            await asyncio.to_thread(self._child.end, hears=self._num_heard > 0)
        if self._watching is not None and not self._watching.done():
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._close_pipes()

    def _close_pipes(self) -> None:
        if not self._context.closed:
            asyncio.get_running_loop().remove_reader(self._inbox.fileno())
            self._outbox.close(linger=0)
            self._inbox.close(linger=0)
            self._context.term()

    def _drain_socket(self, receive: Receive) -> None:
        """All that lies in the pipe. (zmq's own sockets for asyncio take twice as long, for every step of the core.)"""
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._num_heard += 1
            receive(_from_core.decode(data))

    async def _watch(self, receive: Receive) -> None:
        """The child's end is told after its last words, which may still lie in the pipe: they say why."""
        assert self._child is not None
        try:
            ending = await asyncio.to_thread(self._child.wait)
        except asyncio.CancelledError:
            if not self._is_closing:  # the loop ends unclosed; it would wait for that thread as long as the child lives
                self._child.discard()
                self._close_pipes()
            raise
        num_before = -1
        while not self._is_closing and num_before < self._num_heard:
            num_before = self._num_heard
            await asyncio.sleep(LAST_WORDS_S)
        if not self._is_closing:
            receive(Failed(f"the engine process ended with {ending}"))


class SocketMailbox:
    """The child's end of the pipes. Waiting, it looks up now and then whether its parent still lives."""

    def __init__(self, folder: str, parent_pid: int) -> None:
        self._inbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._outbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        pipes: dict[str, zmq.Socket[bytes]] = {to_core(folder): self._inbox, from_core(folder): self._outbox}
        for address, pipe in pipes.items():
            pipe.set_hwm(0)
            pipe.bind(address)
        self._parent_pid = parent_pid

    def take(self, patience_s: float | None) -> list[ToCore]:
        ends_s = math.inf if patience_s is None else time.monotonic() + patience_s
        while not self._inbox.poll(int(min(ORPHAN_CHECK_MS, max(0.0, (ends_s - time.monotonic()) * 1e3)))):
            if os.getppid() != self._parent_pid:
                return [Shutdown()]
            if time.monotonic() >= ends_s:
                return []
        messages: list[ToCore] = []
        while self._inbox.poll(0):
            messages.append(_to_core.decode(self._inbox.recv()))
        return messages

    def send(self, message: FromCore) -> None:
        """A pipe that nobody reads would block for ever: without a parent there is no one to tell, and no reason to
        go on."""
        data = _encoder.encode(message)
        while True:
            try:
                return self._outbox.send(data, zmq.NOBLOCK)
            except zmq.Again:
                if os.getppid() != self._parent_pid:
                    sys.exit(0)
                self._outbox.poll(ORPHAN_CHECK_MS, zmq.POLLOUT)

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=1000)
        zmq.Context.instance().term()


def to_core(folder: str) -> str:
    return f"ipc://{folder}/to-core"


def from_core(folder: str) -> str:
    return f"ipc://{folder}/from-core"


def main() -> int:
    folder, parent_pid = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(STOP_SIGNAL, lambda *_: sys.exit(0))
    mailbox = SocketMailbox(folder, parent_pid)
    try:
        return _serve(mailbox)
    finally:
        mailbox.close()
        if os.getppid() != parent_pid:  # it was killed, so nobody else clears this away
            shutil.rmtree(folder, ignore_errors=True)


def _serve(mailbox: SocketMailbox) -> int:
    with gc_paused(), without_meta_kernels():
        from tokenmill.engine.build import build_core  # torch is imported here, after the socket is open
    from tokenmill.observe.log import configure_logging

    configure_logging()
    start = mailbox.take(None)[0]
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
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # nothing is left to do, and torch would take half a second to take itself down
