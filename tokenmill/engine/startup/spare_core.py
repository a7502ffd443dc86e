"""A core process started before it is needed, for the next model of a server with several models.

Importing torch is most of the load time of a small model. So one process waits with its libraries imported; the next
load takes it, and once that model is loaded another one is started. A model with `--no-fast-start` gets a new process
instead.
"""

from __future__ import annotations

import threading

from tokenmill.engine.core_process import CoreProcess


class SpareCore:
    """Holds at most one waiting process."""

    def __init__(self, first: CoreProcess | None = None, *, is_refilled: bool = False) -> None:
        """`first`: a process that was already started. `is_refilled`: start another one after each load."""
        self._waiting = first
        self._is_refilled = is_refilled
        self._lock = threading.Lock()

    def take(self, *, fast_start: bool) -> CoreProcess | None:
        """Return the waiting process, which the caller must end; None if there is none, or without `fast_start`."""
        with self._lock:
            if self._waiting is None or not fast_start:
                return None
            waiting, self._waiting = self._waiting, None
        if waiting.has_ended() or waiting.is_stopped():  # it was killed or stopped while it waited
            waiting.kill()
            return None
        return waiting

    def refill(self) -> None:
        """Start another process if none waits. Takes some milliseconds; may be called from any thread."""
        with self._lock:
            if self._is_refilled and self._waiting is None:
                self._waiting = CoreProcess()

    def discard(self) -> None:
        """End the waiting process, and do not start another."""
        with self._lock:
            self._is_refilled = False
            if self._waiting is not None:
                self._waiting.kill()
                self._waiting = None
