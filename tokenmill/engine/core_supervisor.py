"""The supervisor of a core: starts it, tracks its health, restarts it after a death.

A core without a heartbeat for 8 seconds is stalled: its requests move to other cores, or, if there is none, wait and
continue if it recovers; after 40 seconds it is killed. A core that dies is restarted: immediately if it had produced
output since its last start, otherwise after a growing delay. A core that dies repeatedly without producing output is
given up. If a process can't be started because memory, file descriptors or disk space are exhausted, starting it is
retried until it succeeds.

An autoscaled fleet stops cores that it does not need, and opens them again later.
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
MAX_RESTART_DELAY_S = 5.0  # between two attempts while a process can't be started

STALLED_AFTER_S = 8.0  # without a heartbeat
KILLED_AFTER_S = 40.0  # without a heartbeat
HEALTH_CHECK_S = 1.0
READY_CHECK_S = 0.02

MakeClient = Callable[[], CoreClient]


class CoreSupervisor:
    """Keeps a core running: starts it, forwards its messages, and restarts it after a death up to `MAX_RESTARTS`
    times."""

    def __init__(
        self,
        make_client: MakeClient,
        on_ready: Callable[[CoreInfo], None],
        on_outputs: Callable[[Outputs | AdapterRead], None],
        on_death: Callable[[TokenmillError], None],
        on_stall: Callable[[], None],
        label: str = "",
    ) -> None:
        """`label`: prefix of its log lines, if there are several cores."""
        self.health = Health("stopped", "it has not been started")
        self.info: CoreInfo | None = None
        self.is_given_up = False  # the core is dead and will not be restarted
        self.is_closed = False
        self.is_stopped = True
        self.num_restarts = 0
        self._make_client = make_client
        self._label = label
        self._on_ready, self._on_outputs, self._on_death, self._on_stall = on_ready, on_outputs, on_death, on_stall
        self._client: CoreClient | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None  # closes a dead core's client
        self._health_checks: asyncio.Task[None] | None = None
        self._has_output = False  # since it was started
        self._deaths: list[float] = []  # times of deaths without output

    async def open(self) -> None:
        """Start a stopped core and wait until it is ready; raise the error if it can't start."""
        assert self.is_stopped, "the core is already open"
        self.is_stopped = self.is_given_up = False
        self.health = Health("loading")
        self._deaths = []
        self._first_ready = asyncio.get_running_loop().create_future()
        await self._connect()
        await self._first_ready
        if self._health_checks is None:
            self._health_checks = asyncio.create_task(self._check_health())

    async def stop(self, why: str = "") -> None:
        """End the core, ready or not; `open` starts a new one. Its requests should have been moved away."""
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
        """Send to the core. Without a core the message is dropped: a dead core has lost its requests anyway."""
        if self._client is not None:
            self._client.send(message)

    async def restart(self) -> None:
        """Replace the running core by a new one; return once it is ready. Its requests should have been moved away."""
        if self.health.state in ("ready", "stalled"):
            self.health = Health("loading", "restarting on request")
            self._deaths = []
            self._on_death(EngineDead("the engine is being restarted"))
            self._restart = asyncio.create_task(self._restart_core())
        while self.health.state != "ready":
            if self.is_given_up:
                raise EngineDead(self.health.detail)
            await asyncio.sleep(READY_CHECK_S)

    async def close(self) -> None:
        self.is_closed = self.is_given_up = True
        for task in (self._restart, self._health_checks):
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
        self._has_output = False
        self._client = self._make_client()
        await self._client.start(self._receive)

    def _receive(self, message: FromCore) -> None:
        match message:
            case Outputs() | AdapterRead():
                self._has_output = self._has_output or (isinstance(message, Outputs) and bool(message.outputs))
                self._on_outputs(message)
            case Ready(info):
                self._become_ready(info)
            case Failed():
                self._core_died(message)

    def _become_ready(self, info: CoreInfo) -> None:
        if self.is_stopped:  # it was stopped while it was loading
            return
        self.info = info
        self.health = Health("ready")
        self._on_ready(info)
        assert self._first_ready is not None
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    async def _check_health(self) -> None:
        """Check the heartbeat of a ready core every `HEALTH_CHECK_S`."""
        while True:
            slept_from_s = time.monotonic()
            await asyncio.sleep(HEALTH_CHECK_S)
            # If this process itself was delayed, its core's messages may be unread.
            if self._client is not None and time.monotonic() - slept_from_s < HEALTH_CHECK_S + STALLED_AFTER_S / 2:
                self._update_health(self._client, self._client.silent_s())

    def _update_health(self, client: CoreClient, silent_s: float) -> None:
        if self.health.state == "ready" and silent_s > STALLED_AFTER_S:
            self.health = Health("stalled", f"the engine has sent no heartbeat for {silent_s:.0f} s")
            log.warning("%s%s; its requests wait, or move to other engine processes", self._label, self.health.detail)
            self._on_stall()
        elif self.health.state == "stalled" and silent_s <= STALLED_AFTER_S:
            self.health = Health("ready")
            log.warning("%sthe engine responds again", self._label)
        elif self.health.state == "stalled" and silent_s > KILLED_AFTER_S:
            log.error("%sthe engine has sent no heartbeat for %.0f s: killing it", self._label, silent_s)
            client.kill()

    def _core_died(self, failure: Failed) -> None:
        if self.is_closed or self.is_given_up or self.is_stopped:
            return
        error = EngineDead(failure.message, hint=failure.hint)
        self.health = Health("dead", failure.message)
        assert self._first_ready is not None
        if not self._first_ready.done():  # it never became ready: `open` raises this error
            error.exit_code = failure.exit_code
            self.is_given_up = True
            self._first_ready.set_exception(error)
        else:
            self._note_death(failure.message)
            self._restart = asyncio.create_task(self._restart_core())
        self._on_death(error)

    def _note_death(self, why: str) -> None:
        """Decide whether the core is restarted. Deaths after which it had produced output do not count."""
        now = time.monotonic()
        recent = [died for died in self._deaths if now - died < RESTART_WINDOW_S]
        self._deaths = [] if self._has_output else [*recent, now]
        if len(self._deaths) <= MAX_RESTARTS:
            self.num_restarts += 1
            log.error("%s%s; restarting it", self._label, why)
            return
        self.is_given_up = True
        times = f"{len(self._deaths)} times in {RESTART_WINDOW_S:.0f} s"
        self.health = Health("dead", f"the engine died {times} without producing output", is_given_up=True)
        log.error(
            "%s%s; %s: it is not restarted. Stop this server, fix the cause and start the server again",
            self._label,
            why,
            self.health.detail,
        )

    async def _drop_client(self) -> None:
        """Close the client of a dead core, which removes the folder of its sockets."""
        client, self._client = self._client, None
        if client is not None:
            self._dropping = asyncio.create_task(client.close())
            await asyncio.shield(self._dropping)  # a concurrent `close` waits for it

    async def _restart_core(self) -> None:
        delay_s = FIRST_RESTART_DELAY_S * 2 ** (len(self._deaths) - 1) if self._deaths else 0.0
        while True:
            try:
                await self._drop_client()
                if self.is_given_up:
                    return
                await asyncio.sleep(delay_s)
                if self.health.state == "dead":
                    self.health = Health("loading", "restarting after a failure")
                await self._connect()
                return
            except OSError as problem:
                why = f"the engine could not be restarted: {problem.strerror or problem}"
                delay_s = min(MAX_RESTART_DELAY_S, max(FIRST_RESTART_DELAY_S, 2 * delay_s))
                log.error("%s%s; retrying in %.1f s", self._label, why, delay_s)
                self.health = Health("dead", why)
