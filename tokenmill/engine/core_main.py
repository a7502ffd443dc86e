"""The program of a core process: `python -m tokenmill.engine.core_main FOLDER PARENT [--no-fast-start]`.

The process ends when its parent sends Shutdown or has ended. It ignores SIGTERM, which a service manager sends to all
processes of a service: the front then finishes running requests, and needs its core for that.
"""

from __future__ import annotations

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

from tokenmill.engine.core_process import NO_FAST_START, STOP_SIGNAL, beats_from_core, block_socket, from_core, to_core
from tokenmill.engine.heartbeat import Heartbeat
from tokenmill.engine.loop import run_loop
from tokenmill.engine.messages import Beat, Failed, FromCore, Shutdown, Start, ToCore
from tokenmill.engine.rank_main import fork_rank
from tokenmill.engine.startup.garbage_collection import freeze_live_objects, gc_paused, relaxed_gc
from tokenmill.engine.startup.torch_import import torch_import
from tokenmill.errors import TokenmillError

ORPHAN_CHECK_MS = 1000
SWITCH_INTERVAL_S = 0.0005  # how long a step waits for the GIL while another thread moves blocks

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)


class SocketMailbox:
    """The child's end of the pipes. While it waits, it checks every second whether its parent is still alive."""

    def __init__(self, folder: str, parent_pid: int) -> None:
        self._inbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._outbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._beats: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        pipes: dict[str, zmq.Socket[bytes]] = {to_core(folder): self._inbox, from_core(folder): self._outbox}
        for address, pipe in {**pipes, beats_from_core(folder): self._beats}.items():
            pipe.set_hwm(0)
            pipe.bind(address)
        self._parent_pid = parent_pid
        self._num_receives = 0
        self._is_waiting = False
        self.heartbeat = Heartbeat(self._beat, lambda: -1 if self._is_waiting else self._num_receives)

    def receive_first(self) -> ToCore:
        """Wait for the first message, which should be Start. Messages after it stay in the pipe: a Shutdown may have
        been sent while this process imported its libraries."""
        return self._receive(None, max_messages=1)[0]

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        self._num_receives += 1
        self._is_waiting = True
        try:
            return self._receive(timeout_s)
        finally:
            self._is_waiting = False

    def _receive(self, timeout_s: float | None, max_messages: float = math.inf) -> list[ToCore]:
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox.poll(int(min(ORPHAN_CHECK_MS, max(0.0, (ends_s - time.monotonic()) * 1e3)))):
            if os.getppid() != self._parent_pid:
                return [Shutdown()]
            if time.monotonic() >= ends_s:
                return []
        messages: list[ToCore] = []
        while len(messages) < max_messages and self._inbox.poll(0):
            messages.append(_to_core.decode(self._inbox.recv()))
        return messages

    def send(self, message: FromCore) -> None:
        """Send to the parent. A pipe that nobody reads would block forever, so the process exits without a parent."""
        data = _encoder.encode(message)
        while True:
            try:
                return self._outbox.send(data, zmq.NOBLOCK)
            except zmq.Again:
                if os.getppid() != self._parent_pid:
                    sys.exit(0)
                self._outbox.poll(ORPHAN_CHECK_MS, zmq.POLLOUT)

    def _beat(self) -> None:
        with contextlib.suppress(zmq.Again):
            self._beats.send(_encoder.encode(Beat()), zmq.NOBLOCK)

    def close(self) -> None:
        self.heartbeat.stop()
        self._beats.close(linger=0)
        self._inbox.close(linger=0)
        self._outbox.close(linger=1000)
        zmq.Context.instance().term()


def main() -> int:
    folder, parent_pid = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(STOP_SIGNAL, lambda *_: sys.exit(0))
    try:
        mailbox = SocketMailbox(folder, parent_pid)
    except zmq.ZMQError:
        if os.path.isdir(folder):
            raise
        return 0  # the parent has ended and removed its folder
    try:
        return _serve(mailbox, folder, fast_start=is_fast_start())
    finally:
        mailbox.close()
        if os.getppid() != parent_pid:  # the parent was killed, so it could not remove its folder
            shutil.rmtree(folder, ignore_errors=True)


def is_fast_start() -> bool:
    return NO_FAST_START not in sys.argv[3:]


def _serve(mailbox: SocketMailbox, folder: str, *, fast_start: bool) -> int:
    with torch_import(fast_start=fast_start):
        from tokenmill.engine.build import build_core  # torch is imported here, after the socket is open
    from tokenmill.observe.log import configure_logging

    configure_logging()
    start = mailbox.receive_first()
    if not isinstance(start, Start):  # the parent ended before it sent anything
        return 0
    try:
        with gc_paused(fast_start=fast_start):
            core = build_core(
                start.config,
                Path(start.model_path),
                fast_start=fast_start,
                when_rank_dies=lambda _how: os._exit(1),
                fork_rank=fork_rank if fast_start else None,
                block_address=block_socket(folder),
            )
    except TokenmillError as error:
        mailbox.send(Failed(error.message, error.hint, error.exit_code))
        return error.exit_code
    mailbox.heartbeat.start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with relaxed_gc():
        run_loop(core, mailbox, when_prepared=freeze_live_objects)
    return 0


if __name__ == "__main__":
    exit_code = main()
    if not is_fast_start():
        sys.exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # skip interpreter shutdown: torch takes half a second to tear down
