"""Draft tokens: the interface between the scheduler and a proposer. A wrong draft costs computation and changes no
token.

    tokens:  [ computed | wanted | drafts ]        the step draws after the last wanted token and after each draft
    drawn:                      [ a b c x ]        drafts a b c d: three were right, x is the model's own next token
    then:    [ computed ......... a b c | x ]      what was computed for a b c stays, what was for d is overwritten

Right means equal to what the model drew at that position, with the random number of that position: the tokens of a
sequence are the same with and without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.speculate.draft_state import DraftRequest, DraftState
from tokenmill.types import StepPlan, StepResult

NumAllowed = Callable[[int, Seq[int]], int]
"""(row, drafts) → how many of them, in order, the row's grammar allows"""


class Drafter(Protocol):
    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        """Drafts for those of the running sequences that draw in the next step."""
        ...

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        """Learn what a step cost."""
        ...

    def note_end(self, sequence: Sequence) -> None:
        """Learn that a sequence is over."""
        ...


class _NoDrafts:
    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        return {}

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def note_end(self, sequence: Sequence) -> None:
        pass


NO_DRAFTS: Drafter = _NoDrafts()


class Speculation(Protocol):
    """A proposer of drafts that knows nothing of groups and requests (`speculate/`)."""

    def propose(self, requests: Seq[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]: ...

    def note_step(self, num_tokens: int, seconds: float) -> None: ...

    def note_end(self, draft_state: DraftState, tokens: Seq[int], prompt_len: int) -> None: ...


class Drafting:
    """Asks a proposer about the sequences that may be drafted for, and cuts what their grammars refuse."""

    def __init__(self, speculation: Speculation, num_allowed: NumAllowed, token_budget: int) -> None:
        self._speculation = speculation
        self._num_allowed = num_allowed
        self._token_budget = token_budget

    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        asked = [
            (sequence, most)
            for group in groups
            for sequence in group.members
            if (most := room_for_drafts(group, sequence)) > 0
        ]
        if not asked:
            return {}
        num_rows = sum(len(group.members) for group in groups)
        num_tokens = sum(group.wants(sequence) for group in groups for sequence in group.members)
        requests = [draft_request(sequence, most) for sequence, most in asked]
        found = self._speculation.propose(requests, num_rows, min(num_tokens, self._token_budget))
        drafts = zip(asked, found, strict=True)
        return {sequence: tokens for (sequence, _), proposed in drafts if (tokens := self._allowed(sequence, proposed))}

    def _allowed(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        if not drafts or sequence.state.request.params.guided is None:
            return drafts
        return drafts[: self._num_allowed(sequence.row, drafts)]

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        """Learn the cost of a step, unless it has prompt chunks: their tokens sample nothing, which is cheaper than
        drafts."""
        if all(row.sample and len(row.token_ids) == 1 + row.num_drafts for row in plan.rows):
            self._speculation.note_step(plan.num_tokens, result.step_s)

    def note_end(self, sequence: Sequence) -> None:
        if sequence.draft_state is not None:
            self._speculation.note_end(sequence.draft_state, sequence.tokens, sequence.prompt_len)


def draft_request(sequence: Sequence, most: int) -> DraftRequest:
    request = sequence.state.request
    if sequence.draft_state is None:
        sequence.draft_state = DraftState(request.cache_salt)
    return DraftRequest(
        sequence.draft_state, sequence.tokens, sequence.prompt_len, most, sequence.row, request.params, sequence.seed
    )


def num_right(drafts: Seq[int], drawn: Seq[int]) -> int:
    """Return how many drafts equal the sampled tokens. The last sampled token was not computed itself, so it does not
    count."""
    count = 0
    for draft, token in zip(drafts, drawn[:-1], strict=False):
        if draft != token:
            break
        count += 1
    return count


def room_for_drafts(group: SequenceGroup, sequence: Sequence) -> int:
    """Return how many drafts are useful: one token is sampled anyway, and the last one is never computed.

    0 for beams, which choose among alternatives; before the prompt's samples have forked or its logprobs are complete;
    while the runner does not have the row, or a step of it is in flight; and beyond the end of a context that shifts.
    """
    state, shift = sequence.state, sequence.state.request.shift
    is_excluded = (
        group.pending_forks or state.output_mode.holds_back or not state.draws_tokens or state.wants_prompt_logprobs
    )
    if is_excluded or not sequence.is_on_runner or sequence.num_in_flight or not sequence.is_whole:
        return 0
    most = state.request.max_tokens - sequence.num_outputs - 1
    return max(0, most if shift is None else min(most, shift.context - len(sequence.window)))
