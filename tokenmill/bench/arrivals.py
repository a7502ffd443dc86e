"""When requests arrive, independent of how fast the server is (open loop). Each process is a stream of gaps in seconds.

constant   1/rate                      poisson   exponential around 1/rate
gamma      the same mean, bursty: shape below 1 has clusters and pauses (1 is poisson, infinity is constant)
ramp       poisson whose rate grows from `rate` to `rate_end` over the duration
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tokenmill.errors import InvalidConfig

Process = Literal["constant", "poisson", "gamma", "ramp"]


@dataclass(frozen=True)
class ArrivalProcess:
    rate: float  # requests a second
    process: Process = "poisson"
    burstiness: float = 0.5  # shape of the gamma distribution
    rate_end: float | None = None  # of a ramp
    duration_s: float | None = None  # of a ramp

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.burstiness > 0:
            raise InvalidConfig("rate and burstiness must be positive", param="rate")
        if self.process == "ramp" and (not self.rate_end or not self.duration_s):
            raise InvalidConfig("a ramp needs --rate-end and --duration-s", param="rate_end")

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the start, without end."""
        drawing = random.Random(f"arrivals/{seed}")
        now = 0.0
        for number in itertools.count():
            if number or self.process != "constant":
                now += self._gap(drawing, now)
            yield now

    def _gap(self, drawing: random.Random, now: float) -> float:
        match self.process:
            case "constant":
                return 1 / self.rate
            case "poisson":
                return drawing.expovariate(self.rate)
            case "gamma":
                return drawing.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            case "ramp":
                return drawing.expovariate(self._rate_at(now))

    def _rate_at(self, now: float) -> float:
        assert self.rate_end is not None and self.duration_s is not None
        return self.rate + (self.rate_end - self.rate) * min(1.0, now / self.duration_s)
