"""Splits an answer, while it is generated, into visible text, reasoning and tool calls.

    token ids ──► control tokens by id, the rest as text ──► the reader of the model's format ──► parts
                                                             (text/speech)

A marker that is a control token is recognised only as that token: the same characters written out are text. The
arguments of a custom tool are unwrapped here: the model writes {"input": "…"}, the client gets the raw input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenmill.text.speech import SpeechReader
from tokenmill.text.template import CUSTOM_INPUT
from tokenmill.text.tokenizer import IncrementalDetokenizer
from tokenmill.types import CallArguments, CallEnd, CallStart, Part, TextPart, TokenInfo, Tool


class AnswerReader:
    """Reads the tokens of one sequence, from the first to the last."""

    def __init__(self, reader: SpeechReader, detokenizer: IncrementalDetokenizer, tools: Sequence[Tool] = ()) -> None:
        self._reader = reader
        self._detokenizer = detokenizer
        self._custom_names = frozenset(tool.name for tool in tools if tool.kind == "custom")
        self._inputs: dict[int, CustomInput] = {}  # of the calls of custom tools, by the call's index
        self._infos = VisibleTokens()
        self.num_reasoning_tokens = 0
        self.has_called = False

    def push(self, token_id: int, info: TokenInfo | None, *, is_stop_id: bool) -> list[Part]:
        """Return the parts that a token completes; `info`: its logprobs, if requested. A stop id has no text."""
        reader = self._reader
        was_thinking = reader.is_thinking
        is_control = token_id in reader.control_ids
        decoded = "" if is_control or is_stop_id else self._detokenizer.push([token_id])
        parts = self._control(token_id) if is_control else reader.push(decoded) if decoded else []
        if was_thinking or reader.is_thinking:
            self.num_reasoning_tokens += 1
        if not (is_control or is_stop_id):
            self._infos.add(info, decoded)
        return self._noted(parts)

    def finish(self) -> list[Part]:
        """Return the parts that were held back, and the end of a call that was cut off."""
        return self._noted([*self._reader.push(self._detokenizer.finish()), *self._reader.finish()])

    def pop_infos(self) -> list[tuple[int, TokenInfo]]:
        """Return the tokens whose text became visible since the last call, each with the end position of its text in
        the visible text."""
        return self._infos.pop()

    def _control(self, token_id: int) -> list[Part]:
        return [*self._reader.push(self._detokenizer.finish()), *self._reader.push_control(token_id)]

    def _noted(self, parts: list[Part]) -> list[Part]:
        if not parts:
            return parts
        self._infos.see(parts)
        if any(isinstance(part, CallStart) for part in parts):
            self.has_called = True
        return list(self._unwrapped(parts)) if self._custom_names else parts

    def _unwrapped(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, CallStart) and part.name in self._custom_names:
                self._inputs[part.index] = CustomInput()
                yield CallStart(part.index, part.id, part.name, "custom")
            elif isinstance(part, CallArguments | CallEnd) and (custom_input := self._inputs.get(part.index)):
                is_end = isinstance(part, CallEnd)
                if text := custom_input.finish() if isinstance(part, CallEnd) else custom_input.push(part.fragment):
                    yield CallArguments(part.index, text)
                if is_end:
                    yield part
            else:
                yield part


class VisibleTokens:
    """Finds the tokens that belong to an answer's visible text, as opposed to markers, reasoning and calls.

    The reader of the format holds text back and removes markers and white space, so a token is undecided until visible
    text arrives that contains the token's text.
    """

    def __init__(self) -> None:
        self._undecided: list[tuple[TokenInfo, str]] = []
        self._visible: list[tuple[int, TokenInfo]] = []
        self._num_visible = 0  # characters

    def add(self, info: TokenInfo | None, decoded: str) -> None:
        if info is not None:
            self._undecided.append((info, decoded))

    def pop(self) -> list[tuple[int, TokenInfo]]:
        popped, self._visible = self._visible, []
        return popped

    def see(self, parts: Sequence[Part]) -> None:
        """Decide about the undecided tokens, from the parts that the last token completed."""
        text = "".join([part.text for part in parts if isinstance(part, TextPart)])
        if text and self._undecided:
            self._release(text)
        self._num_visible += len(text)
        if not isinstance(parts[-1], TextPart):
            self._undecided = []

    def _release(self, text: str) -> None:
        begin = max(0, "".join([decoded for _, decoded in self._undecided]).find(text))
        start, kept = 0, []
        for info, decoded in self._undecided:
            end = start + len(decoded)
            if end > begin + len(text):
                kept.append((info, decoded[max(0, begin + len(text) - start) :]))
            elif end > begin or start >= begin:
                self._visible.append((self._num_visible + end - begin, info))
            start = end
        self._undecided = kept


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class CustomInput:
    """Extracts the raw text of {"input": "…"} from JSON that arrives in fragments."""

    _OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_INPUT + r'"\s*:\s*"')

    def __init__(self) -> None:
        self._waiting = ""  # before the string: everything received; inside it: an incomplete escape sequence
        self._is_inside = False
        self._is_over = False

    def push(self, fragment: str) -> str:
        self._waiting += fragment
        if not self._is_inside and not self._is_over:
            opening = self._OPENING.match(self._waiting)
            if opening is None:
                return ""
            self._is_inside = True
            self._waiting = self._waiting[opening.end() :]
        return self._unescaped() if self._is_inside else ""

    def finish(self) -> str:
        """End the call: arguments in any other form are returned unchanged."""
        return "" if self._is_inside or self._is_over else self._waiting

    def _unescaped(self) -> str:
        text, out, position = self._waiting, [], 0
        while position < len(text):
            char = text[position]
            if char == '"':
                self._is_inside, self._is_over = False, True
                position = len(text)
            elif char != "\\":
                end = _next_special(text, position)
                out.append(text[position:end])
                position = end
            else:
                length = _escape_length(text, position)
                if length is None:  # it continues in the next fragment
                    break
                out.append(self._escape(text[position : position + length]))
                position += length
        self._waiting = text[position:]
        return "".join(out)

    def _escape(self, escape: str) -> str:
        if escape[1] != "u":
            return _ESCAPES.get(escape[1], escape[1])
        units = b"".join(int(escape[at + 2 : at + 6], 16).to_bytes(2, "big") for at in range(0, len(escape), 6))
        return units.decode("utf-16-be", "replace")


def _next_special(text: str, start: int) -> int:
    found = [at for at in (text.find('"', start), text.find("\\", start)) if at >= 0]
    return min(found, default=len(text))


def _escape_length(text: str, start: int) -> int | None:
    """Return the length of the escape sequence that starts here, including both halves of a surrogate pair; None if it
    is incomplete."""
    rest = text[start : start + 12]
    if len(rest) < 2:
        return None
    if rest[1] != "u":
        return 2
    if len(rest) < 6:
        return None
    if not re.match(r"\\ud[89ab]", rest, re.IGNORECASE):
        return 6
    if len(rest) < 12:
        return None if "\\u".startswith(rest[6:8]) and '"' not in rest[6:] else 6
    return 12 if re.match(r"\\ud[c-f]", rest[6:], re.IGNORECASE) else 6
