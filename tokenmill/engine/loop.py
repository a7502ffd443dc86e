"""The core's loop: take messages from the front, step while there is work, send what came out.

It knows a `Mailbox` and nothing of threads or sockets. Without work it runs idle tasks, one at a time, which later
steps would have to do themselves; when none is left it blocks until a message arrives. An idle task may take most of a
second, so they begin after a quiet moment: not between two requests of one client, nor before the first.
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

QUIET_S = 0.2  # without mail or work


class Mailbox(Protocol):
    def take(self, patience_s: float | None) -> list[ToCore]:
        """Return the messages that have arrived; if none has, wait `patience_s` for one, None: for ever."""
        ...

    def send(self, message: FromCore) -> None: ...


def run_loop(core: EngineCore, mailbox: Mailbox, when_prepared: Callable[[], None] = lambda: None) -> None:
    """Serve until told to stop. The one place where any failure of the engine ends up. `when_prepared` is called once
    when idle tasks have been done and none is left."""
    try:
        mailbox.send(Ready(core.info))
        _serve(core, mailbox, when_prepared)
    except Exception as error:
        log.exception("the engine stopped")
        mailbox.send(Failed(f"the engine stopped: {error}"))


def _serve(core: EngineCore, mailbox: Mailbox, when_prepared: Callable[[], None]) -> None:
    was_busy = is_prepared = has_idle_tasks = False
    patience_s: float | None = QUIET_S
    while True:
        messages = mailbox.take(0.0 if core.has_work else patience_s)
        for message in messages:
            if isinstance(message, Shutdown):
                return core.close()
            handle_message(core, message)
        busy = core.has_work
        if busy or messages:
            patience_s = QUIET_S
        elif core.run_idle_task():
            patience_s, has_idle_tasks = 0.0, True
        else:
            patience_s = None
        if patience_s is None and not is_prepared:
            is_prepared = True
            core.prepare_grammars()
            if has_idle_tasks:
                when_prepared()
        outputs = core.step() if busy else []
        for adapter in core.finish_loading() if core.adapters.is_loading else ():
            loaded = adapter if isinstance(adapter, LoadedAdapter) else None
            mailbox.send(AdapterRead(loaded, adapter if isinstance(adapter, FailedAdapter) else None))
        # An idle engine says so once: gauges must not keep the last busy moment.
        if outputs or busy != was_busy or not busy:
            mailbox.send(Outputs(outputs, core.stats(), core.pop_news()))
        was_busy = busy


def handle_message(core: EngineCore, message: ToCore) -> None:
    """Do what the front asks; its last message is the loop's own business."""
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
