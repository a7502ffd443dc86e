"""Bit masks of the allowed next tokens: int32 [masks, ceil(vocab / 32)], lowest bit first.

The table is allocated once, with one mask for every row of the runner; rows with drafts have further masks at the end,
one per draft. A separate thread computes the masks of a step while the model computes (llguidance releases the GIL and
uses several cores); a reader waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from tokenmill.guided.matcher import RowGrammar

Table = NDArray[np.int32]


class StepMasks:
    """The masks of one step, which may not be complete yet."""

    def __init__(self, table: Table, computing: Future[None] | None, draft_masks: Mapping[int, int]) -> None:
        """`draft_masks`: for rows with drafts, the index of the mask after their first draft."""
        self._table = table
        self._computing = computing
        self._draft_masks = draft_masks

    def bits(self, rows: Sequence[int], num_drafts: Sequence[int] = ()) -> NDArray[np.uint8]:
        """Return uint8 [len(rows), 4 * ceil(vocab / 32)]: bit b of byte k says whether token 8k + b may be sampled.

        `num_drafts`: for each row, the number of its drafts after which it is sampled; 0 by default.
        """
        self.wait()
        pairs = zip(rows, num_drafts or [0] * len(rows), strict=True)
        return self._table[[self._draft_masks[row] + n - 1 if n else row for row, n in pairs]].view(np.uint8)

    @property
    def num_words(self) -> int:
        """The length of a mask in int32."""
        return int(self._table.shape[1])

    def copy_to(self, room: Table, rows: Sequence[int]) -> None:
        """Copy the masks of rows without drafts into int32 [len(rows), num_words]."""
        self.wait()
        np.take(self._table, rows, axis=0, out=room, mode="clip")  # the default "raise" makes another copy

    def wait(self) -> None:
        """Wait until the masks are computed."""
        if self._computing is not None:
            self._computing.result()


class MaskTable:
    """The masks of all rows, reused by every step, and the thread that computes them."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._num_rows = num_rows
        self._table: Table = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def start(self, grammars: Mapping[int, RowGrammar], drafts: Mapping[int, Sequence[int]]) -> StepMasks:
        """Start computing the masks of a step. `grammars`: those of the sampling rows; `drafts`: the draft tokens of
        rows that have some."""
        draft_masks = self._place_draft_masks(drafts)
        masked: dict[int, RowGrammar] = {}
        for row, grammar in grammars.items():
            if choices := grammar.choices:
                allow_only(self._table[row], choices)
            else:
                masked[row] = grammar
        if not masked and not drafts:
            return StepMasks(self._table, None, draft_masks)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
            self._executor = LLExecutor()
        walks = [(grammars[row], list(tokens), draft_masks[row]) for row, tokens in drafts.items()]
        return StepMasks(self._table, self._thread.submit(self._fill, masked, walks), draft_masks)

    def _place_draft_masks(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Assign masks to drafts. This may replace the table: the masks of the previous step have been read already."""
        draft_masks: dict[int, int] = {}
        end = self._num_rows
        for row, tokens in drafts.items():
            draft_masks[row] = end
            end += len(tokens)
        if end > len(self._table):
            self._table = np.zeros((end + self._num_rows, self._table.shape[1]), np.int32)
        return draft_masks

    def _fill(self, masked: dict[int, RowGrammar], walks: list[tuple[RowGrammar, list[int], int]]) -> None:
        assert self._executor is not None
        targets = [(grammar.matcher.ll, row) for row, grammar in masked.items()]
        mask_bytes = self._table.shape[1] * self._table.itemsize
        if targets:
            self._executor.unsafe_compute_mask_ptr(targets, self._table.ctypes.data, mask_bytes, len(self._table))
        for row, grammar in masked.items():
            if grammar.matcher.ll.is_error():
                fill_after_recovery(grammar, self._table[row])
        for grammar, drafts, first in walks:
            fill_draft_masks(grammar, drafts, self._table[first : first + len(drafts)])


def allow_only(mask: Table, token_ids: Sequence[int]) -> None:
    """Write a mask that allows exactly these tokens."""
    mask[:] = 0
    for token_id in token_ids:
        mask.view(np.uint8)[token_id // 8] |= 1 << token_id % 8


def fill_after_recovery(grammar: RowGrammar, mask: Table) -> None:
    """Write the mask of a row whose matcher exceeded a limit. If no other lexer is available, the mask allows nothing
    and the row fails."""
    mask[:] = 0
    while grammar.failure is None and grammar.matcher.ll.is_error():
        grammar.recover()
        if choices := grammar.choices:
            allow_only(mask, choices)
        elif grammar.failure is None:
            grammar.matcher.fill(mask)
    if grammar.failure is not None:
        mask[:] = 0


def fill_draft_masks(grammar: RowGrammar, drafts: Sequence[int], masks: Table) -> None:
    """Write the mask after each draft, up to the first draft that is not allowed; further masks allow nothing."""
    _fill_walk(grammar, drafts, masks)
    while grammar.has_walk_failed and grammar.failure is None:
        grammar.reopen()
        _fill_walk(grammar, drafts, masks)
    if grammar.failure is not None:
        masks[:] = 0


def _fill_walk(grammar: RowGrammar, drafts: Sequence[int], masks: Table) -> None:
    masks[:] = 0
    for mask, choices in zip(masks, grammar.walk(drafts), strict=False):
        if choices:
            allow_only(mask, choices)
        else:
            grammar.matcher.fill(mask)
