"""How a front reaches its core. `CoreClient` is the whole contract; a front never knows which one it holds.

ThreadCoreClient     the core runs in a thread of this process (tests, notebooks)
ProcessCoreClient    the core runs in a process of its own, behind a unix socket (serving); see `process.py`
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from tokenmill.engine.core import EngineCore
from tokenmill.engine.loop import run_loop
from tokenmill.engine.messages import Failed, FromCore, Shutdown, ToCore
from tokenmill.errors import TokenmillError

Receive = Callable[[FromCore], None]


class CoreClient(Protocol):
    async def start(self, receive: Receive) -> None:
        """Begin loading; `receive` is called on the event loop's thread with Ready, then Outputs, or Failed."""
        ...

    def send(self, message: ToCore) -> None: ...

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

    def take(self, patience_s: float | None) -> list[ToCore]:
        messages: list[ToCore] = []
        try:
            messages.append(self._inbox.get(timeout=patience_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages
