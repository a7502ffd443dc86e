"""A core's process that is started before it is needed, for the next model of a server that has several.

Importing torch is most of the time that a small model takes to load. So one process waits with its libraries imported;
the next load takes it, and once that model is there another one is started. A model that shall not start fast
(`--no-fast-start`) gets a process of its own.
"""

from __future__ import annotations

import threading

from tokenmill.engine.core_process import CoreProcess


class SpareCore:
    """At most one waiting process; each is taken once."""

    def __init__(self, first: CoreProcess | None = None, *, is_refilled: bool = False) -> None:
        """`first`: one that was started already. `is_refilled`: another is started after each load."""
        self._waiting = first
        self._is_refilled = is_refilled
        self._lock = threading.Lock()

    def take(self, *, fast_start: bool) -> CoreProcess | None:
        """The waiting process, now the caller's to end; None: there is none that would do."""
        with self._lock:
            if self._waiting is None or not fast_start:
                return None
            waiting, self._waiting = self._waiting, None
        if waiting.has_ended() or waiting.is_stopped():  # by someone else, while it waited
            waiting.kill()
            return None
        return waiting

    def refill(self) -> None:
        """Start another process, if none waits. Takes some milliseconds, in which a thread may do it."""
        with self._lock:
            if self._is_refilled and self._waiting is None:
                self._waiting = CoreProcess()

    def discard(self) -> None:
        """End the waiting process, and start no more."""
        with self._lock:
            self._is_refilled = False
            if self._waiting is not None:
                self._waiting.kill()
                self._waiting = None
