"""Ranking of devices for a model: all known ones, the cheapest tokens within the limits first.

Each device is planned with 1, 2, 4 and 8 of them side by side, and the cheapest number is kept (the smallest, where no
price is listed). Devices without a price come after those with one, by throughput; last those that the model does not
fit, or on which it misses the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.errors import InvalidConfig
from tokenmill.hardware.peaks import DEVICES
from tokenmill.planner.device import PlanDevice, plan_device
from tokenmill.planner.memory import Split
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Plan, Question, make_plan
from tokenmill.report.units import duration

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Option:
    """The plan on one kind of device; without a plan, the reason why it is impossible."""

    device: str
    plan: Plan | None = None
    why_not: str = ""

    def flat(self) -> dict[str, Any]:
        return {"device": self.device, "why_not": self.why_not} if self.plan is None else self.plan.flat()

    @property
    def order(self) -> tuple[int, float]:
        if self.plan is None or self.plan.best is None:
            return (2, 0.0)
        if self.plan.price is None:
            return (1, -self.plan.best.output_tok_s)
        return (0, self.plan.price.usd_per_request)


def rank_devices(model: PlannedModel, question: Question, names: Sequence[str] = ()) -> list[Option]:
    """Return one option for each device, the best first."""
    devices = [plan_device(name) for name in names or [device.name for device in DEVICES]]
    return sorted((_option(model, device, question) for device in devices), key=lambda option: option.order)


def _option(model: PlannedModel, device: PlanDevice, question: Question) -> Option:
    name = device.peaks.name
    plans = []
    for size in SIZES if not device.is_cpu else (1,):
        split = Split(size, 1)
        try:
            split.check(model.spec)
        except InvalidConfig:
            continue
        plans.append(make_plan(model, device, replace(question, split=split)))
    able = [Option(name, plan) for plan in plans if plan.memory.fits and plan.best is not None]
    if able and able[0].order[0] == 0:
        return min(able, key=lambda option: option.order)
    if able:
        return able[0]  # without a price, the fewest that do
    fits = any(plan.memory.fits for plan in plans)
    return Option(
        name, why_not="misses the limits" if fits else f"does not fit {plans[-1].question.split.num_devices} of them"
    )


def rows(options: Sequence[Option]) -> list[tuple[str, ...]]:
    """A table: device, price, throughput and latencies; a dash where there is nothing to tell."""
    return [_row(option) for option in options]


TITLES = ("device", "$/h", "$ per M input", "$ per M output", "requests/s", "TTFT", "TPOT", "at once")


def _row(option: Option) -> tuple[str, ...]:
    plan = option.plan
    if plan is None or plan.best is None:
        return (option.device, "–", "–", "–", "–", "–", "–", option.why_not)
    price, best = plan.price, plan.best
    prices = ("–",) * 3 if price is None else (
        f"{price.usd_per_hour:.2f}", f"{price.usd_per_million_input:.3f}", f"{price.usd_per_million_output:.3f}",
    )  # fmt: skip
    speeds = (f"{best.requests_s:.2f}", duration(best.ttft_s), duration(best.tpot_s))
    return (f"{plan.question.split.num_devices} × {option.device}", *prices, *speeds, str(best.concurrency))


def verdict(options: Sequence[Option]) -> str:
    """Return a recommendation in one sentence."""
    best = options[0]
    if best.plan is None or best.plan.best is None:
        return "No known device holds this model within the limits, not even eight of one kind."
    count, load = best.plan.question.split.num_devices, best.plan.best
    if best.plan.price is None:
        return f"Fastest: {count} × {best.device}, {load.output_tok_s:,.0f} output tokens/s (no prices are listed)."
    price = best.plan.price.usd_per_million_output
    with_load = f"{load.concurrency} requests at once, {load.output_tok_s:,.0f} tokens/s"
    return f"Cheapest: {count} × {best.device}, ${price:.3f} per million output tokens ({with_load})."
