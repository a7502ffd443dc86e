"""Building a step plan, and the plans in flight: those returned to the engine and not applied yet.

A plan treats the steps in flight as done (`Sequence.planned`, `Sequence.num_pending`). When a step is applied, a row
counts only if its sequence is still in the same epoch (`Sequence.epoch`): it may have ended, been aborted or been
preempted while the device was computing. The row and the blocks of such a sequence may still be written, so they are
freed when the last step that uses them is applied, never earlier:

    launched:   step 7 [ A B C ]   step 8 [ A B C D ]        A ends with the token of step 7
    releases:                      step 8: A's row, A's blocks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from tokenmill.kv.blocks import BlockTable
from tokenmill.scheduler.budget import TokenBudget
from tokenmill.scheduler.request import Sequence
from tokenmill.types import PENDING, RowInit, RowPlan, StepPlan


class Planned(NamedTuple):
    """The scheduler's record of one row of a plan."""

    sequence: Sequence
    epoch: int
    num_tokens: int  # computed, without drafts
    drafts: list[int]  # computed after them
    is_pending: bool  # the token that it samples was counted as pending

    @property
    def is_void(self) -> bool:
        return self.sequence.is_finished or self.sequence.epoch != self.epoch


class PlanBuilder:
    """Collects the rows of one step."""

    def __init__(self, step: int, budget: TokenBudget, max_rows: int) -> None:
        """`max_rows`: no group is added once the step has this many rows."""
        self.step = step
        self.budget = budget
        self.max_rows = max_rows
        self.is_short = False  # of blocks: a sequence was preempted or left out
        self.planned: list[Planned] = []
        self._new_rows: list[RowInit] = []
        self._rows: list[RowPlan] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        return len(self.planned) >= self.max_rows

    def add(
        self, sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]], drafts: list[int] | None = None
    ) -> None:
        if not sequence.is_on_runner:
            self._new_rows.append(sequence.row_init())
            sequence.is_on_runner = True
        row = row_plan(sequence, num_tokens, drafts or [])
        is_pending = row.sample and row.num_prompt_logprobs is None and sequence.may_continue()
        sequence.num_in_flight += num_tokens
        sequence.num_pending += is_pending
        sequence.last_step = self.step
        self._rows.append(row)
        self._copies.extend(copies)
        self.planned.append(Planned(sequence, sequence.epoch, num_tokens, drafts or [], is_pending))

    def step_plan(self, freed_rows: list[int], adapter_loads: list[tuple[int, str]]) -> StepPlan:
        return StepPlan(
            step=self.step,
            new_rows=self._new_rows,
            freed_rows=freed_rows,
            adapter_loads=adapter_loads,
            copies=self._copies,
            rows=self._rows,
        )


def row_plan(sequence: Sequence, num_tokens: int, drafts: list[int]) -> RowPlan:
    state = sequence.state
    start = sequence.planned
    end = start + num_tokens
    num_known = len(sequence.window)
    draws = end == num_known + sequence.num_pending and sequence.is_whole and state.draws_tokens
    is_scored = state.wants_prompt_logprobs and end + sequence.num_dropped > state.num_scored
    fed = sequence.window[start:end] if end <= num_known else [PENDING]
    assert len(fed) == num_tokens, "a row computes known tokens, or the pending one of a step in flight"
    return RowPlan(
        row=sequence.row,
        start=start,
        token_ids=fed + drafts,
        table_updates=sequence.held_table.updates(),
        sample=draws,
        num_drafts=len(drafts),
        output_index=sequence.num_outputs + sequence.num_pending,
        num_logprobs=state.output_mode.num_logprobs if draws else None,
        num_prompt_logprobs=state.request.params.prompt_logprobs if is_scored else None,
        num_dropped=sequence.num_dropped,
    )


# ── plans in flight ────────────────────────────────────────────────────────────────────────────────────


class Holding(NamedTuple):
    """The blocks and the row of a sequence that has ended or was preempted."""

    table: BlockTable
    row: int
    is_on_runner: bool  # the next plan must report the row as freed


class StepInFlight(NamedTuple):
    plan: StepPlan
    planned: list[Planned]
    releases: list[Holding]


class StepsInFlight:
    """The plans in flight, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.next_step = 0  # the id of the next plan

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    def add(self, plan: StepPlan, planned: list[Planned]) -> None:
        assert plan.step == self.next_step
        self._steps.append(StepInFlight(plan, planned, []))
        self.next_step += 1

    def pop(self, step: int) -> StepInFlight:
        """Remove and return the oldest step, which must be this one: results arrive in the order of the plans."""
        oldest = self._steps.popleft()
        assert oldest.plan.step == step, f"a result of step {step} where step {oldest.plan.step} is the oldest"
        return oldest

    def holds(self, sequence: Sequence) -> bool:
        """Tell whether a step in flight has a row of the sequence, even a void one."""
        return sequence.last_step >= self.next_step - len(self._steps)

    def release_later(self, sequence: Sequence, holding: Holding) -> None:
        """Free a holding when the last step with a row of the sequence is applied."""
        oldest = self.next_step - len(self._steps)
        self._steps[sequence.last_step - oldest].releases.append(holding)

    @property
    def releases(self) -> list[Holding]:
        """The holdings that will be freed when the steps in flight are applied."""
        return [holding for step in self._steps for holding in step.releases]
