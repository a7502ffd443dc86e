"""Markers in a stream of text: control tokens as single characters, and a search that holds back partial markers.

A vocabulary may have a marker such as `<tool_call>` as one token. Then only that token is the marker, and the same
characters in other tokens are text: a file that a model quotes cannot end a call. The reader represents each such token
by one character that no text contains (a lone surrogate, which is not valid Unicode), both in the answer and in the
texts of a format. So markers found by token id and by text are handled by the same code.

    vocabulary has <tool_call>     answer  … \\ud800 \\n{"name": …     format  \\ud800 + "\\n" + …
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tokenmill.text.speech.transcode import overlap

_FIRST, _LAST = 0xD800, 0xDFFF


class ControlAlphabet:
    """The characters that represent control tokens. `control`: texts of those tokens and their ids."""

    def __init__(self, control: Mapping[str, int]) -> None:
        texts = sorted(control, key=len, reverse=True)[: _LAST - _FIRST + 1]
        self._char_of_text = {text: chr(_FIRST + place) for place, text in enumerate(texts)}
        self._text_of_char = {char: text for text, char in self._char_of_text.items()}
        self.char_of_id = {control[text]: char for text, char in self._char_of_text.items()}
        self._texts = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._chars = re.compile("[\ud800-\udfff]")

    def encode(self, text: str) -> str:
        """Replace the control tokens in a format's text by their characters."""
        return self._texts.sub(lambda found: self._char_of_text[found.group()], text) if self._texts else text

    def decode(self, text: str) -> str:
        """Replace the characters of control tokens in an answer's text by the tokens' texts."""
        if self._texts is None or not self._chars.search(text):
            return text
        return self._chars.sub(lambda found: self._text_of_char.get(found.group(), found.group()), text)


class MarkerSearch:
    """Search for the first of several markers; of those that begin at the same position, the longest."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.markers))) if self.markers else None
        first = "".join(sorted({re.escape(marker[0]) for marker in self.markers}))
        self._first = re.compile(f"[{first}]") if first else None
        self._longest = max(map(len, self.markers), default=1)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start) if self._pattern else None

    def num_held(self, text: str, start: int) -> int:
        """Return the number of characters at the end of the text that may begin a marker."""
        tail = max(start, len(text) - self._longest + 1)
        if self._first is None or not self._first.search(text, tail):
            return 0
        return max(overlap(text, tail, marker) for marker in self.markers)


def squeezed(text: str) -> str:
    """Return the text without white space, which may differ between answers of one format."""
    return "".join(text.split())


def opening_marker(text: str) -> str:
    """Return the first marker of a text: one control token, one tag, or the whole text if it begins with a word.

    "<tool_call>\\n{" → "<tool_call>"    "[TOOL_CALLS][" → "[TOOL_CALLS]"    "Action:\\n```json" → itself
    """
    text = text.lstrip()
    if not text or _FIRST <= ord(text[0]) <= _LAST:
        return text[:1]
    found = re.match(r"<[^<>\s]*>|\[[A-Z_/]+\]|<[^<>]*>", text)
    return found.group() if found else text.rstrip()
