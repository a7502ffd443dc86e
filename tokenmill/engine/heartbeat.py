"""The heartbeat of a core process: a thread that reports to the front, once a second, that the core makes progress.

A process that was stopped, or hangs in a call that holds the GIL, sends nothing. Neither does a process whose loop is
stuck: it is in the same step as a second ago and has used no processor time since. A long step does use processor time,
so it never counts as a stall.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT_S = 1.0
MIN_CPU_S = 0.005  # per interval: more than this thread itself uses


class Heartbeat:
    """Calls `send` once a second while the loop makes progress."""

    def __init__(
        self,
        send: Callable[[], None],
        num_iterations: Callable[[], int],
        cpu_s: Callable[[], float] = time.process_time,
        interval_s: float = BEAT_S,
    ) -> None:
        """`num_iterations`: returns how often the loop has read its mailbox; -1 while it waits for messages."""
        self._send = send
        self._num_iterations = num_iterations
        self._cpu_s = cpu_s
        self._interval_s = interval_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        iterations, cpu_s = self._num_iterations(), self._cpu_s()
        while not self._ends.wait(self._interval_s):
            iterations_before, iterations = iterations, self._num_iterations()
            cpu_before_s, cpu_s = cpu_s, self._cpu_s()
            if iterations == -1 or iterations != iterations_before or cpu_s - cpu_before_s > MIN_CPU_S:
                self._send()
