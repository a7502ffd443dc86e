"""Stop strings in a stream: text comes in pieces cut anywhere, and goes out as soon as it can't belong to a stop.

    arrived   "... the end" + " of"        stop "end of story"
    sent      "... the "                   held back: "end of"

What is held back is the longest end of the text that begins a stop string. One automaton (Aho and Corasick's)
tracks that for all stop strings at once: each character moves it one step, nothing is read twice. Of several stop
strings the one that begins first wins; of those that begin together, the shortest, as it is complete first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tokenmill.errors import InvalidRequest


class StopStrings:
    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise InvalidRequest("a stop string is empty", param="stop")
        self._include_stop = include_stop
        self._next: list[dict[str, int]] = [{}]  # state → character → state
        self._depth = [0]  # state → how many characters it has matched
        self._whole: list[str | None] = [None]  # state → the stop string that ends here, the longest if several
        for stop in stops:
            self._insert(stop)
        self._fallback = self._linked()
        self._state = 0
        self._held = ""
        self._found: tuple[int, str] | None = None  # start (from the end of sent text) and stop string
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """What of the text may be sent now, and the stop string that was met, if any. After a match all is dropped."""
        if self._matched is not None:
            return "", self._matched
        if len(self._next) == 1:
            return text, None
        known = len(self._held)
        self._held += text
        for position in range(known, len(self._held)):
            if self._advance(self._held[position], position + 1):
                return self._end(), self._matched
        return self._release(), None

    def flush(self) -> str:
        """The text is over: what was held back, unless a stop string was met in it."""
        if self._matched is None and self._found is not None:
            return self._end()
        held, self._held, self._state = self._held, "", 0
        return "" if self._matched is not None else held

    # ── the automaton ──────────────────────────────────────────────────────────────────────────────────

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._whole.append(None)
            state = self._next[state][char]
        self._whole[state] = stop

    def _linked(self) -> list[int]:
        """For each state the state of its longest proper end that also begins a stop string, breadth first."""
        fallback = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            if self._whole[state] is None:
                self._whole[state] = self._whole[fallback[state]]
            for char, child in self._next[state].items():
                fallback[child] = self._step(fallback[state], char, fallback)
                waiting.append(child)
        return fallback

    def _step(self, state: int, char: str, fallback: list[int]) -> int:
        while state and char not in self._next[state]:
            state = fallback[state]
        return self._next[state].get(char, 0)

    def _advance(self, char: str, end: int) -> bool:
        """Take one character; true once no stop string can begin before the first one found."""
        self._state = self._step(self._state, char, self._fallback)
        stop = self._whole[self._state]
        if stop is not None and (self._found is None or end - len(stop) < self._found[0]):
            self._found = (end - len(stop), stop)
        # The automaton's own match begins at end - depth: the earliest place where one could still begin.
        return self._found is not None and end - self._depth[self._state] >= self._found[0]

    def _end(self) -> str:
        assert self._found is not None
        start, self._matched = self._found
        sent = self._held[: start + (len(self._matched) if self._include_stop else 0)]
        self._held = ""
        return sent

    def _release(self) -> str:
        """Everything before the automaton's current match can be part of no stop string."""
        keep = self._depth[self._state]
        if self._found is not None:
            return ""
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sent
