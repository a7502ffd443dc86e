"""Input text that arrives in pieces, for readers written as generators: they wait by `yield from tape.more()`.

A reader can be tried and rolled back (`attempt`): the text it takes is remembered, and put back if it does not match.
`commit` makes the attempt final and forgets that text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

Steps = Generator[None, None, None]

_SPACES = re.compile(r"[ \t\r\n]*")


class Mismatch(Exception):
    """The text is not what was expected."""


class End(Exception):
    """The text has ended."""


class Tape:
    """A cursor over growing text; `text[position:]` is still unread."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_over = False
        self._taken: list[str] | None = None  # since `attempt` began

    def add(self, text: str) -> None:
        self.text = self.text[self.position :] + text if self.position < len(self.text) else text
        self.position = 0

    def more(self) -> Steps:
        """Wait for more text; raise End if the text has ended."""
        if self.is_over:
            raise End
        yield

    def take_to(self, position: int) -> str:
        """Return the text up to a position, and move there."""
        taken = self.text[self.position : position]
        self.position = position
        if self._taken is not None and taken:
            self._taken.append(taken)
        return taken

    def rest(self) -> str:
        """Return all unread text, and move to its end."""
        return self.take_to(len(self.text))

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────────────

    def attempt(self, steps: Steps) -> Generator[None, None, bool]:
        """Run a reader; if the text does not match, put back what it took, and return False."""
        self._taken = []
        try:
            yield from steps
        except (Mismatch, End):
            if self._taken is None:
                raise
            self.text = "".join(self._taken) + self.text[self.position :]
            self.position = 0
            return False
        finally:
            self._taken = None
        return True

    def commit(self) -> None:
        """Make the current attempt final: a later mismatch no longer puts text back."""
        self._taken = None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without taking it."""
        while self.position == len(self.text):
            yield from self.more()
        return self.text[self.position]

    def skip_space(self) -> Generator[None, None, str]:
        """Skip white space, and return the character after it without taking that."""
        while True:
            spaces = _SPACES.match(self.text, self.position)
            assert spaces is not None
            self.take_to(spaces.end())
            if self.position < len(self.text):
                return self.text[self.position]
            yield from self.more()

    def expect(self, fixed: str) -> Steps:
        """Read a fixed text, ignoring white space in the input; `fixed` itself contains none."""
        for char in fixed:
            if (yield from self.skip_space()) != char:
                raise Mismatch
            self.take_to(self.position + 1)

    def choose(self, options: Sequence[str]) -> Generator[None, None, int]:
        """Read one of several fixed texts, as `expect` does; return its index. If one is a prefix of another, the next
        character decides."""
        length, candidates = 0, [index for index, option in enumerate(options) if option]
        while True:
            char = yield from self.skip_space()
            candidates = [index for index in candidates if options[index][length] == char]
            if not candidates:
                raise Mismatch
            self.take_to(self.position + 1)
            length += 1
            complete = next((index for index in candidates if len(options[index]) == length), None)
            if complete is None:
                continue
            longer = [index for index in candidates if len(options[index]) > length]
            if not longer or (yield from self.skip_space()) not in {options[index][length] for index in longer}:
                return complete
            candidates = longer

    def run(self, stop: re.Pattern[str], max_length: int) -> Generator[None, None, str]:
        """Read up to a character that matches `stop`, without taking that."""
        taken = ""
        while True:
            found = stop.search(self.text, self.position)
            taken += self.take_to(found.start() if found else len(self.text))
            if len(taken) > max_length:
                raise Mismatch
            if found:
                return taken
            yield from self.more()

    def until(self, fixed: str, max_length: int) -> Generator[None, None, str]:
        """Read up to and including a fixed text; return the text before it."""
        num_searched = 0
        while True:
            found = self.text.find(fixed, self.position + num_searched)
            if found >= 0:
                taken = self.take_to(found)
                self.take_to(found + len(fixed))
                return taken
            if len(self.text) - self.position > max_length:
                raise Mismatch
            num_searched = max(0, len(self.text) - self.position - len(fixed) + 1)
            yield from self.more()
