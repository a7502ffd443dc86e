"""Building the plan of one step: its rows, and the tokens that they may have.

A plan treats the steps in flight as done (`Sequence.planned`, `Sequence.num_pending`).

Of a step's tokens, one is reserved for every running sequence; the rest is for prompt chunks and new groups:

    total:  [ one each for the running sequences not planned yet | available to the sequence being planned ]

So a long prompt gets the surplus and never the token that a decoding sequence needs.

Background requests (`BACKGROUND_PRIORITY` and above: lines of batches) get a share of the tokens, so that they hardly
slow interactive requests down; rows without tokens in a step keep their blocks:

    a prompt of an interactive request is computed     none: its first token does not wait for background requests
    interactive requests exist, or did recently        a small share: the next request waits only for a short step
    no interactive requests                            all tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tokenmill.scheduler.request import Sequence
from tokenmill.types import BACKGROUND_PRIORITY, PENDING, RowInit, RowPlan, StepPlan

BACKGROUND_DIVISOR = 16  # background requests get 1/16 of the tokens while there are interactive requests
INTERACTIVE_GRACE_S = 5.0  # interactive requests count as present for this long after the last one ended


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


# ── tokens ─────────────────────────────────────────────────────────────────────────────────────────────


class TokenBudget:
    """The tokens of one step."""

    def __init__(self, total: int, num_running: int, for_prompts: Callable[[], int] | None = None) -> None:
        """`for_prompts`: returns the most prompt tokens of the step; called once, for the first prompt."""
        self.left = total
        self._reserved = num_running
        self._for_prompts = for_prompts
        self._prompts_left: int | None = None

    def grant(self, num_wanted: int) -> int:
        """Grant tokens to a running sequence, releasing the one reserved for it."""
        self.unreserve(1)
        return self.spend(num_wanted) if num_wanted <= 1 else self.spend_on_prompt(num_wanted)

    def spend_on_prompt(self, num_wanted: int) -> int:
        """Grant tokens to a sequence that computes several (usually a prompt): at least one if any is left."""
        if self._for_prompts is None:
            return self.spend(num_wanted)
        granted = self.spend(min(num_wanted, max(1, self._prompts())))
        self._prompts_left = self._prompts() - granted
        return granted

    def _prompts(self) -> int:
        if self._prompts_left is None:
            assert self._for_prompts is not None
            self._prompts_left = self._for_prompts()
        return self._prompts_left

    @property
    def has_prompt_tokens(self) -> bool:
        """Tell whether tokens are left for a new group's prompt."""
        return self.spare > 0 and (self._for_prompts is None or self._prompts() > 0)

    def spend(self, num_wanted: int) -> int:
        """Grant as many of the wanted tokens as are neither spent nor reserved."""
        granted = max(0, min(num_wanted, self.left - self._reserved))
        self.left -= granted
        return granted

    def refund(self, num_tokens: int) -> None:
        """Return tokens to the budget that were granted and will not be computed."""
        self.left += num_tokens
        if self._prompts_left is not None and num_tokens > 1:
            self._prompts_left += num_tokens

    @property
    def spare(self) -> int:
        """The number of tokens that could be spent now."""
        return max(0, self.left - self._reserved)

    def unreserve(self, num_sequences: int) -> None:
        self._reserved = max(0, self._reserved - num_sequences)


class BackgroundShare:
    """Counts background and interactive requests, and limits the tokens of background requests."""

    def __init__(self, num_tokens: int, clock: Callable[[], float]) -> None:
        self.num_requests = 0
        self._num_tokens = num_tokens
        self._clock = clock
        self._num_interactive = 0
        self._interactive_ended_s = float("-inf")

    def note_added(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests += 1
        else:
            self._num_interactive += 1

    def note_closed(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests -= 1
        else:
            self._num_interactive -= 1
            self._interactive_ended_s = self._clock()

    def num_tokens(self) -> int:
        """Return the most background tokens of a step that computes no interactive prompt."""
        if self._num_interactive or self._clock() - self._interactive_ended_s < INTERACTIVE_GRACE_S:
            return max(1, self._num_tokens // BACKGROUND_DIVISOR)
        return self._num_tokens
