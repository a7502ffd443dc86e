"""Stop strings and stop regexes in a stream: text is sent as soon as it cannot be part of a stop.

    arrived   "... the end" + " of"        stop "end of story"
    sent      "... the "                   held back: "end of"

Stop strings. The text held back is its longest suffix that begins a stop string. One Aho-Corasick automaton tracks that
for all stop strings together: each character moves it one step, nothing is read twice. Of several stop strings the one
that begins first wins; of those that begin together, the shortest, because it is complete first.

Stop regexes. All patterns form one Thompson automaton. All its states are followed in parallel, each with the position
where its match began, so a character costs at most one test per state, whatever the pattern. Transitions are cached, so
ordinary text costs one lookup per character.

    text      ... 4 2 \\n              pattern  \\d+\\n
    threads   began at "4", at "2"     complete at "\\n": the one that began first wins

`Stops` runs both: stop strings first, then stop regexes on the text that these let pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenmill.errors import InvalidRequest
from tokenmill.text.regex_parse import MAX_SIZE, Chars, Either, InOrder, Node, Parser, Repeat, Test


class StopStrings:
    """The search for stop strings in one stream. `include_stop`: the stop string itself is sent too."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise InvalidRequest("a stop string is empty", param="stop")
        self._include_stop = include_stop
        self._next: list[dict[str, int]] = [{}]  # state → character → state
        self._depth = [0]  # state → how many characters it has matched
        self._complete: list[str | None] = [None]  # state → the stop string that ends here, the longest if several
        for stop in stops:
            self._insert(stop)
        self._fallback = self._fallback_states()
        self._state = 0
        self._held = ""
        self._found: tuple[int, str] | None = None  # start (from the end of sent text) and stop string
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string found, if any. After a match all text is
        dropped."""
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
        """End the text: return what was held back, up to a stop string in it."""
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
                self._complete.append(None)
            state = self._next[state][char]
        self._complete[state] = stop

    def _fallback_states(self) -> list[int]:
        """Return, for each state, the state of its longest proper suffix that is also a prefix of a stop string,
        breadth first."""
        fallback = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            if self._complete[state] is None:
                self._complete[state] = self._complete[fallback[state]]
            for char, child in self._next[state].items():
                fallback[child] = self._step(fallback[state], char, fallback)
                waiting.append(child)
        return fallback

    def _step(self, state: int, char: str, fallback: list[int]) -> int:
        while state and char not in self._next[state]:
            state = fallback[state]
        return self._next[state].get(char, 0)

    def _advance(self, char: str, end: int) -> bool:
        """Process one character; return whether a stop was found and no other can still begin before it."""
        self._state = self._step(self._state, char, self._fallback)
        stop = self._complete[self._state]
        if stop is not None and (self._found is None or end - len(stop) < self._found[0]):
            self._found = (end - len(stop), stop)
        # The automaton's current match begins at end - depth, the earliest position where a stop could still begin.
        return self._found is not None and end - self._depth[self._state] >= self._found[0]

    def _end(self) -> str:
        assert self._found is not None
        start, self._matched = self._found
        sent = self._held[: start + (len(self._matched) if self._include_stop else 0)]
        self._held = ""
        return sent

    def _release(self) -> str:
        """Return the text before the automaton's current match: it cannot be part of a stop string."""
        keep = self._depth[self._state]
        if self._found is not None:
            return ""
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sent


MAX_MATCH_CHARS = 1024  # a longer partial match is abandoned, and the text it held back is sent
MAX_CACHED_STATES = 200_000  # in cached transitions: some megabytes
# Thread steps that one stream may take: a fixed number and so many per character.
BASE_STEPS, STEPS_PER_CHARACTER = 500_000, 40


@dataclass
class Automaton:
    """A nondeterministic automaton. A state is an index into `tests`, `then` and `free`."""

    tests: list[Test | None] = field(default_factory=list)  # of the character that leads on; None: reads none
    then: list[int] = field(default_factory=list)  # the state after that character
    free: list[list[int]] = field(default_factory=list)  # states reached without reading a character
    accepting: dict[int, int] = field(default_factory=dict)  # state that completes a match → index of its pattern

    def add(self, test: Test | None = None, then: int = -1, free: Sequence[int] = ()) -> int:
        self.tests.append(test)
        self.then.append(then)
        self.free.append(list(free))
        return len(self.tests) - 1

    def build(self, node: Node, then: int) -> int:
        """Return the state from which `node` is matched, followed by state `then`."""
        if isinstance(node, Chars):
            return self.add(node.test, then)
        if isinstance(node, InOrder):
            for part in reversed(node.parts):
                then = self.build(part, then)
            return then
        if isinstance(node, Either):
            return self.add(free=[self.build(part, then) for part in node.parts])
        return self._repeat(node, then)

    def _repeat(self, node: Repeat, then: int) -> int:
        if node.high is None:
            loop = self.add(free=[then])
            self.free[loop].append(self.build(node.part, loop))
            then = loop
        for _ in range((node.high or 0) - node.low):
            then = self.add(free=[then, self.build(node.part, then)])
        for _ in range(node.low):
            then = self.build(node.part, then)
        return then

    def reach(self, state: int, seen: set[int]) -> list[int]:
        """Return the states outside `seen` that `state` leads to without reading a character, and that read one or
        complete a match. Adds all visited states to `seen`."""
        waiting, found = [state], []
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            if self.tests[state] is not None or state in self.accepting:
                found.append(state)
            waiting.extend(self.free[state])
        return found


@dataclass(frozen=True)
class Move:
    """The effect of a character on the threads: their new states, the thread each continues (-1: a new one), and the
    thread that completed a match with the index of its pattern."""

    states: tuple[int, ...]
    sources: tuple[int, ...]
    match: tuple[int, int] | None


