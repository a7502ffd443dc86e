"""Verification of draft tokens. Each position gets the token that it would have got alone, with its own random number;
a draft token is accepted if it equals that token. So drafts change no token, sampled or greedy, whatever parameters are
set: more than the rejection sampling of the literature promises, which keeps only the distribution.

    fed       t  a  b  c           drafts a b c
    line      0  1  2  3           logits after t, after a, after b, after c
    drawn     a  b  x  (y)         a, b were right; x is the next token; y answers a question that never arose

Rows without memory draw all their lines at once. Where a draw depends on what was drawn before (penalties ...), line
i + 1 follows when line i is settled: in waves, all rows of a wave together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tokenmill.sampling.draw import Sample
from tokenmill.sampling.rows import RowState
from tokenmill.types import RowPlan


class Attempt:
    """One row's lines, and how far they are settled."""

    def __init__(self, plan: RowPlan, state: RowState) -> None:
        self._state = state
        self._drafts = plan.token_ids[len(plan.token_ids) - plan.num_drafts :]
        self.lines = [_after(plan, count) for count in range(plan.num_drafts + 1)] if self._drafts else [plan]
        self.accepted: list[Sample] = []
        self._is_open = True
        self._num_asked = 0

    def asked(self) -> range:
        """Lines of this row that are sampled in the next wave."""
        done = len(self.accepted)
        end = done + 1 if self._state.has_history else len(self.lines)
        asked = range(done, end if self._is_open else done)
        self._num_asked = len(asked)
        return asked

    def take(self, drawn: Iterator[Sample]) -> None:
        """What was drawn for the lines asked for last; keeps it up to the first draft that is not it."""
        for one in [next(drawn) for _ in range(self._num_asked)]:
            if self._is_open:
                self._settle(one)

    def _settle(self, one: Sample) -> None:
        place = len(self.accepted)
        if one.error is not None and place:
            self._is_open = False  # behind a right draft: the next step will meet it as its first draw
            return
        self.accepted.append(one)
        if one.error is None:
            self._state.record(one.token_id, one.mirostat_mu)
        self._is_open = place < len(self._drafts) and one.token_id == self._drafts[place] and one.error is None


def accepted_of(
    plans: Sequence[RowPlan], tokens: Sequence[int], told: Callable[[RowPlan, int], Sample]
) -> list[list[Sample]]:
    """The same for rows without memory whose lines are all drawn: `tokens`, one a line, of all plans in order."""
    found: list[list[Sample]] = []
    first = 0
    for plan in plans:
        accepted = [told(plan, tokens[first])]
        for place, draft in enumerate(plan.token_ids[len(plan.token_ids) - plan.num_drafts :], 1):
            if tokens[first + place - 1] != draft:
                break
            following = told(plan, tokens[first + place])
            if following.error is not None:
                break  # the next step will meet it as its first draw
            accepted.append(following)
        found.append(accepted)
        first += 1 + plan.num_drafts
    return found


def next_lines(attempts: Sequence[Attempt]) -> list[int]:
    """Numbers of the lines to draw now, counted over all attempts; none when all is settled."""
    lines: list[int] = []
    first = 0
    for attempt in attempts:
        lines += [first + place for place in attempt.asked()]
        first += len(attempt.lines)
    return lines


def _after(plan: RowPlan, count: int) -> RowPlan:
    """The plan as it would be with only the first `count` drafts, all of them right."""
    return msgspec.structs.replace(plan, output_index=plan.output_index + count, num_drafts=count)
