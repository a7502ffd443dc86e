"""Speculative decoding: the interface between the scheduler and a proposer of draft tokens. A rejected draft costs
computation but never changes a token.

    tokens:   [ computed | wanted | drafts ]       the step samples after the last wanted token and after each draft
    sampled:                     [ a b c x ]       of the drafts a b c d three are accepted; x is the next token
    then:     [ computed ......... a b c | x ]     the KV entries of a b c stay, that of d is overwritten

A draft is accepted if it equals the token that the model samples at that position with that position's random number:
the tokens of a sequence are the same with and without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.speculate.draft_state import DraftRequest, DraftState
from tokenmill.types import StepPlan, StepResult

log = logging.getLogger(__name__)

NumAllowed = Callable[[int, Seq[int]], int]
"""(row, drafts) → how many of the first drafts the row's grammar allows"""


class Drafter(Protocol):
    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        """Return drafts for the running sequences that sample in the next step."""
        ...

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        """Note the measured duration of a step."""
        ...

    def note_end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
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
    """A proposer of draft tokens (`speculate/`), independent of the scheduler's classes."""

    def propose(self, requests: Seq[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]: ...

    def note_step(self, num_tokens: int, seconds: float) -> None: ...

    def note_end(self, draft_state: DraftState, tokens: Seq[int], prompt_len: int) -> None: ...


class Drafting:
    """Requests drafts from a proposer for the sequences that can use them, and drops those that a grammar forbids.

    Answers do not depend on drafts: a proposer that raises is dropped, with its draft model, and the engine continues
    without one.
    """

    def __init__(self, speculation: Speculation, num_allowed: NumAllowed, token_budget: int) -> None:
        self._speculation: Speculation | None = speculation
        self._num_allowed = num_allowed
        self._token_budget = token_budget

    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        if self._speculation is None:
            return {}
        candidates = [
            (sequence, max_drafts)
            for group in groups
            for sequence in group.members
            if (max_drafts := room_for_drafts(group, sequence)) > 0
        ]
        if not candidates:
            return {}
        num_rows = sum(len(group.members) for group in groups)
        num_tokens = sum(group.wants(sequence) for group in groups for sequence in group.members)
        requests = [draft_request(sequence, max_drafts) for sequence, max_drafts in candidates]
        try:
            found = self._speculation.propose(requests, num_rows, min(num_tokens, self._token_budget))
        except Exception:
            log.exception("speculation failed and is turned off; answers stay the same but are slower")
            self._speculation = None
            return {}
        pairs = zip(candidates, found, strict=True)
        return {sequence: drafts for (sequence, _), proposed in pairs if (drafts := self._allowed(sequence, proposed))}

    def _allowed(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        if not drafts or sequence.state.request.params.guided is None:
            return drafts
        return drafts[: self._num_allowed(sequence.row, drafts)]

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        """Note the duration of a step without prompt chunks, whose tokens are not sampled and so are cheaper than
        drafts."""
        if self._speculation is not None and all(
            row.sample and len(row.token_ids) == 1 + row.num_drafts for row in plan.rows
        ):
            self._speculation.note_step(plan.num_tokens, result.step_s)

    def note_end(self, sequence: Sequence) -> None:
        if self._speculation is not None and sequence.draft_state is not None:
            self._speculation.note_end(sequence.draft_state, sequence.tokens, sequence.prompt_len)


def draft_request(sequence: Sequence, max_drafts: int) -> DraftRequest:
    request = sequence.state.request
    if sequence.draft_state is None:
        sequence.draft_state = DraftState(request.cache_salt)
    return DraftRequest(
        sequence.draft_state,
        sequence.tokens,
        sequence.prompt_len,
        max_drafts,
        sequence.row,
        request.params,
        sequence.seed,
    )


def num_accepted_drafts(drafts: Seq[int], sampled: Seq[int]) -> int:
    """Return how many of the first drafts equal the sampled tokens. The last sampled token does not count: it was not
    computed as a draft."""
    count = 0
    for draft, token in zip(drafts, sampled[:-1], strict=False):
        if draft != token:
            break
        count += 1
    return count


def room_for_drafts(group: SequenceGroup, sequence: Sequence) -> int:
    """Return how many drafts a sequence can use: one token is sampled anyway, and the last one is never computed.

    0 for beams; before the prompt's samples have forked or its logprobs are complete; and while the runner does not
    have the row, or a step of it is in flight. Drafts must fit into a context that shifts.
    """
    state, shift = sequence.state, sequence.state.request.shift
    is_excluded = (
        group.pending_forks or state.output_mode.holds_back or not state.draws_tokens or state.wants_prompt_logprobs
    )
    if is_excluded or not sequence.is_on_runner or sequence.num_in_flight or not sequence.is_whole:
        return 0
    max_drafts = state.request.max_tokens - sequence.num_outputs - 1
    return max(0, max_drafts if shift is None else min(max_drafts, shift.context - len(sequence.window)))
