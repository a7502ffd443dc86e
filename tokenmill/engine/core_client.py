"""Clients of an engine core, in a thread or in a process. A front depends only on the protocol `CoreClient`.

    ThreadCoreClient     the core runs in a thread of this process (tests, notebooks)
    ProcessCoreClient    the core runs in a separate process (serving), behind unix sockets that only this user can
                         reach:  front ══(two zmq pipes, msgpack)══ child (`core_main.py`)

Nothing is pickled. The front detects a child's death by its exit, not by a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.core_process import CoreProcess, beats_from_core, from_core, to_core
from tokenmill.engine.loop import run_loop
from tokenmill.engine.messages import Beat, Failed, FromCore, Shutdown, Start, ToCore
from tokenmill.errors import TokenmillError

DRAINED_AFTER_S = 0.1  # a dead child's pipe that stays quiet for this long is considered read to its end
PIPE_CHECK_S = 0.005

Receive = Callable[[FromCore], None]

_encoder = msgspec.msgpack.Encoder()
_from_core = msgspec.msgpack.Decoder(FromCore)


class CoreClient(Protocol):
    async def start(self, receive: Receive) -> None:
        """Start loading; `receive` is called on the event loop's thread with Ready, then Outputs, or with Failed."""
        ...

    def send(self, message: ToCore) -> None: ...

    def silent_s(self) -> float:
        """Return the seconds since the last message or heartbeat of a ready core; 0 if this is not measured."""
        ...

    def kill(self) -> None:
        """Kill a core that does not respond; `receive` gets `Failed`, as after any death."""
        ...

    async def close(self) -> None: ...


class ThreadCoreClient:
    def __init__(self, build: Callable[[], EngineCore]) -> None:
        self._build = build
        self._inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, receive: Receive) -> None:
        loop = asyncio.get_running_loop()

        def deliver(message: FromCore) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(receive, message)

        self._thread = threading.Thread(target=self._run, args=(deliver,), name="engine", daemon=True)
        self._thread.start()

    def send(self, message: ToCore) -> None:
        self._inbox.put(message)

    def silent_s(self) -> float:
        return 0.0  # a thread does not stop alone: this process would be stopped with it

    def kill(self) -> None:
        raise AssertionError("a thread cannot be killed")

    async def close(self) -> None:
        self._inbox.put(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, deliver: Receive) -> None:
        try:
            core = self._build()
        except TokenmillError as error:
            deliver(Failed(error.message, error.hint, error.exit_code))
            return
        except Exception as error:
            deliver(Failed(f"the engine could not start: {error}"))
            raise
        run_loop(core, QueueMailbox(self._inbox, deliver))


class QueueMailbox:
    def __init__(self, inbox: queue.SimpleQueue[ToCore], deliver: Receive) -> None:
        self._inbox = inbox
        self.send = deliver

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        messages: list[ToCore] = []
        try:
            messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages


