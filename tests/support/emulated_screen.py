"""The screen that a user sees: applies a program's cursor movements to a grid of characters.

Enough of a VT100 for line editors and progress lines: text with wide characters, a line that wraps when the next
character comes, cursor movement, erasing, scrolling. Colours are not kept. `lines()` has what scrolled away too.
"""

from __future__ import annotations

import re
from itertools import pairwise

from wcwidth import wcwidth  # a dependency of prompt_toolkit

ESCAPE = re.compile(r"\x1b(?:\[([?>=]?)([0-9;]*)([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()#][0-9A-Z]|[=>78DEHMc])")
UNFINISHED = re.compile(r"\x1b(?:\[[?>=]?[0-9;]*|\][^\x07]*|[()#])?$")
BEYOND = ""  # the cell to the right of a wide character


class EmulatedScreen:
    def __init__(self, columns: int, rows: int = 40) -> None:
        self.columns, self.rows = columns, rows
        self.scrolled: list[str] = []
        self.reply = b""  # replies of the terminal to queries
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._wraps = True
        self._waiting = ""  # the beginning of an escape sequence

    def feed(self, text: str) -> None:
        text, self._waiting = self._waiting + text, ""
        if unfinished := UNFINISHED.search(text):
            text, self._waiting = text[: unfinished.start()], unfinished.group()
        ends = [0, *[at for found in ESCAPE.finditer(text) for at in found.span()], len(text)]
        for number, (start, end) in enumerate(pairwise(ends)):
            if number % 2:
                self._obey(text[start:end])
            else:
                for character in text[start:end]:
                    self._put(character)

    def lines(self) -> list[str]:
        shown = [*self.scrolled, *["".join(cells).rstrip() for cells in self._cells]]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def _put(self, character: str) -> None:
        if character == "\n":
            self._feed_line()
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\t":
            self._column = min(self.columns - 1, (self._column // 8 + 1) * 8)
        elif character >= " ":
            self._write(character, wcwidth(character))

    def _write(self, character: str, width: int) -> None:
        if width <= 0:  # combines with the character before it
            cells, place = self._cells[self._row], max(0, self._column - 1)
            cells[place] += character
            return
        if self._column + width > self.columns:
            if not self._wraps:
                self._column = self.columns - width
            else:
                self._feed_line()
                self._column = 0
        self._cells[self._row][self._column : self._column + width] = [character, *[BEYOND] * (width - 1)]
        self._column += width

    def _feed_line(self) -> None:
        self._row += 1
        if self._row == self.rows:
            self.scrolled.append("".join(self._cells.pop(0)).rstrip())
            self._cells.append([" "] * self.columns)
            self._row -= 1

    def _obey(self, sequence: str) -> None:
        found = ESCAPE.fullmatch(sequence)
        assert found is not None
        kind, numbers, final = found.groups()
        given = [int(number) if number else 0 for number in (numbers or "").split(";")]
        count = max(1, given[0])
        cells = self._cells[self._row]
        match final if not kind or final in "hl" else "":
            case "A":
                self._row = max(0, self._row - count)
            case "B":
                self._row = min(self.rows - 1, self._row + count)
            case "C":
                self._column = min(self.columns - 1, self._column + count)
            case "D":
                self._column = max(0, min(self._column, self.columns - 1) - count)
            case "G":
                self._column = min(self.columns, count) - 1
            case "H":
                self._row = min(self.rows, count) - 1
                self._column = min(self.columns, max(1, *given[1:2], 1)) - 1
            case "K":
                first, last = ((self._column, self.columns), (0, self._column + 1), (0, self.columns))[given[0]]
                cells[first:last] = [" "] * (min(last, self.columns) - first)
            case "J" if given[0] == 0:
                cells[self._column :] = [" "] * (self.columns - self._column)
                self._cells[self._row + 1 :] = [[" "] * self.columns for _ in range(self.rows - self._row - 1)]
            case "J":
                self._cells = [[" "] * self.columns for _ in range(self.rows)]
            case "P":
                del cells[self._column : self._column + count]
                cells += [" "] * (self.columns - len(cells))
            case "n" if given[0] == 6:
                self.reply += f"\x1b[{self._row + 1};{min(self._column, self.columns - 1) + 1}R".encode()
            case "h" | "l" if given[0] == 7 and kind == "?":
                self._wraps = final == "h"
            case _:  # colours and keyboard modes move nothing
                pass
