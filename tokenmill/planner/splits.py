"""Ways to put a model on some devices, ranked: how many share every layer (tensor split), how many stages the layers
are cut into (pipeline), and how many replicas stand side by side.

    devices = tensor × pipeline × replicas

A replica on its own answers in its own time, so replicas add throughput and nothing else. Ways that meet the limits
come first, by throughput; equals by the time to the first token. Each has its reason: what it wins and what it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.errors import InvalidConfig
from tokenmill.planner.device import PlanDevice
from tokenmill.planner.memory import Split
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Plan, Question, make_plan

MUCH = 0.1  # of a step: from which on it is mentioned


@dataclass(frozen=True)
class SplitOption:
    """One way to divide a model among devices; without a load, the reason why it is impossible."""

    split: Split
    replicas: int
    plan: Plan | None = None
    why_not: str = ""

    @property
    def name(self) -> str:
        parts = ((f"tp {self.split.tensor}", self.split.tensor), (f"pp {self.split.pipeline}", self.split.pipeline))
        one = " × ".join(text for text, count in parts if count > 1) or "one device"
        return one if self.replicas == 1 else f"{self.replicas} replicas of {one}"

    @property
    def output_tok_s(self) -> float:
        return 0.0 if self.plan is None or self.plan.best is None else self.plan.best.output_tok_s * self.replicas

    @property
    def order(self) -> tuple[float, float]:
        return -self.output_tok_s, 0.0 if self.plan is None else self.plan.ttft_s

    @property
    def reason(self) -> str:
        """Return the gain and the cost of a way, in words."""
        plan = self.plan
        if plan is None or plan.best is None:
            return self.why_not
        told = []
        best, question = plan.best, plan.question
        share = plan.roofline.exchange_share(best.concurrency, question.input_len + question.output_len // 2)
        if share > MUCH:
            told.append(f"{share:.0%} of a step is exchange over {plan.device.link.title}")
        if self.split.pipeline > 1:
            told.append(f"stages compute {plan.roofline.stage_share:.0%} of the time")
        weights = plan.memory.weights / plan.memory.available
        told.append(f"weights take {weights:.0%} of a device, room for {plan.memory.max_concurrency} requests")
        return "; ".join(told)

    def flat(self) -> dict[str, Any]:
        found = {"topology": self.name, "replicas": self.replicas, "total_output_tok_s": self.output_tok_s}
        link = {} if self.plan is None else {"link": self.plan.device.link.name}
        return {**({} if self.plan is None else self.plan.flat()), **found, **link, "reason": self.reason}


def splits_of(devices: int) -> list[tuple[Split, int]]:
    """Return all ways to use this many devices, each with its number of replicas."""
    found = []
    for tensor in range(1, devices + 1):
        for pipeline in range(1, devices // tensor + 1):
            replicas, left = divmod(devices, tensor * pipeline)
            if not left:
                found.append((Split(tensor, pipeline), replicas))
    return found


def rank_splits(model: PlannedModel, device: PlanDevice, question: Question, devices: int) -> list[SplitOption]:
    """Return all ways, the best first; the price of a plan is that of all its replicas' devices."""
    found = []
    for split, replicas in splits_of(devices):
        try:
            plan = make_plan(model, device, replace(question, split=split))
        except InvalidConfig as error:
            found.append(SplitOption(split, replicas, None, error.message))
            continue
        if not plan.memory.fits:
            found.append(SplitOption(split, replicas, None, plan.why_not()))
        elif plan.best is None:
            found.append(SplitOption(split, replicas, None, "misses the limits, even for one request"))
        else:
            found.append(SplitOption(split, replicas, plan))
    return sorted(found, key=lambda one: one.order)


TITLES = ("topology", "tokens/s", "TTFT", "TPOT", "at once", "why")


def table_rows(options: Sequence[SplitOption]) -> list[tuple[str, ...]]:
    return [_row(option) for option in options]


def _row(option: SplitOption) -> tuple[str, ...]:
    plan = option.plan
    if plan is None or plan.best is None:
        return (option.name, "–", "–", "–", "–", option.reason)
    best = plan.best
    return (
        option.name, f"{option.output_tok_s:,.0f}", f"{best.ttft_s * 1e3:,.0f} ms", f"{best.tpot_s * 1e3:.1f} ms",
        str(best.concurrency * option.replicas), option.reason,
    )  # fmt: skip


def verdict(options: Sequence[SplitOption]) -> str:
    """Return a recommendation in one sentence."""
    best = options[0]
    if best.plan is None:
        return "No way to put this model on these devices meets the limits."
    able = [(one.plan.tpot_s, place) for place, one in enumerate(options) if one.plan is not None]
    soonest = options[min(able)[1]]
    said = f"Most tokens: {best.name}, {best.output_tok_s:,.0f} a second."
    if soonest is best:
        return said
    assert soonest.plan is not None
    return f"{said} Soonest for one request: {soonest.name}, {soonest.plan.tpot_s * 1e3:.1f} ms a token."
