"""Lag of the load generator: a check that it was not itself the bottleneck.

A timer fires every two milliseconds: its delay is also the delay of any received byte and any sent request. Late times
would blame the server for the client's slowness, so beyond a limit there is no report. Where the delay was not spent
computing, another process had the processor; those moments are reported apart, since a faster program would not help.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tokenmill.bench.measures import percentile
from tokenmill.errors import TokenmillError

EVERY_S = 0.002
STOLEN_S = 0.001  # late by more than this, mostly without CPU time: another process had the processor

Interval = tuple[float, float]


class ClientTooSlow(TokenmillError):
    code = "client_too_slow"


@dataclass(frozen=True)
class Lag:
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_start_p99_ms: float  # delay between the scheduled and the actual sending (open loop)
    busy: float  # share of one core that the generator used
    stolen: float = 0.0  # share of the time in which another process had its processor

    def refuse_beyond(self, limit_ms: float) -> None:
        hint = "use a faster or idler machine, fewer streams, or --max-lag-ms to accept less precise times"
        if self.p99_ms > limit_ms:
            other = f" (something else had its processor {self.stolen:.1%} of the time)" if self.stolen > 0.001 else ""
            raise ClientTooSlow(
                f"no report: the load generator itself lagged by {self.p99_ms:.1f} ms{other} (99th percentile; "
                f"{limit_ms:g} ms are allowed), so its times would not be the server's",
                hint=hint,
            )
        if self.late_start_p99_ms > max(10 * limit_ms, 100.0):
            raise ClientTooSlow(
                f"no report: requests were sent {self.late_start_p99_ms:.0f} ms after their time (99th percentile)",
                hint=hint,
            )


class LagMeter:
    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._late_s: list[float] = []
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._cpu_at_wait = 0.0
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()
        self.stolen: list[Interval] = []  # on the clock of `time.perf_counter`

    def start(self) -> None:
        """Start to measure; earlier values (of a warm-up) are dropped."""
        self.stop()
        self._late_s.clear()
        self.stolen.clear()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._wait()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def lag(self, late_starts_s: list[float]) -> Lag:
        late = [seconds * 1e3 for seconds in self._late_s] or [0.0]
        starts = [seconds * 1e3 for seconds in late_starts_s] or [0.0]
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        busy = (time.process_time() - self._cpu_began) / elapsed
        stolen = sum(end - start for start, end in self.stolen) / elapsed
        return Lag(percentile(late, 50), percentile(late, 99), max(late), percentile(starts, 99), busy, stolen)

    def _wait(self) -> None:
        self._due, self._cpu_at_wait = time.perf_counter() + self._every_s, time.thread_time()
        self._handle = asyncio.get_running_loop().call_later(self._every_s, self._fire)

    def _fire(self) -> None:
        now = time.perf_counter()
        late_s = max(0.0, now - self._due)
        self._late_s.append(late_s)
        if late_s > STOLEN_S and time.thread_time() - self._cpu_at_wait < late_s / 2:
            self.stolen.append((now - late_s, now))
        self._wait()
