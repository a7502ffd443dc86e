"""What fits where: a grid over devices, splits and precisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenmill.errors import InvalidConfig
from tokenmill.planner.device import PlanDevice
from tokenmill.planner.memory import Split
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Plan, Question, make_plan

PRECISIONS = (("auto", "auto"), ("fp8", "auto"), ("int8", "auto"), ("int4", "auto"), ("int4", "int8"))
SPLITS = (Split(), Split(2), Split(4), Split(8), Split(8, 2), Split(8, 4))


def grid(
    model: PlannedModel,
    device: PlanDevice,
    question: Question,
    precisions: Sequence[tuple[str, str]] = PRECISIONS,
    splits: Sequence[Split] = SPLITS,
) -> list[Plan]:
    """Every precision on every split that the model's heads and layers allow; a CPU is never split."""
    return [
        make_plan(model, device, replace(question, split=split, weight_dtype=weights, kv_dtype=kv))
        for weights, kv in precisions
        for split in _allowed(model, device, splits)
    ]


def _allowed(model: PlannedModel, device: PlanDevice, splits: Sequence[Split]) -> Iterator[Split]:
    for split in splits if not device.is_cpu else (Split(),):
        try:
            split.check(model.spec)
        except InvalidConfig:
            continue
        yield split
