"""Finding the request that makes steps fail, so that only this request ends with an error.

The exception of a failed step does not tell which request caused it. The step's requests are preempted (they keep their
tokens) and retried in halves; meanwhile only the current half is planned:

    a b c d e f g h    fails
    a b c d            fails       e f g h waits
    a b                passes
    c d                fails
    c                  fails: c ends with an error
    d                  passes
    e f g h            passes, and all continue together

A request has passed when it has a new token or has ended. If all pass separately but fail together again (for example
for lack of memory), the requests of such a step end after a few rounds, so that the search does not block the other
requests forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.scheduler.request import RequestState

MAX_UNEXPLAINED = 3  # failures in which each half passed on its own


class Suspects:
    def __init__(self) -> None:
        # Sets of suspects, each with the number of tokens that they had; the first set is being retried.
        self.sets: list[dict[str, int]] = []
        self._num_unexplained = 0

    def current(self, states: Mapping[str, RequestState]) -> Mapping[str, int]:
        """Return the requests that the next step is restricted to; empty: there is no restriction."""
        while self.sets:
            suspects = self.sets[0]
            for name in [name for name, num_before in suspects.items() if has_passed(states.get(name), num_before)]:
                del suspects[name]
            if suspects:
                return suspects
            del self.sets[0]
        return {}

    def note_failure(self, states: Sequence[RequestState]) -> Sequence[RequestState]:
        """Return which of these requests caused their step to fail; empty if that is not known yet: then halves of them
        are retried next."""
        tried = {state.request.request_id: num_tokens(state) for state in states}
        if not self.sets:
            self._num_unexplained += 1
        if len(states) <= 1 or self._num_unexplained > MAX_UNEXPLAINED:
            self._num_unexplained = 0
            self._remove(tried)
            return states
        self._remove(tried)
        names = list(tried)
        half = len(names) // 2
        self.sets[:0] = [{name: tried[name] for name in part} for part in (names[:half], names[half:])]
        return []

    def clear(self) -> None:
        """End the search: all requests continue together."""
        self.sets.clear()

    def _remove(self, names: Mapping[str, int]) -> None:
        """Remove requests from the sets of suspects."""
        self.sets = [left for one in self.sets if (left := {name: one[name] for name in one if name not in names})]


def has_passed(state: RequestState | None, num_before: int) -> bool:
    return state is None or num_tokens(state) > num_before


def num_tokens(state: RequestState) -> int:
    """Return the progress of a request: the tokens of its longest sequence."""
    return max((len(sequence.tokens) for sequence in state.sequences()), default=0)
