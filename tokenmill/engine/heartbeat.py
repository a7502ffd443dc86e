"""The heartbeat of a core's process: a thread that tells the front, once a second, that the core goes on.

A process that was stopped or hangs in a call that keeps Python's lock sends nothing. Nor does one whose loop is stuck:
it stands in the same step as a second ago, and the process has used no processor time since. A step of many seconds
does use some, so it is not taken for a stall however long it lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT_S = 1.0
LEAST_CPU_S = 0.005  # in a beat's time: more than this thread itself takes


class Heartbeat:
    """Calls `send` once a second while the loop makes progress."""

    def __init__(
        self,
        send: Callable[[], None],
        num_turns: Callable[[], int],
        cpu_s: Callable[[], float] = time.process_time,
        interval_s: float = BEAT_S,
    ) -> None:
        """`num_turns`: how often the loop has taken its mail; -1 while it waits for mail."""
        self._send = send
        self._num_turns = num_turns
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
        turns, cpu_s = self._num_turns(), self._cpu_s()
        while not self._ends.wait(self._interval_s):
            turns_before, turns = turns, self._num_turns()
            cpu_before_s, cpu_s = cpu_s, self._cpu_s()
            if turns == -1 or turns != turns_before or cpu_s - cpu_before_s > LEAST_CPU_S:
                self._send()