class StopPatterns:
    """Compiled patterns, shared by all streams that use them."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        trees = [Parser(pattern).parse() for pattern in patterns]
        if sum(tree.size for tree in trees) > MAX_SIZE:
            raise InvalidRequest(f"the stop_regex patterns together are larger than {MAX_SIZE}", param="stop_regex")
        automaton = Automaton()
        starts = []
        for number, tree in enumerate(trees):
            end = automaton.add()
            automaton.accepting[end] = number
            starts.append(automaton.build(tree, end))
        self._automaton = automaton
        seen: set[int] = set()
        self.initial = tuple(state for start in starts for state in automaton.reach(start, seen))
        for state in self.initial:
            if state in automaton.accepting:
                empty = patterns[automaton.accepting[state]]
                raise InvalidRequest(f"stop_regex {empty[:60]!r} matches the empty text", param="stop_regex")
        self._moves: dict[tuple[tuple[int, ...], str], Move] = {}
        self._num_cached_states = 0

    def move(self, states: tuple[int, ...], char: str) -> Move:
        known = self._moves.get((states, char))
        if known is None:
            if self._num_cached_states >= MAX_CACHED_STATES:
                self._moves.clear()
                self._num_cached_states = 0
            known = self._moves[states, char] = self._compute_move(states, char)
            self._num_cached_states += len(states) + 2 * len(known.states) + 8
        return known

    def _compute_move(self, states: tuple[int, ...], char: str) -> Move:
        automaton, seen = self._automaton, set[int]()
        found: list[tuple[int, int]] = []  # (state, thread); the first thread to reach a state began first
        for thread, state in enumerate(states):
            test = automaton.tests[state]
            if test is not None and test(char):
                found += [(reached, thread) for reached in automaton.reach(automaton.then[state], seen)]
        complete = [(thread, automaton.accepting[state]) for state, thread in found if state in automaton.accepting]
        found += [(state, -1) for state in self.initial if state not in seen]
        return Move(tuple(s for s, _ in found), tuple(t for _, t in found), min(complete, default=None))


@lru_cache(maxsize=64)
def stop_patterns(patterns: tuple[str, ...]) -> StopPatterns:
    """Compile patterns, or return them from a cache. Raises InvalidRequest for an unsupported pattern."""
    return StopPatterns(patterns)


class StopRegexes:
    """The search for stop patterns in one stream, with the interface of `StopStrings`: push, flush, matched."""

    def __init__(self, patterns: StopPatterns, include_stop: bool = False) -> None:
        self._patterns = patterns
        self._include_stop = include_stop
        self._held = ""
        self._states = patterns.initial
        self._starts = [0] * len(patterns.initial)  # thread → the position in `_held` where it began
        self._steps_left = BASE_STEPS
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the pattern that matched, if any. After a match all text is
        dropped."""
        self._steps_left += STEPS_PER_CHARACTER * len(text)
        if self.matched is not None:
            return "", self.matched
        position = len(self._held)
        self._held += text
        while position < len(self._held):
            move = self._patterns.move(self._states, self._held[position])
            position += 1
            if move.match is not None:
                return self._end(self._starts[move.match[0]], position, move.match[1]), self.matched
            self._states = move.states
            self._steps_left -= len(move.states)
            if self._steps_left < 0:
                raise InvalidRequest("matching stop_regex takes too long in this answer", param="stop_regex")
            self._starts = [position if source < 0 else self._starts[source] for source in move.sources]
            if self._starts[0] < position - MAX_MATCH_CHARS:  # threads are in the order of their starts
                self._abandon_before(position - MAX_MATCH_CHARS, position)
        return self._release(), None

    def flush(self) -> str:
        """End the text: return what was held back."""
        held, self._held = self._held, ""
        self._states = self._patterns.initial
        self._starts = [0] * len(self._states)
        return "" if self.matched is not None else held

    def _end(self, start: int, end: int, pattern: int) -> str:
        self.matched = self._patterns.patterns[pattern]
        sent = self._held[: end if self._include_stop else start]
        self._held = ""
        return sent

    def _abandon_before(self, oldest: int, position: int) -> None:
        """Drop threads that began before `oldest`, and start new ones at `position` for states that became free."""
        num_old = sum(start < oldest for start in self._starts)
        kept = self._states[num_old:]
        new = tuple(state for state in self._patterns.initial if state not in kept)
        self._states, self._starts = kept + new, self._starts[num_old:] + [position] * len(new)

    def _release(self) -> str:
        keep = min(self._starts)
        sent, self._held = self._held[:keep], self._held[keep:]
        self._starts = [start - keep for start in self._starts]
        return sent


class Stops:
    """The search for all stops of one stream, strings and regexes."""

    def __init__(self, strings: Sequence[str], regexes: Sequence[str], include_stop: bool = False) -> None:
        self._strings = StopStrings(strings, include_stop)
        self._regexes = StopRegexes(stop_patterns(tuple(regexes)), include_stop) if regexes else None

    @property
    def matched(self) -> str | None:
        """The stop string or pattern found; of both, the first in the text."""
        return (self._regexes.matched if self._regexes else None) or self._strings.matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop found, if any. After a match all text is dropped."""
        if self.matched is not None:
            return "", self.matched
        sent, matched = self._strings.push(text)
        if self._regexes is None:
            return sent, matched
        sent, found = self._regexes.push(sent)
        if matched is not None and found is None:  # the text ends here: nothing can complete a pattern any more
            sent += self._regexes.flush()
        return sent, self.matched

    def flush(self) -> str:
        """End the text: return what was held back, up to a stop in it."""
        rest = self._strings.flush()
        if self._regexes is None:
            return rest
        sent, _ = self._regexes.push(rest)
        return sent + self._regexes.flush()
