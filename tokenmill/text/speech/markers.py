"""Markers in a stream of text: control tokens as single characters, and search that holds back half a marker.

A vocabulary may have a marker such as `<tool_call>` as one token. Then only that token is the marker, and the same
characters written in other tokens are text: a file that a model quotes can't end a call. For the reader each such token
is one character that no text contains (a lone surrogate, which is not valid Unicode), in the text of the answer and in
the texts of a format alike. So reading by token id and reading by text are one thing.

    vocabulary has <tool_call>     answer  … \\ud800 \\n{"name": …     format  \\ud800 + "\\n" + …
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tokenmill.text.speech.transcode import overlap

_FIRST, _LAST = 0xD800, 0xDFFF


class ControlAlphabet:
    """The characters that stand for control tokens. `control`: texts of those tokens and their ids."""

    def __init__(self, control: Mapping[str, int]) -> None:
        texts = sorted(control, key=len, reverse=True)[: _LAST - _FIRST + 1]
        self._char_of_text = {text: chr(_FIRST + place) for place, text in enumerate(texts)}
        self._text_of_char = {char: text for text, char in self._char_of_text.items()}
        self.char_of_id = {control[text]: char for text, char in self._char_of_text.items()}
        self._texts = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._chars = re.compile("[\ud800-\udfff]")

    def encode(self, text: str) -> str:
        """Return a text of a format with its control tokens as characters."""
        return self._texts.sub(lambda found: self._char_of_text[found.group()], text) if self._texts else text

    def decode(self, text: str) -> str:
        """Return a text of an answer with what its control tokens say."""
        if self._texts is None or not self._chars.search(text):
            return text
        return self._chars.sub(lambda found: self._text_of_char.get(found.group(), found.group()), text)


class MarkerSearch:
    """Search for the first of several markers; of those that begin at one place, the longest."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.markers))) if self.markers else None
        first = "".join(sorted({re.escape(marker[0]) for marker in self.markers}))
        self._first = re.compile(f"[{first}]") if first else None
        self._longest = max(map(len, self.markers), default=1)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start) if self._pattern else None

    def num_held(self, text: str, start: int) -> int:
        """Return how many characters at the end of the text may be the beginning of a marker."""
        tail = max(start, len(text) - self._longest + 1)
        if self._first is None or not self._first.search(text, tail):
            return 0
        return max(overlap(text, tail, marker) for marker in self.markers)


def squeezed(text: str) -> str:
    """Return the text without white space, which differs between answers of one format."""
    return "".join(text.split())


def opening_marker(text: str) -> str:
    """Return the first marker of a text: one control token, one tag, or all of a text that begins with words.

    "<tool_call>\\n{" → "<tool_call>"    "[TOOL_CALLS][" → "[TOOL_CALLS]"    "Action:\\n```json" → itself
    """
    text = text.lstrip()
    if not text or _FIRST <= ord(text[0]) <= _LAST:
        return text[:1]
    found = re.match(r"<[^<>\s]*>|\[[A-Z_/]+\]|<[^<>]*>", text)
    return found.group() if found else text.rstrip()
