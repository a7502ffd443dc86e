"""Notifications to systemd (`Type=notify`): ready, alive, stopping.

systemd passes the path of a datagram socket in NOTIFY_SOCKET and, if the unit has `WatchdogSec`, the watchdog timeout
in WATCHDOG_USEC. Once the engine has died too often to be restarted, the keep-alive messages stop, so that systemd
restarts the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

from tokenmill.observe.log import get_log

log = get_log("server")


class ServiceNotifier:
    """Reports the server's state to the service manager, if there is one."""

    def __init__(self, environment: Mapping[str, str], is_live: Callable[[], bool]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._is_live = is_live
        microseconds = environment.get("WATCHDOG_USEC", "")
        self._period_s = int(microseconds) / 2e6 if microseconds.isdigit() else 0.0
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._notify("READY=1\nSTATUS=answering requests")
        if self._address and self._period_s:
            self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        self._notify("STOPPING=1")
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            if self._is_live():
                self._notify("WATCHDOG=1")
            else:
                self._notify("STATUS=the engine died too often to be restarted")
            await asyncio.sleep(self._period_s)

    def _notify(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
            try:
                manager.sendto(message.encode(), address)
            except OSError as problem:
                log.warning("could not send %s to the service manager: %s", message.splitlines()[0], problem)
