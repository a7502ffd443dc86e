"""Finding the request that makes steps fail, so that it alone ends with an error.

A step that raises does not say whose fault it was. Its requests lose their rows and blocks, keep their tokens, and are
tried again in halves; only those on trial are planned meanwhile:

    a b c d e f g h    fails
    a b c d            fails       e f g h waits
    a b                passes
    c d                fails
    c                  fails: c ends with an error
    d                  passes
    e f g h            passes, and all go on together

A request has passed when it has drawn another token, or is over. Where all pass apart and fail together again (memory
that many rows need at a time), the requests of such a step end after a few rounds, so that the search does not hold up
all others for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.scheduler.request import RequestState

MAX_UNEXPLAINED = 3  # failures in which each half passed on its own


class Suspects:
    def __init__(self) -> None:
        self._sets: list[dict[str, int]] = []  # by request, the tokens that it had; the first set is on trial
        self._num_unexplained = 0

    def on_trial(self, states: Mapping[str, RequestState]) -> Mapping[str, int]:
        """Return the requests that the next step is restricted to; empty: there is no restriction."""
        while self._sets:
            suspects = self._sets[0]
            for name in [name for name, had in suspects.items() if has_passed(states.get(name), had)]:
                del suspects[name]
            if suspects:
                return suspects
            del self._sets[0]
        return {}

    def note_failure(self, states: Sequence[RequestState]) -> Sequence[RequestState]:
        """Return the requests that caused a failed step of these requests; empty: not known yet, halves of them are
        tried first."""
        tried = {state.request.request_id: num_tokens(state) for state in states}
        if not self._sets:
            self._num_unexplained += 1
        if len(states) <= 1 or self._num_unexplained > MAX_UNEXPLAINED:
            self._num_unexplained = 0
            self._acquit(tried)
            return states
        self._acquit(tried)
        names = list(tried)
        half = len(names) // 2
        self._sets[:0] = [{name: tried[name] for name in part} for part in (names[:half], names[half:])]
        return []

    def give_up(self) -> None:
        """Let all go on together."""
        self._sets.clear()

    def _acquit(self, names: Mapping[str, int]) -> None:
        """Take requests out of the sets that they are in."""
        self._sets = [left for one in self._sets if (left := {k: had for k, had in one.items() if k not in names})]


def has_passed(state: RequestState | None, had: int) -> bool:
    return state is None or num_tokens(state) > had


def num_tokens(state: RequestState) -> int:
    """Return the progress of a request: the tokens of its longest sequence."""
    return max((len(sequence.tokens) for sequence in state.sequences()), default=0)
