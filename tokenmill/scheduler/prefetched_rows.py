"""Rows of the next step that were planned before this one was done (see `ahead`)."""

from __future__ import annotations

from tokenmill.scheduler.budget import TokenBudget
from tokenmill.scheduler.plan_builder import PlanBuilder, Planned
from tokenmill.scheduler.request_state import SequenceGroup
from tokenmill.types import RowPlan

WORTH_A_PASS = 8  # of a step's tokens, an eighth


class PrefetchedRows:
    """Of the next step, by gang; each is of one sequence."""

    def __init__(self) -> None:
        self._rows: dict[SequenceGroup, tuple[Planned, RowPlan]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._rows

    @property
    def groups(self) -> list[SequenceGroup]:
        return list(self._rows)

    def keep(self, draft: PlanBuilder) -> None:
        for planned, row in draft.pairs:
            self._rows[planned.sequence.state.group_of(planned.sequence)] = planned, row

    def drop(self, group: SequenceGroup) -> None:
        """It left the floor: nobody wants to know what comes of its row."""
        self._rows.pop(group, None)

    def budget(self, num_tokens: int, num_running: int) -> TokenBudget:
        """What they leave of a step's"""
        taken = sum(planned.num_tokens for planned, _ in self._rows.values())
        return TokenBudget(num_tokens - taken, num_running - len(self._rows))

    def least_to_add(self, num_tokens: int) -> int:
        """Tokens that are worth a pass of their own beside the one that has begun"""
        return num_tokens // WORTH_A_PASS if self._rows else 0

    def join(self, draft: PlanBuilder) -> None:
        """They become rows of the step like all others."""
        for planned, row in self._rows.values():
            draft.repeat(planned, row)
        self._rows = {}
