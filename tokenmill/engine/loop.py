"""Who calls `step`: a loop that takes what the front says, steps while there is work, and sends what came out.

It knows a `Mailbox` and nothing of threads or sockets. Without work it prepares, a moment at a time, what later steps
will need; when nothing is left of that it waits for mail without turning.
"""

from __future__ import annotations

import logging
from typing import Protocol

from tokenmill.engine.collector import seldom_full
from tokenmill.engine.core import EngineCore
from tokenmill.engine.messages import Abort, Failed, FromCore, Outputs, Ready, Shutdown, Submit, ToCore

log = logging.getLogger(__name__)


class Mailbox(Protocol):
    def take(self, *, wait: bool) -> list[ToCore]:
        """What has arrived; with `wait`, not before something has."""
        ...

    def send(self, message: FromCore) -> None: ...


def run_loop(core: EngineCore, mailbox: Mailbox) -> None:
    """Serve until told to stop. The one place where any failure of the engine ends up."""
    mailbox.send(Ready(core.info))
    try:
        with seldom_full():
            _serve(core, mailbox)
    except Exception as error:
        log.exception("the engine stopped")
        mailbox.send(Failed(f"the engine stopped: {error}"))


def _serve(core: EngineCore, mailbox: Mailbox) -> None:
    was_busy = False
    while True:
        for message in mailbox.take(wait=not (core.has_work or core.use_spare_time())):
            if isinstance(message, Shutdown):
                return
            _obey(core, message)
        busy = core.has_work
        outputs = core.step() if busy else []
        # An idle engine says so once: gauges must not keep the last busy moment.
        if outputs or busy != was_busy or not busy:
            mailbox.send(Outputs(outputs, core.stats()))
        was_busy = busy


def _obey(core: EngineCore, message: ToCore) -> None:
    match message:
        case Submit(request):
            core.add(request)
        case Abort(request_id, index):
            core.abort(request_id, index)
        case _:
            raise AssertionError(f"unexpected message {type(message).__name__}")
