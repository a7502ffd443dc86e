"""The supervisor of a core: starts it, knows its health, starts it again after a death.

A core that gives no sign of life for some seconds is stalled: its requests go to other cores where there are some, else
they wait and go on if it comes back; after 40 seconds it is killed. A core that dies is started again, at once if it
had answered anything since its last start, and after ever longer pauses otherwise; one that dies again and again
before it answers is given up. Where there is no memory, no descriptor or no disk for a process, that is tried again
until there is.

A fleet that grows and shrinks stops cores that it does not need, and opens them again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tokenmill.engine.core_client import CoreClient
from tokenmill.engine.messages import AdapterRead, Failed, FromCore, Outputs, Ready, ToCore
from tokenmill.engine.status import CoreInfo, Health
from tokenmill.errors import EngineDead, TokenmillError

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
FIRST_RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 5.0  # between two tries while there is nothing to start a process with

STALLED_S = 8.0  # without a sign of life
GIVEN_UP_S = 40.0
LIFE_CHECK_S = 1.0
READY_CHECK_S = 0.02

MakeClient = Callable[[], CoreClient]


class CoreSupervisor:
    """Keeps a core running: starts it, hands on what it says, and starts it again after a death, a few times."""

    def __init__(
        self,
        make_client: MakeClient,
        on_ready: Callable[[CoreInfo], None],
        on_outputs: Callable[[Outputs | AdapterRead], None],
        on_death: Callable[[TokenmillError], None],
        on_stall: Callable[[], None],
        label: str = "",
    ) -> None:
        """`label`: what its lines in the log begin with, where there are several cores."""
        self.health = Health("stopped", "it was not started yet")
        self.info: CoreInfo | None = None
        self.is_given_up = False  # it is dead, and not started again
        self.is_closed = False
        self.is_stopped = True
        self.num_restarts = 0
        self._make_client = make_client
        self._label = label
        self._on_ready, self._on_outputs, self._on_death, self._on_stall = on_ready, on_outputs, on_death, on_stall
        self._client: CoreClient | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None  # of a dead core's client
        self._life_checks: asyncio.Task[None] | None = None
        self._has_answered = False  # since it was started
        self._deaths: list[float] = []  # before an answer

    async def open(self) -> None:
        """Start a core where none runs and wait until it is ready; what keeps it from that is raised."""
        assert self.is_stopped, "it was opened already"
        self.is_stopped = self.is_given_up = False
        self.health = Health("loading")
        self._deaths = []
        self._first_ready = asyncio.get_running_loop().create_future()
        await self._connect()
        await self._first_ready
        if self._life_checks is None:
            self._life_checks = asyncio.create_task(self._check_life())

    async def stop(self, why: str = "") -> None:
        """End the core, ready or not; `open` starts another. Its requests should be elsewhere."""
        if self.is_stopped or self.is_closed:
            return
        self.is_stopped, self.is_given_up = True, False
        self.health = Health("stopped", why)
        error = EngineDead("the engine process was stopped")
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(error)
        self._on_death(error)
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._dropping is not None:
            await self._dropping
        await self._drop_client()

    def send(self, message: ToCore) -> None:
        """Send to the core, if there is one at the moment: a dead one has forgotten its requests anyway."""
        if self._client is not None:
            self._client.send(message)

    async def restart(self) -> None:
        """Start a new core in place of one that runs, and return once it is ready. Its requests should be elsewhere."""
        if self.health.state in ("ready", "stalled"):
            self.health = Health("loading", "starting again, as it was told to")
            self._deaths = []
            self._on_death(EngineDead("the engine is being started again"))
            self._restart = asyncio.create_task(self._restart_core())
        while self.health.state != "ready":
            if self.is_given_up:
                raise EngineDead(self.health.detail)
            await asyncio.sleep(READY_CHECK_S)

    async def close(self) -> None:
        self.is_closed = self.is_given_up = True
        for task in (self._restart, self._life_checks):
            if task is not None:
                task.cancel()
        self.health = Health("dead", "closed")
        self._on_death(EngineDead("the engine was closed"))
        if self._dropping is not None:
            await self._dropping
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connect(self) -> None:
        self._has_answered = False
        self._client = self._make_client()
        await self._client.start(self._receive)

    def _receive(self, message: FromCore) -> None:
        match message:
            case Outputs() | AdapterRead():
                self._has_answered = self._has_answered or (isinstance(message, Outputs) and bool(message.outputs))
                self._on_outputs(message)
            case Ready(info):
                self._become_ready(info)
            case Failed():
                self._core_died(message)

    def _become_ready(self, info: CoreInfo) -> None:
        if self.is_stopped:  # it was told to end while it loaded
            return
        self.info = info
        self.health = Health("ready")
        self._on_ready(info)
        assert self._first_ready is not None
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    async def _check_life(self) -> None:
        """Look for signs of life of a ready core, now and then."""
        while True:
            slept_from_s = time.monotonic()
            await asyncio.sleep(LIFE_CHECK_S)
            # Where this process itself was held up, its core's messages may lie unread.
            if self._client is not None and time.monotonic() - slept_from_s < LIFE_CHECK_S + STALLED_S / 2:
                self._judge_silence(self._client, self._client.silent_s())

    def _judge_silence(self, client: CoreClient, silent_s: float) -> None:
        if self.health.state == "ready" and silent_s > STALLED_S:
            self.health = Health("stalled", f"the engine gives no sign of life for {silent_s:.0f} s")
            log.warning("%s%s; requests wait, or go to other engine processes", self._label, self.health.detail)
            self._on_stall()
        elif self.health.state == "stalled" and silent_s <= STALLED_S:
            self.health = Health("ready")
            log.warning("%sthe engine is alive again", self._label)
        elif self.health.state == "stalled" and silent_s > GIVEN_UP_S:
            log.error("%sthe engine gives no sign of life for %.0f s: it is killed", self._label, silent_s)
            client.kill()

    def _core_died(self, failure: Failed) -> None:
        if self.is_closed or self.is_given_up or self.is_stopped:
            return
        error = EngineDead(failure.message, hint=failure.hint)
        self.health = Health("dead", failure.message)
        assert self._first_ready is not None
        if not self._first_ready.done():  # it never started: `open` raises this
            error.exit_code = failure.exit_code
            self.is_given_up = True
            self._first_ready.set_exception(error)
        else:
            self._note_death(failure.message)
            self._restart = asyncio.create_task(self._restart_core())
        self._on_death(error)

    def _note_death(self, why: str) -> None:
        """Decide whether the core is started again. One that answered before it died may be."""
        now = time.monotonic()
        recent = [died for died in self._deaths if now - died < RESTART_WINDOW_S]
        self._deaths = [] if self._has_answered else [*recent, now]
        if len(self._deaths) <= MAX_RESTARTS:
            self.num_restarts += 1
            log.error("%s%s; starting it again", self._label, why)
            return
        self.is_given_up = True
        times = f"{len(self._deaths)} times in {RESTART_WINDOW_S:.0f} s"
        self.health = Health("dead", f"the engine died {times} without an answer", is_given_up=True)
        log.error(
            "%s%s; %s: it is not started again. Stop this server, fix the cause, and start it again",
            self._label,
            why,
            self.health.detail,
        )

    async def _drop_client(self) -> None:
        """Let go of a dead core, and of the folder of its sockets."""
        client, self._client = self._client, None
        if client is not None:
            self._dropping = asyncio.create_task(client.close())
            await asyncio.shield(self._dropping)  # a close in the meantime waits for it

    async def _restart_core(self) -> None:
        delay_s = FIRST_RESTART_DELAY_S * 2 ** (len(self._deaths) - 1) if self._deaths else 0.0
        while True:
            try:
                await self._drop_client()
                if self.is_given_up:
                    return
                await asyncio.sleep(delay_s)
                if self.health.state == "dead":
                    self.health = Health("loading", "starting again after a failure")
                await self._connect()
                return
            except OSError as problem:
                why = f"the engine could not be started again: {problem.strerror or problem}"
                delay_s = min(MAX_RESTART_DELAY_S, max(FIRST_RESTART_DELAY_S, 2 * delay_s))
                log.error("%s%s; trying again in %.1f s", self._label, why, delay_s)
                self.health = Health("dead", why)
