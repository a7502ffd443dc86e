"""What a device has been told to compute and the host has not looked at yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenmill.types import RowPlan


@dataclass(frozen=True)
class PendingTokens:
    """Tokens on their way from the device: line i belongs to the row with lines[row] == i."""

    lines: dict[int, int]
    tokens: torch.Tensor  # int64, pinned
    is_there: torch.cuda.Event

    def wait(self) -> list[int]:
        self.is_there.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


@dataclass(frozen=True)
class InflightDecode:
    """A step that was started before it was planned."""

    drawing: PendingTokens
    positions: dict[int, int] = field(default_factory=dict)  # of the token fed, by row; rows that changed are dropped


@dataclass(frozen=True)
class InflightPrefill:
    """Rows of the next step that the runner was told of before this one was done."""

    rows: dict[int, RowPlan]
    started: dict[int, RowPlan]  # and not left to the plain runner
    drawing: PendingTokens | None = None

    def knows(self, plan: RowPlan) -> bool:
        return self.rows.get(plan.row) is plan

    def has_started(self, plan: RowPlan) -> bool:
        return self.started.get(plan.row) is plan


NO_PREFILL = InflightPrefill({}, {})
