"""Which tokens may come next, one bit each: int32 [rows, ceil(vocab / 32)], lowest bit first.

The table is allocated once, a line for every row of the runner. A step's masks are computed in a thread of their own
(llguidance works without Python's lock, on several cores where there are some) while the model computes; whoever reads
them waits for what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from tokenmill.guided.matcher import Matcher


class StepMasks:
    """The masks of one step, perhaps still being computed."""

    def __init__(self, table: NDArray[np.int32], computing: Future[None] | None) -> None:
        self._table = table
        self._computing = computing

    def bits(self, rows: Sequence[int]) -> NDArray[np.uint8]:
        """uint8 [len(rows), 4 * ceil(vocab / 32)]: bit b of byte k says whether token 8k + b may be drawn."""
        self.wait()
        return self._table[list(rows)].view(np.uint8)

    def wait(self) -> None:
        if self._computing is not None:
            self._computing.result()


class MaskTable:
    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._table: NDArray[np.int32] = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def start(self, matchers: Mapping[int, Matcher], forced: Mapping[int, int]) -> StepMasks:
        """`matchers`: by row, asked what they allow. `forced`: by row, the one token that is allowed."""
        for row, token_id in forced.items():
            self._table[row] = 0
            self._table[row].view(np.uint8)[token_id // 8] = 1 << token_id % 8
        if not matchers:
            return StepMasks(self._table, None)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
            self._executor = LLExecutor()
        return StepMasks(self._table, self._thread.submit(self._fill, dict(matchers)))

    def _fill(self, matchers: dict[int, Matcher]) -> None:
        assert self._executor is not None
        targets = [(matcher.ll, row) for row, matcher in matchers.items()]
        line_bytes = self._table.shape[1] * self._table.itemsize
        self._executor.unsafe_compute_mask_ptr(targets, self._table.ctypes.data, line_bytes, self._table.shape[0])
        for row, matcher in matchers.items():
            if matcher.error is not None:
                self._table[row] = 0  # nothing may be drawn; the row's request ends with the matcher's error
