"""Reading calls: from the text after an opening marker to a call's start, its arguments in JSON, and its end.

Three shapes cover all formats. `read_object`: the call is one JSON object with name and arguments in any order.
`read_sequence`: fixed texts and slots in the order of the row, the arguments as a JSON object, as tagged values
(`read_tagged`), or as fields in brackets (Python's and Gemma's notation, `transcode.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import cache
from typing import Any, Protocol

from tokenmill.text.speech.call_format import Slot
from tokenmill.text.speech.markers import opening_marker, squeezed
from tokenmill.text.speech.reading import Entry, Reading
from tokenmill.text.speech.schema_kinds import ALL_TYPES, allowed_types, type_of
from tokenmill.text.speech.tape import End, Mismatch, Steps, Tape
from tokenmill.text.speech.transcode import JSON, Notation, Transcoder, escaped, overlap
from tokenmill.types import Tool

_NAME_KEYS = frozenset(("name", "tool_name"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_ID_KEYS = frozenset(("id", "tool_call_id"))
_MAX_SLOT = 256
_STRING = frozenset(("string",))
_MAX_SPACE_AFTER_CLOSER = 64
_CONTROL = re.compile("[\ud800-\udfff]")
_SPACES = re.compile(r"[ \t\r\n]*")


class CallSink(Protocol):
    """Takes a call as it is read."""

    def start_call(self, name: str, call_id: str | None) -> None: ...
    def add_arguments(self, fragment: str) -> None: ...
    def end_call(self) -> None: ...


class CallReader:
    """Reads the calls of one answer. Raises Mismatch before a call was announced, never after."""

    def __init__(self, reading: Reading, tools: Mapping[str, Tool], tape: Tape, sink: CallSink) -> None:
        self._reading = reading
        self._tools = tools
        self._tape = tape
        self._sink = sink
        self._tail = self._tail_left = reading.tail
        self._tail_marker = opening_marker(self._tail) if self._tail.strip() else ""
        self._is_announced = False
        first = reading.arg_pieces[0] if reading.arg_pieces else ""
        self._followers = [marker for marker in (str(first).strip(), self._tail_marker) if marker]
        self._longest_follower = max(map(len, self._followers), default=0)

    def read_calls(self, entry: Entry) -> Steps:
        """Read all calls that follow an opening marker; what does not fit after the first stays on the tape."""
        first = self._first_call(entry)
        if not (yield from self._tape.attempt(first)):
            raise Mismatch
        head = squeezed(self._reading.head) if self._reading.entry_of(entry.opener) else ""
        while (yield from self._tape.attempt(self._next_call(head))):
            pass
        if entry.section_rest is not None:
            yield from self._tape.attempt(self._expect_end(self._reading.section_close))
        if entry.closer:
            yield from self._tape.attempt(self._expect_end(entry.closer))

    def read_message(self, name: str) -> Steps:
        """Read a message that is the arguments of a call, whose name its header gave."""
        self._is_announced = False
        try:
            if (yield from self._tape.skip_space()) in self._reading.message_ends:
                self._announce(name, None)
                self._give_arguments("{}")
            else:
                yield from self._read_arguments(name, None)
        except Mismatch:
            if not self._is_announced:
                raise

    def _first_call(self, entry: Entry) -> Steps:
        self._tape.take_to(self._tape.position + len(entry.opener))
        yield from self._tape.expect(entry.section_rest or "")
        yield from self._tape.expect(entry.head_rest)
        yield from self._read_call()

    def _next_call(self, head: str) -> Steps:
        if (yield from self._tape.skip_space()) == self._reading.join:
            self._tape.take_to(self._tape.position + 1)
        yield from self._tape.expect(head)
        yield from self._read_call()

    def _expect_end(self, text: str) -> Steps:
        yield from self._tape.expect(squeezed(text))

    def _read_call(self) -> Steps:
        self._is_announced = False
        try:
            yield from self._read_object() if self._reading.object_keys is not None else self._read_sequence()
        except Mismatch:
            if not self._is_announced:
                raise
        yield from self._tape.attempt(self._expect_end(self._tail_left))

    # ── what the sink hears ──────────────────────────────────────────────────────────────────────────────

    def _announce(self, name: str | None, call_id: str | None) -> None:
        if name is None or name not in self._tools:
            raise Mismatch
        self._tape.commit()
        self._is_announced = True
        self._tail_left = self._tail
        self._sink.start_call(name, call_id)

    def _stream(self, transcoder: Transcoder, emit: Callable[[str], None]) -> Steps:
        """Translate a value from the tape to its end."""
        tape = self._tape
        while True:
            tape.take_to(transcoder.feed(tape.text, tape.position))
            if output := transcoder.take_output():
                emit(output)
            if transcoder.is_done:
                return
            if transcoder.has_failed:
                raise Mismatch
            yield from tape.more()

    def _stream_arguments(self, transcoder: Transcoder) -> Steps:
        """Pass on the arguments of an announced call, completed if they break off, and end the call."""
        try:
            yield from self._stream(transcoder, self._sink.add_arguments)
        except (Mismatch, End):
            self._sink.add_arguments(transcoder.complete())
            self._sink.end_call()
            raise
        self._sink.end_call()

    def _give_arguments(self, arguments: str) -> None:
        self._sink.add_arguments(arguments)
        self._sink.end_call()

    # ── a call as one JSON object ────────────────────────────────────────────────────────────────────────

    def _read_object(self) -> Steps:
        keys, tape = self._reading.object_keys, self._tape
        assert keys is not None
        name: str | None = None
        call_id: str | None = None
        arguments: str | None = None
        yield from tape.expect("{")
        while (char := (yield from tape.skip_space())) != "}":
            if char == ",":
                tape.take_to(tape.position + 1)
                continue
            key = yield from self._string(_MAX_SLOT)
            yield from tape.expect(":")
            char = yield from tape.skip_space()
            if keys.name is None and not self._is_announced and key in self._tools:
                name = key
            if not self._is_announced and (key == name or key in _ARGUMENT_KEYS):
                if name is not None and char == "{":
                    self._announce(name, call_id)
                    yield from self._stream_arguments(Transcoder(JSON))
                else:
                    arguments = yield from self._early_arguments(char)
            elif keys.name is not None and key in _NAME_KEYS and not self._is_announced:
                name = yield from self._string(_MAX_SLOT)
                if name not in self._tools:
                    raise Mismatch
            elif key in _ID_KEYS and char == '"' and not self._is_announced and self._reading.has_own_ids:
                call_id = (yield from self._string(_MAX_SLOT)) or None
            else:
                yield from self._stream(Transcoder(JSON), lambda output: None)
        tape.take_to(tape.position + 1)
        if not self._is_announced:
            self._announce(name, call_id)
            self._give_arguments(arguments or "{}")

    def _early_arguments(self, char: str) -> Generator[None, None, str]:
        """Read arguments that come before the name, or as text in a JSON string, or are null."""
        if char not in '{"n':
            raise Mismatch
        output: list[str] = []
        yield from self._stream(Transcoder(JSON), output.append)
        text = "".join(output)
        if char == '"':
            text = json.loads(text)
            if not _is_object(text):
                raise Mismatch
        return "{}" if text == "null" else text

    def _string(self, max_length: int) -> Generator[None, None, str]:
        if (yield from self._tape.peek()) != '"':
            raise Mismatch
        output: list[str] = []
        yield from self._stream(Transcoder(JSON), output.append)
        text: str = json.loads("".join(output))
        if len(text) > max_length:
            raise Mismatch
        return text

    # ── a call as fixed texts and slots ──────────────────────────────────────────────────────────────────

    def _read_sequence(self) -> Steps:
        name: str | None = None
        call_id: str | None = None
        pieces = self._reading.call_pieces
        for place, piece in enumerate(pieces):
            if isinstance(piece, str):
                if 0 < place < len(pieces) - 1:
                    yield from self._tape.expect(squeezed(piece))
                continue
            if piece.name == "args":
                yield from self._read_arguments(name, call_id)
                return
            following = pieces[place + 1]
            filled = yield from self._slot(following if isinstance(following, str) else "")
            if piece.name == "name":
                name = filled
                if name not in self._tools:
                    raise Mismatch
            elif piece.name == "id":
                call_id = filled or None

    def _slot(self, following: str) -> Generator[None, None, str]:
        yield from self._tape.skip_space()
        stop = _slot_end(squeezed(following)[:1])
        return (yield from self._tape.run(stop, _MAX_SLOT))

    def _read_arguments(self, name: str | None, call_id: str | None) -> Steps:
        reading, tape = self._reading, self._tape
        if reading.arg_pieces and reading.has_fields:
            self._announce(name, call_id)
            end = squeezed(self._tail)[0]
            self._tail_left = squeezed(self._tail)[1:]
            mark = "=" if reading.calls and reading.calls.values == "python" else ":"
            yield from self._stream_arguments(Transcoder(reading.notation, end, mark))
        elif reading.arg_pieces:
            yield from self._read_tagged(name, call_id)
        elif (yield from tape.skip_space()) == "{":
            self._announce(name, call_id)
            yield from self._stream_arguments(Transcoder(JSON))
        elif self._tail_marker and tape.text[tape.position] == self._tail_marker[0]:
            self._announce(name, call_id)
            self._give_arguments("{}")
        else:
            raise Mismatch

    # ── tagged arguments ─────────────────────────────────────────────────────────────────────────────────

    def _read_tagged(self, name: str | None, call_id: str | None) -> Steps:
        """Read arguments one by one: `<parameter=city>\\nParis\\n</parameter>` and the like."""
        opening = squeezed(str(self._reading.arg_pieces[0]))
        options = (opening, squeezed(self._tail_marker))
        choice = yield from self._tape.choose(options)
        self._announce(name, call_id)
        parameters = self._tools[name or ""].parameters or {}
        before = "{"
        try:
            while choice == 0:
                yield from self._read_tagged_argument(parameters, before)
                before = ", "
                choice = yield from self._tape.choose(options)
        except (Mismatch, End):
            self._give_arguments("{}" if before == "{" else "}")
            raise
        self._tail_left = self._tail.lstrip()[len(self._tail_marker) :]
        self._give_arguments("{}" if before == "{" else "}")

    def _read_tagged_argument(self, parameters: Mapping[str, Any], before: str) -> Steps:
        pieces, tape = self._reading.arg_pieces, self._tape
        key = ""
        kind: str | None = None
        for place, piece in enumerate(pieces[1:], 1):
            following = pieces[place + 1] if place + 1 < len(pieces) else ""
            if isinstance(piece, Slot) and piece.name == "value":
                types = allowed_types(_schema_of(key, parameters), parameters)
                if kind is not None:
                    types = _STRING if kind == "string" else ALL_TYPES - _STRING
                yield from self._read_value(key, types, before, str(following))
                return
            if isinstance(piece, Slot):
                stop = _key_end(squeezed(str(following))[:1])
                filled = yield from tape.run(stop, _MAX_SLOT)
                if piece.name == "key":
                    key = filled.strip()
                else:
                    kind = "string" if filled in ("string", "true") else "json"
            else:
                yield from tape.expect(squeezed(piece))
                if piece.endswith("\n") and (yield from tape.peek()) == "\n":
                    tape.take_to(tape.position + 1)

    def _read_value(self, key: str, types: frozenset[str], before: str, closer: str) -> Steps:
        emit = self._sink.add_arguments
        if types == _STRING:
            emit(f'{before}"{escaped(key)}": "')
            try:
                yield from self._read_raw(closer, lambda text: emit(escaped(text)))
            finally:
                emit('"')
            return
        if not types & _STRING and (yield from self._tape.skip_space()) in "[{":
            emit(f'{before}"{escaped(key)}": ')
            transcoder = Transcoder(self._reading.notation)
            try:
                yield from self._stream(transcoder, emit)
            except (Mismatch, End):
                emit(transcoder.complete())
                raise
            yield from self._tape.expect(squeezed(closer))
            return
        collected: list[str] = []
        try:
            yield from self._read_raw(closer, collected.append)
        finally:
            emit(f'{before}"{escaped(key)}": {_as_json("".join(collected), types, self._reading.notation)}')

    def _read_raw(self, closer: str, emit: Callable[[str], None]) -> Steps:
        """Pass on a value as it stands, up to its closing tag.

        A closing tag inside the value is told apart by what follows it: only another argument, or the end of the call,
        can follow the end of a value. One line break around the value belongs to the format where it writes one.
        """
        tape, core = self._tape, closer.strip()
        wraps = closer.startswith("\n")
        searched = 0  # characters from the position on that hold no closer
        while True:
            found = tape.text.find(core, tape.position + searched)
            end = found if found >= 0 else len(tape.text) - overlap(tape.text, tape.position, core)
            if control := _CONTROL.search(tape.text, tape.position, end):
                emit(tape.take_to(control.start()))
                raise Mismatch
            is_end = self._is_value_end(found + len(core)) if found >= 0 else None
            if is_end is False:
                searched = found + len(core) - tape.position
                continue
            before = end - 1 if wraps and tape.text[tape.position : end].endswith("\n") else end
            if is_end:
                emit(tape.take_to(before))
                tape.take_to(found + len(core))
                return
            emit(tape.take_to(before))
            searched = 0
            try:
                yield from tape.more()
            except End:
                emit(tape.take_to(end))
                raise

    def _is_value_end(self, position: int) -> bool | None:
        """Return whether a value ends before this position; None: more text must show it."""
        text = self._tape.text
        spaces = _SPACES.match(text, position)
        assert spaces is not None
        following = text[spaces.end() : spaces.end() + self._longest_follower]
        if any(following.startswith(marker) for marker in self._followers) or (self._tape.is_over and not following):
            return True
        if spaces.end() - position > _MAX_SPACE_AFTER_CLOSER:
            return False
        is_open = spaces.end() + len(following) == len(text) and not self._tape.is_over
        return None if is_open and any(marker.startswith(following) for marker in self._followers) else False


_SLOT_END_CHARS = r"\s<>{}\[\]()\"'`,;=\ud800-\udfff"


@cache
def _slot_end(following: str) -> re.Pattern[str]:
    return re.compile(f"[{_SLOT_END_CHARS}{re.escape(following)}]")


@cache
def _key_end(following: str) -> re.Pattern[str]:
    return re.compile(f"[\\n\ud800-\udfff{re.escape(following)}]")


def _schema_of(key: str, parameters: Mapping[str, Any]) -> Any:
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return parameters.get("additionalProperties") if schema is None else schema


def _as_json(text: str, types: frozenset[str], notation: Notation) -> str:
    """Return a value that need not be a string as JSON: as it stands where it is JSON of an allowed type, else as a
    string."""
    stripped = text.strip()
    for one in (JSON, notation):
        transcoder = Transcoder(one)
        end = transcoder.feed(stripped + " ", 0)
        if transcoder.is_done and end >= len(stripped) and stripped[:1] not in "\"'":
            written = transcoder.take_output()
            if not types & _STRING or type_of(json.loads(written)) in types:
                return written
    return f'"{escaped(text)}"'


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
