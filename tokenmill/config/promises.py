"""Latency targets (`--slo ttft=1s,tpot=50ms`)."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config.durations import seconds_of
from tokenmill.errors import InvalidConfig


@dataclass(frozen=True)
class ServiceLevel:
    """Latency targets; None: no target."""

    ttft_s: float | None = None  # until the first token
    tpot_s: float | None = None  # per further token


def read_service_level(text: str | None) -> ServiceLevel:
    """Parse latency targets; raise InvalidConfig for an invalid one."""
    promised: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        seconds = seconds_of(value)
        if name not in ("ttft", "tpot") or name in promised or seconds is None or not 0.001 <= seconds <= 3600.0:
            raise InvalidConfig(
                f"{part.strip()!r} is not a latency target",
                param="slo",
                hint="write ttft=1s,tpot=50ms, or one of the two",
            )
        promised[name] = seconds
    return ServiceLevel(promised.get("ttft"), promised.get("tpot"))
