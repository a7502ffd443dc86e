"""Capacity of a machine within limits on TTFT and TPOT, the price of its tokens, and the readers it is fast enough for.

Prefill and decode share the machine. With B requests running and r arriving a second, a share r·P of the time goes into
prefills (P seconds each) and the rest into decode steps (D(B) seconds each), so in balance

    r = 1 / (P + output · D(B) / B)          requests a second
    TPOT = D(B) / (1 - r·P)                  prefills between the steps delay them
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
    """A steady state of a server: concurrency, throughput and latencies."""

    concurrency: int
    requests_s: float
    ttft_s: float
    tpot_s: float
    output_tok_s: float


def steady_load(roofline: Roofline, concurrency: int, input_len: int, output_len: int) -> Load:
    prefill = roofline.prefill_s(input_len)
    decode_tok_s = roofline.decode_tok_s(concurrency, input_len + output_len // 2)
    step = concurrency / decode_tok_s
    prompt = roofline.prefill_busy_s(input_len)
    rate = 1.0 / (prompt + output_len / decode_tok_s)
    busy = rate * prompt
    wait = busy * prefill / (2 * (1 - busy)) if concurrency > 1 else 0.0
    tpot = step / (1 - busy) if concurrency > 1 else step
    return Load(concurrency, rate, prefill + wait, tpot, rate * output_len)


def largest_load(roofline: Roofline, slo: Slo, most: int, input_len: int, output_len: int) -> Load | None:
    """Return the largest load up to concurrency `most` (what memory holds) within the limits; None if there is none."""
    low, high = 0, min(most, MAX_BATCH)
    while low < high:  # TTFT and TPOT grow with concurrency, so bisection finds the limit
        middle = (low + high + 1) // 2
        if slo.holds(steady_load(roofline, middle, input_len, output_len)):
            low = middle
        else:
            high = middle - 1
    return steady_load(roofline, low, input_len, output_len) if low else None


# ── price ────────────────────────────────────────────────────────────────────────────────────────────────


MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """Cost of tokens on a machine with a price per hour that is kept busy."""

    usd_per_hour: float
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_request: float


def price(usd_per_hour: float, *, prefill_s: float, input_len: int, decode_tok_s: float, output_len: int) -> Price:
    """Compute token prices: input tokens pay for the prefill, output tokens for their share of the decode steps."""
    per_second = usd_per_hour / 3600
    per_input, per_output = per_second * prefill_s / input_len, per_second / decode_tok_s
    request = per_input * input_len + per_output * output_len
    return Price(usd_per_hour, per_input * MILLION, per_output * MILLION, request)


# ── reading speed ────────────────────────────────────────────────────────────────────────────────────────


TOKENS_PER_WORD = 4 / 3  # English with a vocabulary of 100,000


@dataclass(frozen=True)
class Reader:
    """A reading speed, and the TPOT that keeps up with it."""

    who: str
    words_per_minute: int

    @property
    def tpot_s(self) -> float:
        return 60 / (self.words_per_minute * TOKENS_PER_WORD)


READERS = (
    Reader("listens to speech", 150),
    Reader("reads carefully", 200),
    Reader("reads (adult average)", 240),
    Reader("reads fast", 400),
    Reader("skims", 700),
)


def readers_kept_up_with(tpot_s: float) -> list[str]:
    """Return the kinds of readers that this TPOT is fast enough for."""
    return [reader.who for reader in READERS if tpot_s <= reader.tpot_s]
