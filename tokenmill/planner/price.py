"""What tokens cost when the machine costs so much an hour and is kept busy."""

from __future__ import annotations

from dataclasses import dataclass

MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    usd_per_hour: float
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_request: float


def price(usd_per_hour: float, *, prefill_s: float, input_len: int, decode_tok_s: float, output_len: int) -> Price:
    """Input tokens pay for the time of their prefill, output tokens for their share of the steps they are made in."""
    per_second = usd_per_hour / 3600
    per_input, per_output = per_second * prefill_s / input_len, per_second / decode_tok_s
    request = per_input * input_len + per_output * output_len
    return Price(usd_per_hour, per_input * MILLION, per_output * MILLION, request)
