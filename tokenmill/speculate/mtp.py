"""Speculation with a multi-token prediction (MTP) head of the model (`arch/mtp.py`, `models/mtp_head.py`).

    tokens        t0  t1 … tn           tn is sampled, and not computed yet
    states        h0  h1 … h(n-1)       kept by the runner as the model computes tokens
    the head      (t1, h0) … (tn, h(n-1)) │ a            the first draft token
                                          (a, g) │ b     g: the head's own output state at tn

Next time the head recomputes the tokens that it had computed from its own states, with those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.models.mtp_head import KeptStates, MtpHead
from tokenmill.speculate.draft_model import DraftRow
from tokenmill.speculate.draft_state import DraftRequest
from tokenmill.types import RowPlan


class HeadStates:
    """The states that are joined with the head's tokens: the model's, and for later drafts the head's own."""

    def __init__(self, head: MtpHead, kept: KeptStates) -> None:
        self._head = head
        self._kept = kept
        self._own: dict[int, torch.Tensor] = {}  # the head's output state of each row's last token

    def first_token(self, request: DraftRequest) -> int | None:
        first = self._kept.first(request.row)
        return None if first is None or not self.can_feed(request, first + 1) else first + 1

    def can_feed(self, request: DraftRequest, first: int) -> bool:
        return self._kept.of(request.row, first - 1, len(request.tokens) - 1) is not None

    def feed(self, plans: Sequence[RowPlan], rows: dict[int, DraftRow]) -> None:
        self._head.states = torch.cat([self._states(plan, rows[plan.row]) for plan in plans])

    def _states(self, plan: RowPlan, row: DraftRow) -> torch.Tensor:
        if row.drafts:
            return self._own[plan.row]
        first = row.skipped + plan.start - 1
        states = self._kept.of(plan.row, first, first + len(plan.token_ids))
        assert states is not None, "see `can_feed`"
        return states

    def take(self, plans: Sequence[RowPlan], rows: dict[int, DraftRow]) -> None:
        sampling = [plan for plan in plans if plan.sample]
        for plan, state in zip(sampling, self._head.outputs, strict=True):
            row = rows[plan.row]
            if not row.drafts:  # the model's states up to here are in the head's cache
                self._kept.forget_before(plan.row, row.skipped + plan.start + len(plan.token_ids) - 2)
            self._own[plan.row] = state.unsqueeze(0)
