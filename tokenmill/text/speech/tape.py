"""Text that arrives piece by piece, for readers written as generators: they wait by `yield from tape.more()`.

A reader may try something and go back (`attempt`): from its beginning on, what is taken is kept, and put back where the
text is not what was tried. `commit` makes going back impossible, and forgets what was kept.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

Steps = Generator[None, None, None]

_SPACES = re.compile(r"[ \t\r\n]*")


class Mismatch(Exception):
    """The text is not what was expected."""


class End(Exception):
    """The text is over."""


class Tape:
    """A reader over growing text; `text[position:]` is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_over = False
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.position :] + text if self.position < len(self.text) else text
        self.position = 0

    def more(self) -> Steps:
        """Wait for more text; raise End where none will come."""
        if self.is_over:
            raise End
        yield

    def take_to(self, position: int) -> str:
        """Return the text up to a position, and go there."""
        taken = self.text[self.position : position]
        self.position = position
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken

    def rest(self) -> str:
        """Return all that is not read yet, and go to its end."""
        return self.take_to(len(self.text))

    # ── going back ───────────────────────────────────────────────────────────────────────────────────────

    def attempt(self, steps: Steps) -> Generator[None, None, bool]:
        """Run a reader; where the text is not what it expects, put back what it took, and return False."""
        self._kept = []
        try:
            yield from steps
        except (Mismatch, End):
            if self._kept is None:
                raise
            self.text = "".join(self._kept) + self.text[self.position :]
            self.position = 0
            return False
        finally:
            self._kept = None
        return True

    def commit(self) -> None:
        self._kept = None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────

    def peek(self) -> Generator[None, None, str]:
        """Return the next character, which stays."""
        while self.position == len(self.text):
            yield from self.more()
        return self.text[self.position]

    def skip_space(self) -> Generator[None, None, str]:
        """Skip white space, and return the character after it, which stays."""
        while True:
            spaces = _SPACES.match(self.text, self.position)
            assert spaces is not None
            self.take_to(spaces.end())
            if self.position < len(self.text):
                return self.text[self.position]
            yield from self.more()

    def expect(self, wanted: str) -> Steps:
        """Read a fixed text given without white space, which may stand anywhere in it."""
        for char in wanted:
            if (yield from self.skip_space()) != char:
                raise Mismatch
            self.take_to(self.position + 1)

    def choose(self, options: Sequence[str]) -> Generator[None, None, int]:
        """Read one of several fixed texts, as `expect` does; return which. Of two that begin alike, the next character
        decides."""
        length, open_ones = 0, [place for place, option in enumerate(options) if option]
        while True:
            char = yield from self.skip_space()
            open_ones = [place for place in open_ones if options[place][length] == char]
            if not open_ones:
                raise Mismatch
            self.take_to(self.position + 1)
            length += 1
            whole = next((place for place in open_ones if len(options[place]) == length), None)
            if whole is None:
                continue
            longer = [place for place in open_ones if len(options[place]) > length]
            if not longer or (yield from self.skip_space()) not in {options[place][length] for place in longer}:
                return whole
            open_ones = longer

    def run(self, stop: re.Pattern[str], max_length: int) -> Generator[None, None, str]:
        """Read up to a character that matches `stop`, which stays."""
        taken = ""
        while True:
            found = stop.search(self.text, self.position)
            taken += self.take_to(found.start() if found else len(self.text))
            if len(taken) > max_length:
                raise Mismatch
            if found:
                return taken
            yield from self.more()

    def until(self, wanted: str, max_length: int) -> Generator[None, None, str]:
        """Read up to a fixed text and past it; return what stands before."""
        num_searched = 0
        while True:
            found = self.text.find(wanted, self.position + num_searched)
            if found >= 0:
                taken = self.take_to(found)
                self.take_to(found + len(wanted))
                return taken
            if len(self.text) - self.position > max_length:
                raise Mismatch
            num_searched = max(0, len(self.text) - self.position - len(wanted) + 1)
            yield from self.more()
