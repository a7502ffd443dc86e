"""Incremental translation of one value into JSON text: from JSON itself, Python literals, and Gemma's notation.

    JSON      {"city": "S\\u00e3o", "n": 3}     passed on unchanged: escapes, number forms, order and spacing of keys
    Python    city='São', n=3, on=True         → {"city": "São", "n": 3, "on": true}
    Gemma     city:<|"|>São<|"|>,n:3           → {"city": "São", "n": 3}

The output is always a prefix of valid JSON, and `complete` closes it at any time. A comma, white space, a number or a
word is therefore held back until the next character confirms it. Text that cannot continue the value stops the
translation. Unambiguous mistakes are corrected: a raw line break in a string, `True`, a trailing comma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_NUMBER_RUN = re.compile(r"[-+0-9.eE_]*")
_WORD_RUN = re.compile(r"[A-Za-z]*")
_SPACE_RUN = re.compile(r"[ \t\r\n]*")
_BARE_KEY_RUN = re.compile(r"[^\s:=,{}\[\]()\"'<>\ud800-\udfff]*")
_HEX = re.compile(r"[0-9a-fA-F]+\Z")
_OCTAL_RUN = re.compile(r"[0-7]{1,3}")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_MAX_HELD_CHARS = 4096  # of a number, a word or a bare key


def escaped(text: str) -> str:
    """Return the text escaped for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class Notation:
    """The syntax of values in one language."""

    quotes: tuple[str, ...] = ('"',)  # each begins a string and ends it
    escapes: str = "json"  # "json", "python", or "none": the content of a string is literal
    has_bare_keys: bool = False
    is_json: bool = True  # separators and white space are passed on unchanged


JSON = Notation()
PYTHON = Notation(quotes=("'", '"'), escapes="python", is_json=False)
GEMMA = Notation(quotes=('<|"|>',), escapes="none", has_bare_keys=True, is_json=False)


@dataclass
class Container:
    """An open object or list: the text that closes it in the input, and the bracket that closes it in JSON."""

    close: str
    json_close: str
    key_mark: str = ":"

    @property
    def has_keys(self) -> bool:
        return self.json_close == "}"