class ProcessCoreClient:
    def __init__(self, config: EngineConfig, model_path: Path, child: CoreProcess | None = None) -> None:
        """`child`: a core process that is already waiting for its start message; by default one is started."""
        self._start = Start(config, str(model_path))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            # Two pipes, because sending on a socket that the event loop watches can consume its wake-up.
            self._outbox = self._context.socket(zmq.PUSH)
            self._inbox = self._context.socket(zmq.PULL)
            self._pipe_ends: zmq.Socket[bytes] = self._inbox.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as problem:  # no file descriptors are left
            self._context.destroy(linger=0)
            raise OSError(problem.errno, problem.strerror) from None
        self._child = child
        self._watching: asyncio.Task[None] | None = None
        self._num_received = 0
        self._last_received_s = time.monotonic()
        self._is_closing = False

    async def start(self, receive: Receive) -> None:
        self._child = self._child or start_core_process(self._start.config)
        folder = self._child.folder
        for pipe, addresses in (
            (self._outbox, (to_core(folder),)),
            (self._inbox, (from_core(folder), beats_from_core(folder))),
        ):
            pipe.setsockopt(zmq.LINGER, 0)
            pipe.set_hwm(0)
            pipe.setsockopt(zmq.RECONNECT_IVL, 10)
            for address in addresses:
                pipe.connect(address)  # the connecting side may send before the other side has bound its socket
        self.send(self._start)
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._drain_socket, receive)
        self._drain_socket(receive)  # the event loop is notified of changes only
        self._watching = asyncio.create_task(self._watch(receive))

    def send(self, message: ToCore) -> None:
        self.send_encoded(_encoder.encode(message))

    def send_encoded(self, data: bytes) -> None:
        # Without a high-water mark this never blocks; messages that a dead child leaves unread are dropped on close.
        if not self._context.closed:  # tasks cancelled when the event loop ends still abort their requests
            self._outbox.send(data, zmq.DONTWAIT)

    def silent_s(self) -> float:
        return time.monotonic() - self._last_received_s

    def kill(self) -> None:
        if self._child is not None:
            self._child.send_kill()

    async def close(self) -> None:
        self._is_closing = True
        try:
            if self._child is not None:
                with contextlib.suppress(zmq.ZMQError):
                    self.send(Shutdown())
                stop = partial(self._child.stop, is_responsive=self._num_received > 0)
                # Shielded: cancelling this task before the executor has begun would leave the child running, and the
                # thread that waits for its exit would keep this process from ending.
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, stop))
        finally:
            if self._watching is not None and not self._watching.done():
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
            self._close_pipes()

    def _close_pipes(self) -> None:
        if not self._context.closed:
            asyncio.get_running_loop().remove_reader(self._inbox.fileno())
            self._inbox.disable_monitor()
            self._pipe_ends.close(linger=0)
            self._outbox.close(linger=0)
            self._inbox.close(linger=0)
            self._context.term()

    def _drain_socket(self, receive: Receive) -> None:
        """Receive all messages in the pipe. (zmq's asyncio sockets take twice as long per step.)"""
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._num_received += 1
            self._last_received_s = time.monotonic()
            self._dispatch(data, receive)

    def _dispatch(self, data: bytes, receive: Receive) -> None:
        message = _from_core.decode(data)
        if not isinstance(message, Beat):
            receive(message)

    async def _watch(self, receive: Receive) -> None:
        """Report the child's exit, after reading its last messages from the pipe: they may say why it ended."""
        assert self._child is not None
        try:
            ending = await asyncio.to_thread(self._child.wait)
        except asyncio.CancelledError:
            if not self._is_closing:  # the event loop ends without `close`; its thread would wait for the child's exit
                self._child.kill()
                self._close_pipes()
            raise
        await self._read_last_messages(receive)
        if not self._is_closing:
            receive(Failed(f"the engine process ended with {ending}"))

    async def _read_last_messages(self, receive: Receive) -> None:
        """Read all messages that a dead child has sent: up to its disconnect, or, if it never connected, until the
        pipe has been quiet for `DRAINED_AFTER_S`."""
        while not self._is_closing:
            num_before, quiet_until_s = self._num_received, time.monotonic() + DRAINED_AFTER_S
            while not self._is_closing and time.monotonic() < quiet_until_s:
                if self._has_pipe_ended():
                    self._drain_socket(receive)
                    return
                await asyncio.sleep(PIPE_CHECK_S)
            if num_before == self._num_received:
                return

    def _has_pipe_ended(self) -> bool:
        assert self._child is not None
        while self._pipe_ends.poll(0):
            event = recv_monitor_message(self._pipe_ends, zmq.NOBLOCK)
            if event["endpoint"] == from_core(self._child.folder).encode():
                return True
        return False


def start_core_process(config: EngineConfig, environment: Mapping[str, str] = MappingProxyType({})) -> CoreProcess:
    """Start a core process for this config, with the start-up optimisations unless the config turns them off."""
    return CoreProcess(fast_start=config.ops.fast_start is not False, environment=environment)
