"""Reading calls: from the text after an opening marker to a call's start, its arguments in JSON, and its end.

Two shapes cover all formats. Object: the call is one JSON object with name and arguments in any order. Sequence: fixed
texts and slots in the order of the row, with the arguments as a JSON object, as tagged values (`tagged_reader.py`), or
as fields in brackets (Python's and Gemma's notation, `transcode.py`).

Text that does not match stays on the tape: before the call is announced, all of its text, so that none is lost;
afterwards, the text after the last part that matched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import cache
from typing import Protocol

from tokenmill.text.speech.call_format import Slot
from tokenmill.text.speech.markers import opening_marker, squeezed
from tokenmill.text.speech.reading import Entry, Reading
from tokenmill.text.speech.tagged_reader import TaggedReader
from tokenmill.text.speech.tape import End, Mismatch, Steps, Tape
from tokenmill.text.speech.transcode import JSON, Transcoder
from tokenmill.types import Tool

_NAME_KEYS = frozenset(("name", "tool_name"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("id", "tool_call_id", "type", "index"))  # further keys of a call, which are skipped
_MAX_SLOT_CHARS = 256
_NOT_DIGIT = re.compile("[^0-9]")
_SLOT_END_CHARS = r"\s<>{}\[\]()\"'`,;=\ud800-\udfff"


class CallSink(Protocol):
    """Receives a call while it is read."""

    def start_call(self, name: str, call_id: str | None) -> None: ...
    def add_arguments(self, fragment: str) -> None: ...
    def end_call(self) -> None: ...


class CallReader:
    """Reads the calls of one answer. Raises Mismatch only before a call was announced."""

    def __init__(self, reading: Reading, tools: Mapping[str, Tool], tape: Tape, sink: CallSink) -> None:
        self._reading = reading
        self._tools = tools
        self._tape = tape
        self._sink = sink
        self._tail = self._tail_left = reading.tail
        self._tail_marker = opening_marker(self._tail) if self._tail.strip() else ""
        opening = str(reading.arg_pieces[0]).strip() if reading.arg_pieces else ""
        if self._tail_marker and opening.startswith(self._tail_marker):  # ambiguous: use the whole closing text
            self._tail_marker = self._tail.strip()
        self._tagged = TaggedReader(reading, tape, self._tail_marker, sink.add_arguments)
        self._is_announced = False

    def read_calls(self, entry: Entry) -> Steps:
        """Read all calls that follow an opening marker; after the first, text that does not match stays on the tape."""
        if not (yield from self._tape.attempt(self._first_call(entry))):
            raise Mismatch
        while (yield from self._tape.attempt(self._next_call(entry.next_head))):
            pass
        if entry.section_rest is not None:
            yield from self._tape.attempt(self._expect_end(self._reading.section_close))
        if entry.closer:
            yield from self._tape.attempt(self._expect_end(entry.closer))

    def read_message(self, name: str) -> Steps:
        """Read a message that contains the arguments of the call that its header named."""
        self._is_announced = False
        if (yield from self._tape.skip_space()) in self._reading.message_ends:
            self._announce(name, None)
            self._give_arguments("{}")
        else:
            yield from self._read_arguments(name, None)

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
        yield from self._read_object() if self._reading.object_keys is not None else self._read_sequence()
        yield from self._tape.attempt(self._expect_end(self._tail_left))

    # ── output to the sink ───────────────────────────────────────────────────────────────────────────────

    def _announce(self, name: str | None, call_id: str | None) -> None:
        if name is None or name not in self._tools:
            raise Mismatch
        self._tape.commit()
        self._is_announced = True
        self._tail_left = self._tail
        self._sink.start_call(name, call_id)

    def _give_arguments(self, arguments: str) -> None:
        self._sink.add_arguments(arguments)
        self._sink.end_call()

    def _stream_arguments(self, transcoder: Transcoder) -> Steps:
        """Pass on the arguments of an announced call, completed if they are truncated, and end the call."""
        try:
            yield from stream_value(self._tape, transcoder, self._sink.add_arguments)
        except Mismatch:
            self._sink.add_arguments(transcoder.complete())
        except End:
            self._sink.add_arguments(transcoder.complete())
            self._sink.end_call()
            raise
        self._sink.end_call()

    # ── a call as one JSON object ────────────────────────────────────────────────────────────────────────

    def _read_object(self) -> Steps:
        """Read keys until both name and arguments are known; announce the call as soon as they are."""
        tape = self._tape
        found = _Found()
        yield from tape.expect("{")
        while (char := (yield from tape.skip_space())) != "}" and not self._is_announced:
            if char == ",":
                tape.take_to(tape.position + 1)
                continue
            yield from self._read_member(found)
        if self._is_announced:
            yield from tape.attempt(self._rest_of_object())
            return
        tape.take_to(tape.position + 1)
        self._announce(found.name, found.call_id)
        self._give_arguments(found.arguments or "{}")

    def _read_member(self, found: _Found) -> Steps:
        keys, tape = self._reading.object_keys, self._tape
        assert keys is not None
        key = yield from self._string()
        yield from tape.expect(":")
        char = yield from tape.skip_space()
        if keys.name is None and key in self._tools:
            found.name = key
        if key in _ARGUMENT_KEYS or (keys.name is None and key == found.name):
            if found.name is not None and char == "{":
                self._announce(found.name, found.call_id)
                yield from self._stream_arguments(Transcoder(JSON))
            else:
                found.arguments = yield from self._early_arguments(char)
        elif keys.name is not None and key in _NAME_KEYS:
            found.name = yield from self._string()
            if found.name not in self._tools:
                raise Mismatch
        elif key == keys.id and char == '"':
            found.call_id = (yield from self._string()) or None
        else:
            yield from self._other_member(key)

    def _rest_of_object(self) -> Steps:
        """Read the members of a call's object after its arguments."""
        tape = self._tape
        while (char := (yield from tape.skip_space())) != "}":
            if char == ",":
                tape.take_to(tape.position + 1)
                continue
            key = yield from self._string()
            yield from tape.expect(":")
            yield from tape.skip_space()
            yield from self._other_member(key)
        tape.take_to(tape.position + 1)

    def _other_member(self, key: str) -> Steps:
        """Skip an id, an index or a type of a call."""
        if key not in _OTHER_KEYS:
            raise Mismatch
        if (yield from self._tape.peek()) == '"':
            yield from self._string()
        elif not (yield from self._tape.run(_NOT_DIGIT, _MAX_SLOT_CHARS)):
            raise Mismatch

    def _early_arguments(self, char: str) -> Generator[None, None, str]:
        """Read arguments that come before the name, are encoded in a JSON string, or are null."""
        if char not in '{"n':
            raise Mismatch
        output: list[str] = []
        yield from stream_value(self._tape, Transcoder(JSON), output.append)
        text = "".join(output)
        if char == '"':
            text = json.loads(text)
            if not _is_object(text):
                raise Mismatch
        return "{}" if text == "null" else text

    def _string(self) -> Generator[None, None, str]:
        if (yield from self._tape.peek()) != '"':
            raise Mismatch
        output: list[str] = []
        yield from stream_value(self._tape, Transcoder(JSON), output.append)
        text: str = json.loads("".join(output))
        if len(text) > _MAX_SLOT_CHARS:
            raise Mismatch
        return text

    # ── a call as fixed texts and slots ──────────────────────────────────────────────────────────────────

    def _read_sequence(self) -> Steps:
        name: str | None = None
        call_id: str | None = None
        pieces = self._reading.call_pieces
        for index, piece in enumerate(pieces):
            if isinstance(piece, str):
                if index:
                    yield from self._tape.expect(squeezed(piece))
                continue
            if piece.name == "args":
                yield from self._read_arguments(name, call_id)
                return
            filled = yield from self._slot(piece, pieces[index + 1])
            if piece.name == "name":
                name = filled
            elif piece.name == "id":
                call_id = filled or None
            elif self._reading.has_index_ids:
                call_id = f"functions.{name}:{filled}"

    def _slot(self, slot: Slot, following: str | Slot) -> Generator[None, None, str]:
        yield from self._tape.skip_space()
        stop = _slot_end(squeezed(following)[:1] if isinstance(following, str) else "")
        filled = yield from self._tape.run(stop, _MAX_SLOT_CHARS)
        if (slot.name == "name" and filled not in self._tools) or (slot.name == "index" and not filled.isdigit()):
            raise Mismatch
        return filled

    def _read_arguments(self, name: str | None, call_id: str | None) -> Steps:
        reading, tape = self._reading, self._tape
        if reading.has_fields:
            self._announce(name, call_id)
            tail = squeezed(self._tail)
            self._tail_left = tail[1:]
            yield from self._stream_arguments(Transcoder(reading.notation, tail[0], reading.key_mark))
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

    def _read_tagged(self, name: str | None, call_id: str | None) -> Steps:
        yield from self._tagged.read_head()
        self._announce(name, call_id)
        tool = self._tools[name or ""]
        try:
            yield from self._tagged.read(tool.parameters or {})
        finally:
            self._sink.end_call()
        if self._tagged.has_ended:
            self._tail_left = self._tail.lstrip()[len(self._tail_marker) :]


class _Found:
    """The parts found so far of a call that is one JSON object."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.call_id: str | None = None
        self.arguments: str | None = None


def stream_value(tape: Tape, transcoder: Transcoder, emit: Callable[[str], None]) -> Steps:
    """Translate a value from the tape to its end; if it does not continue as a value, raise Mismatch and leave the
    rest."""
    while True:
        tape.take_to(transcoder.feed(tape.text, tape.position))
        if output := transcoder.take_output():
            emit(output)
        if transcoder.is_done:
            return
        if transcoder.has_failed:
            raise Mismatch
        try:
            yield from tape.more()
        except End:
            if transcoder.is_holding:  # a number or a word that ends with the text
                rest = tape.text[tape.position :]
                tape.take_to(tape.position + min(len(rest), transcoder.feed(rest + " ", 0)))
                emit(transcoder.take_output())
            raise


@cache
def _slot_end(following: str) -> re.Pattern[str]:
    return re.compile(f"[{_SLOT_END_CHARS}{re.escape(following)}]")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
