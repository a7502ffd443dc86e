"""Masks of the tokens that may come next, one bit each: int32 [lines, ceil(vocab / 32)], lowest bit first.

The table is allocated once, a line for every row of the runner; rows with drafts have further lines behind those, one
after each draft. A step's masks are computed in a thread of their own (llguidance works without Python's lock, on
several cores where there are some) while the model computes; a reader waits for masks that are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from tokenmill.guided.matcher import Matcher
from tokenmill.guided.row import RowGrammar

Table = NDArray[np.int32]


class StepMasks:
    """The masks of one step, perhaps still being computed."""

    def __init__(self, table: Table, computing: Future[None] | None, behind: Mapping[int, int]) -> None:
        """`behind`: for rows with drafts, the line of what may follow their first draft."""
        self._table = table
        self._computing = computing
        self._behind = behind

    def bits(self, rows: Sequence[int], num_drafts: Sequence[int] = ()) -> NDArray[np.uint8]:
        """uint8 [len(rows), 4 * ceil(vocab / 32)]: bit b of byte k says whether token 8k + b may be drawn.

        `num_drafts`: behind how many of its drafts each of the rows draws; none by default.
        """
        self.wait()
        places = zip(rows, num_drafts or [0] * len(rows), strict=True)
        return self._table[[self._behind[row] + n - 1 if n else row for row, n in places]].view(np.uint8)

    def wait(self) -> None:
        if self._computing is not None:
            self._computing.result()


class MaskTable:
    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._num_rows = num_rows
        self._table: Table = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def start(self, grammars: Mapping[int, RowGrammar], drafts: Mapping[int, Sequence[int]]) -> StepMasks:
        """`grammars`: of the rows that draw. `drafts`: of those that have some."""
        behind = self._lines_behind(drafts)
        matchers: dict[int, Matcher] = {}
        for row, grammar in grammars.items():
            if choices := grammar.choices:
                allow_only(self._table[row], choices)
            else:
                matchers[row] = grammar.matcher
        if not matchers and not drafts:
            return StepMasks(self._table, None, behind)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
            self._executor = LLExecutor()
        walks = [(grammars[row], list(tokens), behind[row]) for row, tokens in drafts.items()]
        return StepMasks(self._table, self._thread.submit(self._fill, matchers, walks), behind)

    def _lines_behind(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """The table may be another one afterwards: the masks of the step before have been read."""
        behind: dict[int, int] = {}
        end = self._num_rows
        for row, tokens in drafts.items():
            behind[row] = end
            end += len(tokens)
        if end > len(self._table):
            self._table = np.zeros((end + self._num_rows, self._table.shape[1]), np.int32)
        return behind

    def _fill(self, matchers: dict[int, Matcher], walks: list[tuple[RowGrammar, list[int], int]]) -> None:
        assert self._executor is not None
        targets = [(matcher.ll, row) for row, matcher in matchers.items()]
        line_bytes = self._table.shape[1] * self._table.itemsize
        if targets:
            self._executor.unsafe_compute_mask_ptr(targets, self._table.ctypes.data, line_bytes, len(self._table))
        for row, matcher in matchers.items():
            if matcher.error is not None:
                self._table[row] = 0  # nothing may be drawn; the row's request ends with the matcher's error
        for grammar, drafts, line in walks:
            fill_behind(grammar, drafts, self._table[line : line + len(drafts)])


def allow_only(line: Table, token_ids: Sequence[int]) -> None:
    line[:] = 0
    for token_id in token_ids:
        line.view(np.uint8)[token_id // 8] |= 1 << token_id % 8


def fill_behind(grammar: RowGrammar, drafts: Sequence[int], lines: Table) -> None:
    """Fill what may follow each draft token, as far as the draft tokens are allowed; behind that nothing is drawn."""
    lines[:] = 0
    for choices, line in zip(grammar.walk(drafts), lines, strict=False):
        if choices:
            allow_only(line, choices)
        else:
            grammar.matcher.fill(line)
