"""The core's loop: handle the front's messages, step while there is work, send the outputs.

The loop depends on a `Mailbox`, not on threads or sockets. Without work it runs idle tasks, one at a time, which later
steps would otherwise have to do; when none is left it blocks until a message arrives. An idle task may take most of a
second, so idle tasks start after `QUIET_S` without work: not between two requests of one client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tokenmill.engine.core import EngineCore
from tokenmill.engine.messages import (
    Abort,
    AdapterRead,
    Failed,
    FromCore,
    LoadAdapter,
    Outputs,
    Ready,
    Shutdown,
    Submit,
    ToCore,
    UnloadAdapter,
    WatchBlocks,
)
from tokenmill.engine.status import FailedAdapter, LoadedAdapter

log = logging.getLogger(__name__)

QUIET_S = 0.2  # without a message or work, before idle tasks start


class Mailbox(Protocol):
    def receive(self, timeout_s: float | None) -> list[ToCore]:
        """Return the messages that have arrived; if none has, wait up to `timeout_s` for one (None: no limit)."""
        ...

    def send(self, message: FromCore) -> None: ...


def run_loop(core: EngineCore, mailbox: Mailbox, when_prepared: Callable[[], None] = lambda: None) -> None:
    """Serve until the front sends Shutdown. An exception of the engine is caught here and reported as `Failed`.
    `when_prepared` is called once, after the last idle task."""
    try:
        mailbox.send(Ready(core.info))
        _serve(core, mailbox, when_prepared)
    except Exception as error:
        log.exception("the engine stopped")
        mailbox.send(Failed(f"the engine stopped: {error}"))


def _serve(core: EngineCore, mailbox: Mailbox, when_prepared: Callable[[], None]) -> None:
    was_busy = is_prepared = has_idle_tasks = False
    timeout_s: float | None = QUIET_S
    while True:
        messages = mailbox.receive(0.0 if core.has_work else timeout_s)
        for message in messages:
            if isinstance(message, Shutdown):
                return core.close()
            handle_message(core, message)
        busy = core.has_work
        if busy or messages:
            timeout_s = QUIET_S
        elif core.run_idle_task():
            timeout_s, has_idle_tasks = 0.0, True
        else:
            timeout_s = None
        if timeout_s is None and not is_prepared:
            is_prepared = True
            core.prepare_grammars()
            if has_idle_tasks:
                when_prepared()
        outputs = core.step() if busy else []
        for adapter in core.finish_loading() if core.adapters.is_loading else ():
            loaded = adapter if isinstance(adapter, LoadedAdapter) else None
            mailbox.send(AdapterRead(loaded, adapter if isinstance(adapter, FailedAdapter) else None))
        # Send the statistics once more when the engine becomes idle: gauges must not keep their last busy values.
        if outputs or busy != was_busy or not busy:
            mailbox.send(Outputs(outputs, core.stats(), core.pop_cache_events()))
        was_busy = busy


def handle_message(core: EngineCore, message: ToCore) -> None:
    """Apply one message of the front, except `Shutdown`, which the loop handles itself."""
    match message:
        case Submit(request):
            core.add(request)
        case Abort(request_id, index):
            core.abort(request_id, index)
        case LoadAdapter(name, path):
            core.adapters.start_loading(name, Path(path))
        case UnloadAdapter(name):
            core.adapters.unload(name)
        case WatchBlocks():
            core.watch_blocks()
        case _:
            raise AssertionError(f"unexpected message {type(message).__name__}")
