"""A sampler that looks at so many logits at a time that its copies of them stay within what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tokenmill.guided.masks import StepMasks
from tokenmill.ops.batch import DrawParams
from tokenmill.runner.memory import MAX_HOST_LOGITS
from tokenmill.runner.runner import RowSampler
from tokenmill.sampling.draw import Sample
from tokenmill.sampling.model_sampled import HeadOutput
from tokenmill.types import RowInit, RowPlan


class SlicedSampler:
    def __init__(self, sampler: RowSampler, vocab_size: int) -> None:
        self._sampler = sampler
        self._num_rows = max(1, MAX_HOST_LOGITS // vocab_size)

    def add_row(self, new_row: RowInit) -> None:
        self._sampler.add_row(new_row)

    def free_row(self, row: int) -> None:
        self._sampler.free_row(row)

    def observe(self, rows: Sequence[RowPlan]) -> None:
        self._sampler.observe(rows)

    def needs_logits(self, rows: Sequence[RowPlan]) -> bool:
        return self._sampler.needs_logits(rows)

    def plain_draws(self, rows: Sequence[RowPlan]) -> DrawParams | None:
        return self._sampler.plain_draws(rows)

    def sample(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[Sample]:
        """Rows draw independently of each other, so it does not matter where they are cut."""
        drawn: list[Sample] = []
        for first in range(0, len(rows), self._num_rows):
            part = slice(first, first + self._num_rows)
            drawn += self._sampler.sample(logits[part], rows[part], masks)
        return drawn

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]:
        """The same where a row may have several lines: it stays in one slice with all of them."""
        drawn: list[list[Sample]] = []
        line = 0
        while len(drawn) < len(rows):
            part = self._next_slice(rows[len(drawn) :])
            num_lines = sum(1 + plan.num_drafts for plan in part)
            drawn += self._sampler.verify(logits[line : line + num_lines], part, masks)
            line += num_lines
        return drawn

    def _next_slice(self, rows: list[RowPlan]) -> list[RowPlan]:
        ends = accumulate(1 + plan.num_drafts for plan in rows)
        return rows[: max(1, sum(end <= self._num_rows for end in ends))]
