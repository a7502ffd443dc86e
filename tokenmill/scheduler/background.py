"""Background requests: what lines of batches may have of a step, so that interactive requests hardly notice them.

    a prompt of another request is being computed    nothing: its first token does not wait for them
    others are here, or were a moment ago            a small part: whoever comes next waits for a short step only
    nobody else                                      everything

A request is one of the background if its priority is at least `BACKGROUND_PRIORITY`. Rows that get nothing in a step
keep their place and blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.types import BACKGROUND_PRIORITY

PART = 16  # the background's tokens of a step while others are here: one in so many
QUIET_S = 5.0  # others count as here for so long after they left


class BackgroundShare:
    """Counts background requests and others, and says how many tokens of a step the former may have."""

    def __init__(self, num_tokens: int, clock: Callable[[], float]) -> None:
        self.num_requests = 0
        self._num_tokens = num_tokens
        self._clock = clock
        self._num_others = 0
        self._others_left_s = float("-inf")

    def note_added(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests += 1
        else:
            self._num_others += 1

    def note_closed(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests -= 1
        else:
            self._num_others -= 1
            self._others_left_s = self._clock()

    def num_tokens(self) -> int:
        """The most tokens of a step that computes no prompt of others."""
        if self._num_others or self._clock() - self._others_left_s < QUIET_S:
            return max(1, self._num_tokens // PART)
        return self._num_tokens
