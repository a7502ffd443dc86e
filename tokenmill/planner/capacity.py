"""How many requests at once, and how many a second, a machine serves within limits on TTFT and TPOT.

Prefill and decode share the machine. With B requests running and r arriving a second, a share r·P of the time goes into
prefills (P seconds each) and the rest into decode steps (D(B) seconds each), so in balance

    r = 1 / (P + output · D(B) / B)          requests a second
    TPOT = D(B) / (1 - r·P)                  steps are held up by the prefills between them
    TTFT = P + wait,  wait = r·P · P / (2 (1 - r·P))      prefills queue one after another (M/D/1)
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.planner.roofline import Roofline

MAX_BATCH = 4096


@dataclass(frozen=True)
class Slo:
    ttft_s: float | None = None
    tpot_s: float | None = None

    def holds(self, load: Load) -> bool:
        return (self.ttft_s is None or load.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or load.tpot_s <= self.tpot_s
        )


@dataclass(frozen=True)
class Load:
    """A steady state."""

    concurrency: int
    requests_s: float
    ttft_s: float
    tpot_s: float
    output_tok_s: float


def steady_load(roofline: Roofline, concurrency: int, input_len: int, output_len: int) -> Load:
    prefill = roofline.prefill_s(input_len)
    decode_tok_s = roofline.decode_tok_s(concurrency, input_len + output_len // 2)
    step = concurrency / decode_tok_s
    rate = 1.0 / (prefill + output_len / decode_tok_s)
    busy = rate * prefill
    wait = busy * prefill / (2 * (1 - busy)) if concurrency > 1 else 0.0
    tpot = step / (1 - busy) if concurrency > 1 else step
    return Load(concurrency, rate, prefill + wait, tpot, rate * output_len)


def largest_load(roofline: Roofline, slo: Slo, most: int, input_len: int, output_len: int) -> Load | None:
    """The largest concurrency up to `most` (what memory holds) within the limits; None if not even one request is."""
    low, high = 0, min(most, MAX_BATCH)
    while low < high:  # TTFT and TPOT grow with concurrency, so the limit is found by halving
        middle = (low + high + 1) // 2
        if slo.holds(steady_load(roofline, middle, input_len, output_len)):
            low = middle
        else:
            high = middle - 1
    return steady_load(roofline, low, input_len, output_len) if low else None
