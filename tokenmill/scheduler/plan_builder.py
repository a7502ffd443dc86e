"""A step plan while it is written: rows to compute, rows that are new, block copies."""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.scheduler.budget import TokenBudget
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import RowInit, RowPlan, StepPlan


class Planned(NamedTuple):
    sequence: Sequence
    num_tokens: int  # fed, drafts not counted
    drafts: list[int]  # fed behind them


class PlanBuilder:
    def __init__(self, budget: TokenBudget) -> None:
        self.budget = budget
        self.num_preempted = 0
        self.planned: list[Planned] = []
        self._new_rows: list[RowInit] = []
        self._rows: list[RowPlan] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def pairs(self) -> list[tuple[Planned, RowPlan]]:
        return list(zip(self.planned, self._rows, strict=True))

    def repeat(self, planned: Planned, row: RowPlan) -> None:
        """What the runner was told before."""
        self._rows.append(row)
        self.planned.append(planned)

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        copies: list[tuple[int, int]],
        drafts: list[int] | None = None,
        *,
        behind: int = 0,
    ) -> None:
        """`behind`: tokens of it that are being computed"""
        if not sequence.is_on_runner:
            self._new_rows.append(sequence.new_row())
            sequence.is_on_runner = True
        self._rows.append(row_plan(sequence, num_tokens, drafts or [], behind))
        self._copies.extend(copies)
        self.planned.append(Planned(sequence, num_tokens, drafts or []))

    def step_plan(self, freed_rows: list[int]) -> StepPlan:
        return StepPlan(new_rows=self._new_rows, freed_rows=freed_rows, copies=self._copies, rows=self._rows)


def row_plan(sequence: Sequence, num_tokens: int, drafts: list[int], behind: int = 0) -> RowPlan:
    state = sequence.state
    start = sequence.computed + behind
    end = start + num_tokens
    draws = end == len(sequence.window) and sequence.is_whole and state.draws_tokens
    is_scored = state.lacks_prompt_logprobs(end + sequence.num_dropped)
    return RowPlan(
        row=sequence.row,
        start=start,
        token_ids=sequence.window[start:end] + drafts,
        table_updates=sequence.held_table.updates(),
        sample=draws,
        num_drafts=len(drafts),
        output_index=sequence.num_outputs,
        num_logprobs=state.output_mode.num_logprobs if draws else None,
        num_prompt_logprobs=state.request.params.prompt_logprobs if is_scored else None,
        num_dropped=sequence.num_dropped,
    )