class Transcoder:
    """Translates one value into JSON, incrementally. `take_output` returns what was written since the last call."""

    def __init__(self, notation: Notation, fields_end: str = "", key_mark: str = ":") -> None:
        """`fields_end`: the text that closes an object whose opening bracket was read before; "" for other values."""
        self.is_done = False
        self.has_failed = False
        self._notation = notation
        self._output: list[str] = []
        self._lag: list[str] = []  # separators and white space, written when something follows them
        self._stack: list[Container] = []
        self._quote = ""
        self._is_key = False
        self._run = _NUMBER_RUN
        self._state: Callable[[str, int], int] = self._value
        if fields_end:
            self._open(Container(fields_end, "}", key_mark), "{")

    @property
    def is_holding(self) -> bool:
        """Return whether a number, a word or a bare key is held back until the next character."""
        return self._state == self._held_run

    def take_output(self) -> str:
        output = "".join(self._output)
        self._output.clear()
        return output

    def feed(self, text: str, position: int) -> int:
        """Translate text from a position on; return the position reached. The rest needs more text, or is not part of
        the value (`is_done`, `has_failed`)."""
        while position < len(text) and not self.is_done:
            state = self._state
            reached = state(text, position)
            if self.has_failed or (reached == position and self._state == state):
                return reached
            position = reached
        return position

    def complete(self) -> str:
        """Return the text that completes the output so far to valid JSON."""
        closing = ""
        if self._state == self._string:
            closing = '"'
            if self._is_key:
                closing += ": null"
        elif self._state == self._held_run:
            closing = "null" if not self._is_key and (not self._stack or self._stack[-1].has_keys) else ""
        elif self._state == self._colon:
            closing = ": null"
        elif self._state == self._value and (not self._stack or self._stack[-1].has_keys):
            closing = "null"
        closing += "".join(container.json_close for container in reversed(self._stack))
        self._stack.clear()
        self.is_done = True
        return closing

    # ── states: each takes the text and a position, and returns the position it reached ──────────────────

    def _value(self, text: str, position: int) -> int:
        position = self._space(text, position)
        if position == len(text):
            return position
        char = text[position]
        if char == "{" or char == "[" or (char == "(" and not self._notation.is_json):
            return self._opened(char, position)
        if self._stack and not self._stack[-1].has_keys and char == self._stack[-1].close:
            return self._closed(position)
        if char in "-+.0123456789" or char.isalpha():
            self._run = _WORD_RUN if char.isalpha() else _NUMBER_RUN
            self._state = self._held_run
            return self._held_run(text, position)
        return self._string_begun(text, position, is_key=False)

    def _key(self, text: str, position: int) -> int:
        position = self._space(text, position)
        if position == len(text):
            return position
        container = self._stack[-1]
        if text[position] == container.close[0]:
            return self._container_end(text, position)
        if self._notation.has_bare_keys or container.key_mark == "=":
            self._run = _BARE_KEY_RUN
            self._is_key = True
            self._state = self._held_run
            return self._held_run(text, position)
        return self._string_begun(text, position, is_key=True)

    def _colon(self, text: str, position: int) -> int:
        position = self._space(text, position)
        if position == len(text):
            return position
        if text[position] != self._stack[-1].key_mark:
            return self._fail(position)
        self._flush()
        self._output.append(":" if self._notation.is_json else ": ")
        self._state = self._value
        return position + 1

    def _after_value(self, text: str, position: int) -> int:
        position = self._space(text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            self._lag.append("," if self._notation.is_json else ", ")
            self._state = self._key if self._stack[-1].has_keys else self._value
            return position + 1
        if text[position] == self._stack[-1].close[0]:
            return self._container_end(text, position)
        return self._fail(position)

    def _string(self, text: str, position: int) -> int:
        if self._notation.escapes == "none":
            return self._literal_string(text, position)
        run = _string_run(self._quote).match(text, position)
        assert run is not None
        if run.end() > position:
            self._output.append(escaped(run.group()))
            return run.end()
        if text[position] == self._quote:
            return self._string_ended(position + 1)
        if text[position] == "\\":
            return self._json_escape(text, position) if self._notation.is_json else self._python_escape(text, position)
        return self._fail(position)  # a control token ends any string

    def _literal_string(self, text: str, position: int) -> int:
        found = text.find(self._quote, position)
        end = found if found >= 0 else len(text) - overlap(text, position, self._quote)
        inside = text[position:end]
        if control := _CONTROL.search(inside):
            inside, found = inside[: control.start()], -1
            if not inside:
                return self._fail(position)
        if inside:
            self._output.append(escaped(inside))
        if found >= 0:
            return self._string_ended(found + len(self._quote))
        return position + len(inside)

    def _held_run(self, text: str, position: int) -> int:
        """Read a number, a word or a bare key; it stays unread until a following character shows that it has ended."""
        run = self._run.match(text, position)
        assert run is not None
        if run.end() - position > _MAX_HELD_CHARS:
            return self._fail(position)
        if run.end() == len(text):
            return position
        held = run.group()
        written = f'"{escaped(held)}"' if self._is_key and held else None if self._is_key else _scalar(held)
        if written is None:
            return self._fail(position)
        self._flush()
        self._output.append(written)
        self._state = self._colon if self._is_key else self._after_value
        self._is_key = False
        self.is_done = not self._stack
        return run.end()

    # ── transitions ──────────────────────────────────────────────────────────────────────────────────────

    def _space(self, text: str, position: int) -> int:
        run = _SPACE_RUN.match(text, position)
        assert run is not None
        if self._notation.is_json and run.end() > position and self._stack:
            self._lag.append(run.group())
        return run.end()

    def _flush(self) -> None:
        self._output += self._lag
        self._lag.clear()

    def _opened(self, char: str, position: int) -> int:
        self._open(Container(_CLOSERS[char], "}" if char == "{" else "]"), "{" if char == "{" else "[")
        return position + 1

    def _open(self, container: Container, json_open: str) -> None:
        self._flush()
        self._output.append(json_open)
        self._stack.append(container)
        self._state = self._key if container.has_keys else self._value

    def _container_end(self, text: str, position: int) -> int:
        close = self._stack[-1].close
        if text.startswith(close, position):
            return self._closed(position + len(close) - 1)
        if close.startswith(text[position:]):
            return position
        return self._fail(position)

    def _closed(self, position: int) -> int:
        self._output += [space for space in self._lag if self._notation.is_json and space != ","]
        self._lag.clear()
        self._output.append(self._stack.pop().json_close)
        self.is_done = not self._stack
        self._state = self._after_value
        return position + 1

    def _string_begun(self, text: str, position: int, is_key: bool) -> int:
        for quote in self._notation.quotes:
            if text.startswith(quote, position):
                self._flush()
                self._output.append('"')
                self._quote, self._is_key, self._state = quote, is_key, self._string
                return position + len(quote)
            if quote.startswith(text[position:]):
                return position
        return self._fail(position)

    def _string_ended(self, position: int) -> int:
        self._output.append('"')
        self._state = self._colon if self._is_key else self._after_value
        self._is_key = False
        self.is_done = not self._stack
        return position

    def _json_escape(self, text: str, position: int) -> int:
        kind = text[position + 1 : position + 2]
        if not kind:
            return position
        if kind in '"\\/bfnrt':
            self._output.append(text[position : position + 2])
            return position + 2
        if kind == "u":
            digits = text[position + 2 : position + 6]
            if len(digits) == 4 and _HEX.match(digits):
                self._output.append(text[position : position + 6])
                return position + 6
            if len(digits) < 4 and (not digits or _HEX.match(digits)) and position + 2 + len(digits) == len(text):
                return position
        self._output.append("\\\\")  # not a JSON escape: the backslash is literal
        return position + 1

    def _python_escape(self, text: str, position: int) -> int:
        kind = text[position + 1 : position + 2]
        if not kind:
            return position
        if kind in _ESCAPED:
            self._output.append(escaped(_ESCAPED[kind]))
            return position + 2
        if octal := _OCTAL_RUN.match(text, position + 1):
            if octal.end() == len(text) and len(octal.group()) < 3:
                return position
            self._output.append(escaped(chr(int(octal.group(), 8))))
            return octal.end()
        if length := _HEX_LENGTHS.get(kind):
            digits = text[position + 2 : position + 2 + length]
            if (not digits or _HEX.match(digits)) and len(digits) < length and position + 2 + len(digits) == len(text):
                return position
            if len(digits) == length and _HEX.match(digits) and int(digits, 16) < 0x110000:
                self._output.append(_character(int(digits, 16)))
                return position + 2 + length
        self._output.append("\\\\")
        return position + 1

    def _fail(self, position: int) -> int:
        self.has_failed = True
        return position


_CONTROL = re.compile("[\ud800-\udfff]")
_STRING_RUNS: Mapping[str, re.Pattern[str]] = {
    quote: re.compile(rf"[^\\{quote}\ud800-\udfff]*") for quote in ("'", '"')
}


def _string_run(quote: str) -> re.Pattern[str]:
    return _STRING_RUNS[quote]


def _scalar(text: str) -> str | None:
    """Return a number or a word as JSON; None where it is neither."""
    if _NUMBER.match(text):
        return text
    if text in WORDS:
        return WORDS[text]
    for read in (int, float):  # 007, 1_000, .5: numbers that are valid in Python or obvious
        try:
            return json.dumps(read(text), allow_nan=False)
        except ValueError:
            continue
    return None


def _character(code: int) -> str:
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code))


def overlap(text: str, start: int, marker: str) -> int:
    """Return the length of the longest suffix of `text[start:]` that is a proper prefix of the marker."""
    for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
