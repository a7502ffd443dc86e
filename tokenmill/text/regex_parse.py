"""Parser of regular expressions that can be matched in linear time.

    alternatives    a|b                repeats   * + ? {2} {2,} {2,5}
    groups          (...) (?:...)      classes   [a-z] [^"] \\d \\w \\s \\D \\W \\S
    any character   .                  (?s) at the beginning: line breaks too; (?i): ignore case

Back-references, lookaround and anchors (\\1, (?=...), \\b, ^, $) are refused by name: they have no meaning in a stream,
or no linear-time matching. Greedy and lazy repeats are the same, because the first match to complete wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from tokenmill.errors import InvalidRequest

MAX_NESTING = 50
MAX_REPEATS = 1000
MAX_SIZE = 600  # characters of all patterns together, with repeats expanded

Test = Callable[[str], bool]


@dataclass(frozen=True)
class Chars:
    """One character that passes the test."""

    test: Test
    size: int = 1


@dataclass(frozen=True)
class InOrder:
    parts: list[Node]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.size for part in self.parts))


@dataclass(frozen=True)
class Either:
    parts: list[Node]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.size for part in self.parts) + len(self.parts))


@dataclass(frozen=True)
class Repeat:
    """A part repeated `low` to `high` times; without `high`, without limit."""

    part: Node
    low: int
    high: int | None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        times = self.low + 1 if self.high is None else self.high
        object.__setattr__(self, "size", (self.part.size + 1) * max(1, times))


Node = Chars | InOrder | Either | Repeat

CLASSES: dict[str, Test] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
    "D": lambda char: not char.isdecimal(),
    "W": lambda char: not (char.isalnum() or char == "_"),
    "S": lambda char: not char.isspace(),
}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
HEX_DIGITS = {"x": 2, "u": 4}


class Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._depth = 0
        self._ignores_case = self._dot_matches_newline = False

    def parse(self) -> Node:
        self._flags()
        node = self._either()
        if self._position < len(self._pattern):
            self._refuse("has an unmatched )")
        if node.size > MAX_SIZE:
            self._refuse(f"is too large: more than {MAX_SIZE} characters with repeats expanded")
        return node

    # ── structure ──────────────────────────────────────────────────────────────────────────────────────

    def _flags(self) -> None:
        for flags in ("(?i)", "(?s)", "(?is)", "(?si)"):
            if self._pattern.startswith(flags):
                self._ignores_case, self._dot_matches_newline = "i" in flags, "s" in flags
                self._position = len(flags)

    def _either(self) -> Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(parts)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else InOrder(parts)

    def _repeated(self, part: Node) -> Node:
        times = self._times()
        if times is None:
            return part
        repeated = Repeat(part, *times)
        if repeated.size > MAX_SIZE:
            self._refuse(f"is too large: more than {MAX_SIZE} characters with repeats expanded")
        self._take("?")  # lazy: the same as greedy here
        if self._times() is not None:
            self._refuse("repeats a repeat, which is not supported")
        return repeated

    def _times(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        end = self._pattern.find("}", self._position)
        if not self._pattern.startswith("{", self._position) or end < 0:
            return None
        low, comma, high = self._pattern[self._position + 1 : end].partition(",")
        if not all(part == "" or part.isdecimal() for part in (low, high)) or not (low or high):
            return None  # a brace that is not a repeat is a plain character
        self._position = end + 1
        minimum = int(low[:9] or 0)
        maximum = (int(high[:9]) if high else None) if comma else minimum
        if max(minimum, maximum or 0) > MAX_REPEATS or (maximum is not None and maximum < minimum):
            self._refuse(f"has a repeat {{{low}{comma}{high}}} that is out of order or above {MAX_REPEATS}")
        return minimum, maximum

    def _group(self) -> Node:
        if self._take("?"):
            if self._take("P<") and (end := self._pattern.find(">", self._position)) > 0:
                self._position = end + 1
            elif not self._take(":"):
                self._refuse("has a lookaround or a flag group, which is not supported")
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._refuse(f"is nested deeper than {MAX_NESTING}")
        node = self._either()
        if not self._take(")"):
            self._refuse("has a ( that is never closed")
        self._depth -= 1
        return node

    # ── characters ─────────────────────────────────────────────────────────────────────────────────────

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char in "^$":
            self._refuse(f"has the anchor {char}, which is not supported: a stop may be anywhere in the text")
        if char in "*+?":
            self._refuse(f"has a {char} that repeats nothing")
        if char == "[":
            return Chars(self._class())
        if char == ".":
            return Chars((lambda one: True) if self._dot_matches_newline else (lambda one: one != "\n"))
        if char == "\\":
            escaped = self._escaped()
            return Chars(escaped if callable(escaped) else self._equals(escaped))
        return Chars(self._equals(char))

    def _escaped(self) -> str | Test:
        char = self._next()
        if char in CLASSES:
            return CLASSES[char]
        if char in CONTROLS:
            return CONTROLS[char]
        if char in HEX_DIGITS:
            digits = self._pattern[self._position : self._position + HEX_DIGITS[char]]
            self._position += len(digits)
            if len(digits) < HEX_DIGITS[char] or not all(one in "0123456789abcdefABCDEF" for one in digits):
                self._refuse(f"has \\{char} without its {HEX_DIGITS[char]} digits")
            return chr(int(digits, 16))
        if char.isalnum():
            self._refuse(f"has \\{char}, which is not supported")
        return char

    def _class(self) -> Test:
        is_negated = self._take("^")
        tests: list[Test] = []
        is_first = True
        while is_first or not self._pattern.startswith("]", self._position):
            is_first = False
            tests.append(self._class_part())
        self._position += 1
        found = tuple(tests)
        return (
            (lambda one: not any(test(one) for test in found))
            if is_negated
            else (lambda one: any(test(one) for test in found))
        )

    def _class_part(self) -> Test:
        low = self._class_char()
        if callable(low):
            return low
        rest = self._pattern[self._position : self._position + 2]
        if not rest.startswith("-") or rest in ("-", "-]"):
            return self._equals(low)
        self._position += 1
        high = self._class_char()
        if callable(high) or high < low:
            self._refuse("has a class with a range out of order")
        return self._between(low, high)

    def _class_char(self) -> str | Test:
        char = self._next()
        return self._escaped() if char == "\\" else char

    def _equals(self, char: str) -> Test:
        return self._between(char, char)

    def _between(self, low: str, high: str) -> Test:
        if not self._ignores_case:
            return lambda one: low <= one <= high
        return lambda one: low <= one <= high or low <= one.lower() <= high or low <= one.upper() <= high

    def _next(self) -> str:
        if self._position >= len(self._pattern):
            self._refuse("ends unexpectedly")
        self._position += 1
        return self._pattern[self._position - 1]

    def _take(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._position)
        self._position += len(text) * is_next
        return is_next

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidRequest(f"stop_regex {self._pattern[:60]!r} {problem}", param="stop_regex")
