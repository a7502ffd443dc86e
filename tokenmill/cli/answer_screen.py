"""Streaming display of an answer on a terminal: lines wrapped between words, Markdown rendered.

    **bold**, `code`, # headings, - lists, > quotes      shown by weight and colour, without their markup
    ``` blocks of code                                   shown unchanged, never wrapped

A word is written once it is complete, so nothing has to be erased. Without colours (NO_COLOR, a dumb terminal) markup
is kept; if the output is not a terminal, the text is not changed at all.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import unicodedata
from typing import TextIO

BOLD, DIM, CYAN, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[0m"
FENCE = "```"
MIN_WRAP_WIDTH = 20  # columns; narrower terminals are not wrapped
MAX_WORD = 4096  # maximum characters held back
_HEADING = re.compile(r"#{1,6}")
_NUMBER = re.compile(r"\d{1,3}[.)]")
_MARKS = re.compile(r"(\*\*|`)")
_NAME = re.compile(r"\S.*?\s{2,}(?=\S)")  # of a line in two columns


def has_colours(out: TextIO) -> bool:
    """Return whether text on `out` may be coloured (https://no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width_of(text: str) -> int:
    """Return the width of a text in columns: none for combining marks, two for wide characters."""
    if text.isascii():
        return len(text)
    wide = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return wide - sum(unicodedata.combining(c) != 0 or c in "\u200d\ufe0f" for c in text)


def say(text: str, out: TextIO | None = None) -> None:
    """Print a message of the program. On a terminal it is wrapped between words, in two-column lines within the second
    column."""
    out = out or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns
    if out.isatty() and width >= MIN_WRAP_WIDTH:
        text = "\n".join(_wrapped(line, width) for line in text.splitlines())
    print(text, file=out, flush=True)


def _wrapped(line: str, width: int) -> str:
    name = _NAME.match(line)
    indent = 0 if name is None else name.end() if name.end() <= width // 2 else 4
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


class AnswerScreen:
    """Writer of one answer."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._wraps = out.isatty() and os.environ.get("TERM") != "dumb"
        self._styles = has_colours(out)
        self._word = ""  # held back until it is complete
        self._gap = ""  # spaces before it, dropped at the end of a line
        self._column = 0
        self._indent = 0  # of wrapped lines
        self._is_line_start = True
        self._is_code = False  # inside a code block
        self._is_heading = self._is_bold = self._is_literal = self._is_quote = False

    def write(self, text: str) -> None:
        if not self._wraps:
            self._out.write(text)
            return
        for character in text:
            if character == "\n":
                self._end_word()
                self._end_line()
            elif self._is_code:
                self._code(character)
            elif character in " \t":
                self._end_word()
                self._space()
            else:
                self._word += character
                if len(self._word) > MAX_WORD:
                    self._end_word()

    def close(self) -> None:
        """Write the text that is held back, and reset all styles."""
        if self._wraps:
            self._end_word()
            if self._styles and (self._is_bold or self._is_literal or self._is_heading or self._is_code):
                self._out.write(PLAIN)

    # ── blocks of code ─────────────────────────────────────────────────────────────────────────────────

    def _code(self, character: str) -> None:
        """Write a code block character by character, except at the start of a line, where the block may end."""
        if self._is_line_start and FENCE.startswith((self._word + character).lstrip()):
            self._word += character
            return
        self._is_line_start = False
        self._out.write(self._word + character)
        self._word = ""

    # ── lines and words ────────────────────────────────────────────────────────────────────────────────

    def _end_line(self) -> None:
        if self._styles and (self._is_heading or self._is_quote):
            self._out.write(PLAIN)
        self._out.write("\n")
        self._gap = ""
        self._column = self._indent = 0
        self._is_line_start = True
        self._is_heading = self._is_quote = False
        self._is_bold = self._is_literal = False  # unclosed marks end with their line
        if self._styles:
            self._out.write(PLAIN + (CYAN if self._is_code else ""))

    def _space(self) -> None:
        if self._is_line_start:
            self._indent += 1
        self._gap += " "

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        reaches = self._column + len(self._gap) + width_of(_MARKS.sub("", word))
        if not self._is_line_start and reaches > self._width() and self._column > self._indent:
            self._out.write("\n" + ("│".ljust(self._indent) if self._is_quote else " " * self._indent))
            self._column = self._indent
        else:
            self._out.write(self._gap)
            self._column += len(self._gap)
        self._gap = ""
        is_first, self._is_line_start = self._is_line_start, False
        if not (is_first and self._began_line(word)):
            self._styled(word)

    def _began_line(self, word: str) -> bool:
        """Process the first word of a line if it is markup (heading, list, quote); return whether it was."""
        if word.lstrip().startswith(FENCE):
            self._is_code = not self._is_code
            self._put(word, DIM)
            return True
        if self._is_code:
            self._out.write(word)
            return True
        if word in ("-", "*", "+") or _NUMBER.fullmatch(word):
            self._indent += len(word) + 1
            self._put("•" if self._styles and word in "-*+" else word, "")
            return True
        if self._styles and _HEADING.fullmatch(word):
            self._is_heading = True
            self._put(word, BOLD, stays=True)
            return True
        if self._styles and word == ">":
            self._is_quote = True
            self._indent += 2
            self._put("│", DIM, stays=True)
            return True
        return False

    def _styled(self, word: str) -> None:
        if not self._styles:
            self._put(word, "")
            return
        for piece in _MARKS.split(word):
            if piece == "**" and not self._is_literal:
                self._is_bold = not self._is_bold
                self._style()
            elif piece == "`":
                self._is_literal = not self._is_literal
                self._style()
            elif piece:
                self._put(piece, "")

    def _style(self) -> None:
        bold = BOLD if self._is_bold or self._is_heading else ""
        self._out.write(PLAIN + bold + (CYAN if self._is_literal else "") + (DIM if self._is_quote else ""))

    def _put(self, text: str, style: str, *, stays: bool = False) -> None:
        self._column += width_of(text)
        if not self._styles or not style:
            self._out.write(text)
        else:
            self._out.write(style + text + ("" if stays else PLAIN))

    def _width(self) -> int:
        width = shutil.get_terminal_size((100, 24)).columns
        return width if width >= MIN_WRAP_WIDTH else 10**9
