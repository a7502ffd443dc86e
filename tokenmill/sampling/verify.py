"""Verification of draft tokens.

Each position is sampled as it would be without drafts, with its own random number; a draft token is accepted if it
equals the sampled token. So drafts change no token, sampled or greedy, whatever the parameters: rejection sampling, as
in the literature, preserves only the distribution.

    fed           t  a  b  c           drafts a b c
    logits row    0  1  2  3           logits after t, after a, after b, after c
    sampled       a  b  x  (y)         a and b are accepted; x is the next token; y is discarded

A row whose tokens do not depend on earlier ones samples all its positions at once. Where they do (penalties and the
like), position i + 1 is sampled after position i: in waves, each with one position of every such row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tokenmill.sampling.rows import RowState
from tokenmill.sampling.samples import Sample
from tokenmill.types import RowPlan


class Verification:
    """Verification of one row's drafts: a plan per position, and the tokens accepted so far."""

    def __init__(self, plan: RowPlan, state: RowState) -> None:
        self._state = state
        self._drafts = plan.token_ids[len(plan.token_ids) - plan.num_drafts :]
        self.position_plans = [_after(plan, count) for count in range(plan.num_drafts + 1)] if self._drafts else [plan]
        self.accepted: list[Sample] = []
        self._is_active = True
        self._wave_size = 0

    def next_positions(self) -> range:
        """Return the positions of this row that are sampled in the next wave."""
        done = len(self.accepted)
        end = done + 1 if self._state.has_history else len(self.position_plans)
        wave = range(done, end if self._is_active else done)
        self._wave_size = len(wave)
        return wave

    def take(self, drawn: Iterator[Sample]) -> None:
        """Take the samples of the positions of the last wave, and keep them up to the first draft that differs."""
        for one in [next(drawn) for _ in range(self._wave_size)]:
            if self._is_active:
                self._accept(one)

    def _accept(self, one: Sample) -> None:
        position = len(self.accepted)
        if one.error is not None and position:
            self._is_active = False  # the next step samples this position first, and reports the error
            return
        self.accepted.append(one)
        if one.error is None:
            self._state.record(one.token_id, one.mirostat_mu)
        self._is_active = position < len(self._drafts) and one.token_id == self._drafts[position] and one.error is None


def accepted_of(
    plans: Sequence[RowPlan], tokens: Sequence[int], make_sample: Callable[[RowPlan, int], Sample]
) -> list[list[Sample]]:
    """Accept drafts where all positions are sampled already: `tokens`, one per position, of all plans in order."""
    found: list[list[Sample]] = []
    first = 0
    for plan in plans:
        accepted = [make_sample(plan, tokens[first])]
        for position, draft in enumerate(plan.token_ids[len(plan.token_ids) - plan.num_drafts :], 1):
            if tokens[first + position - 1] != draft:
                break
            following = make_sample(plan, tokens[first + position])
            if following.error is not None:
                break  # the next step samples this position first
            accepted.append(following)
        found.append(accepted)
        first += 1 + plan.num_drafts
    return found


def next_logits_rows(verifications: Sequence[Verification]) -> list[int]:
    """Return the logits rows to sample in the next wave, counted over all rows; empty when all are verified."""
    logits_rows: list[int] = []
    first = 0
    for verification in verifications:
        logits_rows += [first + position for position in verification.next_positions()]
        first += len(verification.position_plans)
    return logits_rows


def _after(plan: RowPlan, count: int) -> RowPlan:
    """Return the plan as it would be with only the first `count` drafts, all of them accepted."""
    return msgspec.structs.replace(plan, output_index=plan.output_index + count, num_drafts=count)
