"""How long a sequence has been thinking, and what closes its think section once the budget is spent.

    <think> t t t t t </think> answer ...        with a budget of 3:   <think> t t t </think> answer ...

Sections are told by the tokens of their markers; all of them together have one budget, so that opening a second one
gains nothing. A prompt may end inside a section (many chat templates do): what it holds of one does not count.
"""

from __future__ import annotations

from collections.abc import Sequence


class Thinking:
    def __init__(self, budget: int, start_ids: Sequence[int], end_ids: Sequence[int], *, is_open: bool) -> None:
        self._budget = budget
        self._start_ids, self._end_ids = list(start_ids), list(end_ids)
        self._is_open = is_open
        self._num_thought = 0
        self._tail: list[int] = []  # the last output tokens, as many as a marker may have

    def record(self, token: int) -> None:
        self._tail = [*self._tail, token][-max(len(self._start_ids), len(self._end_ids)) :]
        self._num_thought += self._is_open
        if self._is_open and self._tail[-len(self._end_ids) :] == self._end_ids:
            self._is_open = False
            self._num_thought -= len(self._end_ids)  # the marker is no thought
        elif not self._is_open and self._tail[-len(self._start_ids) :] == self._start_ids:
            self._is_open = True

    def forced(self) -> int | None:
        """The one token that may come next: the closing marker's next, once the budget is spent."""
        written = self._num_written()
        if not self._is_open or self._num_thought - written < self._budget:
            return None
        return self._end_ids[written]

    def _num_written(self) -> int:
        """How much of the closing marker the output already ends with."""
        longest = min(len(self._tail), len(self._end_ids) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._tail[-n:] == self._end_ids[:n]), 0)
