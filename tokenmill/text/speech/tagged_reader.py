"""Reading tagged arguments, each between its own markers, into a JSON object.

    <parameter=city>\\nSão Paulo\\n</parameter>     <arg_key>city</arg_key><arg_value>São Paulo</arg_value>

Strings are written without quotes, other values as JSON (or as Python literals); unless the format names the type, the
tool's schema decides. One line break around a value belongs to the format if its row has one; others are part of the
value.

A closing tag inside a value is recognised by what follows it: only another argument or the end of the call can follow
the end of a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import cache
from typing import Any

from tokenmill.text.speech.call_format import CDATA, JSON_TYPE_NAMES, Slot
from tokenmill.text.speech.markers import squeezed
from tokenmill.text.speech.reading import Reading
from tokenmill.text.speech.schema_kinds import ALL_TYPES, allowed_types, resolve, type_of
from tokenmill.text.speech.tape import End, Mismatch, Steps, Tape
from tokenmill.text.speech.transcode import JSON, Notation, Transcoder, escaped, overlap

_STRING = frozenset(("string",))
_CONTAINERS = frozenset(("array", "object"))
_MAX_KEY_CHARS = 256
_MAX_SPACE_AFTER_CLOSER = 64
_CONTROL = re.compile("[\ud800-\udfff]")
_SPACES = re.compile(r"[ \t\r\n]*")


class TaggedReader:
    """Reads the arguments of one call after another; `call_end` is the marker that ends a call."""

    def __init__(self, reading: Reading, tape: Tape, call_end: str, emit: Callable[[str], None]) -> None:
        self.has_ended = False  # `call_end` was read
        self._tape = tape
        self._emit = emit
        self._notation = reading.notation
        self._pieces = reading.arg_pieces
        self._has_cdata = reading.calls is not None and reading.calls.has_cdata
        self._is_nested = reading.calls is not None and reading.calls.values == "nested"
        self._opening = str(self._pieces[0]).strip() if self._pieces else ""
        self._call_end = call_end
        self._end = call_end  # may follow an argument instead of another one
        self._closer = ""  # of the argument that is being read
        self._key = ""
        self._label: str | None = None  # the value's type, if the format names it

    def read_head(self) -> Steps:
        """Read the beginning of the next argument up to its value, or the end of the arguments."""
        options = (squeezed(self._opening), squeezed(self._end))
        self.has_ended = (yield from self._tape.choose(options)) == 1
        if self.has_ended:
            return
        self._key, self._label = "", None
        for piece, following in zip(self._pieces[1:], self._pieces[2:], strict=False):
            if isinstance(piece, Slot):
                if piece.name == "value":
                    self._closer = self._closer_of(self._key)
                    return
                yield from self._read_slot(piece, str(following))
            else:
                yield from self._tape.expect(squeezed(piece))
                if piece.endswith("\n") and (yield from self._tape.peek()) == "\n":
                    self._tape.take_to(self._tape.position + 1)

    def _read_inner_head(self, needs_item: bool) -> Steps:
        yield from self.read_head()
        if needs_item and not self.has_ended and self._key != "item":
            raise Mismatch

    def _closer_of(self, key: str) -> str:
        after = self._pieces[self._pieces.index(Slot("value")) + 1 :]
        return "".join(piece if isinstance(piece, str) else key for piece in after)

    def _read_slot(self, slot: Slot, following: str) -> Steps:
        filled = yield from self._tape.run(_key_end(squeezed(following)[:1]), _MAX_KEY_CHARS)
        if slot.name == "key":
            self._key = filled.strip()
        elif slot.name == "is_string" and filled in ("true", "false"):
            self._label = "string" if filled == "true" else "other"
        elif slot.name == "type" and filled in JSON_TYPE_NAMES:
            self._label = filled
        else:
            raise Mismatch

    def read(self, parameters: Mapping[str, Any]) -> Steps:
        """Pass on all arguments; the first head is already read. Text that does not match stays on the tape."""
        before = "{"
        try:
            while not self.has_ended:
                schema, begun = _schema_of(self._key, parameters), f'{before}"{escaped(self._key)}": '
                yield from self._read_value(begun, schema, parameters)
                before = ", "
                if not (yield from self._tape.attempt(self.read_head())):
                    break
        except Mismatch:
            before = ", "
        except End:
            before = ", "
            raise
        finally:
            self._emit("{}" if before == "{" else "}")

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────

    def _read_value(self, begun: str, schema: Any, root: Mapping[str, Any]) -> Steps:
        types = allowed_types(schema, root)
        if self._label is not None:
            types = _STRING if self._label == "string" else ALL_TYPES - _STRING
        if types == _STRING:
            yield from self._read_string(begun)
        elif self._is_nested and types & _CONTAINERS and (not types - _CONTAINERS or (yield from self._has_child())):
            yield from self._read_nested(begun, schema, root, types)
        elif not self._is_nested and not types & _STRING and (yield from self._first_char(begun)) in "[{":
            yield from self._read_container(begun)
        else:
            yield from self._read_other(begun, types)

    def _has_child(self) -> Generator[None, None, bool]:
        """Return whether an argument begins inside this one."""
        tape, opening = self._tape, self._opening
        while len(tape.text) - tape.position <= len(opening) and opening.startswith(tape.text[tape.position :]):
            try:
                yield from tape.more()
            except End:
                return False
        return tape.text.startswith(opening, tape.position) and not tape.text.startswith(opening + "/", tape.position)

    def _read_nested(self, begun: str, schema: Any, root: Mapping[str, Any], types: frozenset[str]) -> Steps:
        """Read a list or an object whose items are written as arguments."""
        closer, outer_end = self._closer, self._end
        close = ""
        self._emit(begun)
        try:
            while True:
                self._end = closer
                needs_item = close == "]" or "object" not in types
                if not (yield from self._tape.attempt(self._read_inner_head(needs_item))):
                    raise Mismatch
                if self.has_ended:
                    return
                is_list = close == "]" if close else "array" in types and (self._key == "item" or "object" not in types)
                before = ", " if close else "[" if is_list else "{"
                close = "]" if is_list else "}"
                inner = _inner_schema(schema, root, None if is_list else self._key)
                yield from self._read_value(before if is_list else f'{before}"{escaped(self._key)}": ', inner, root)
        finally:
            self._emit(close or ("{}" if "object" in types else "[]"))
            self._closer, self._end, self.has_ended = closer, outer_end, False

    def _first_char(self, begun: str) -> Generator[None, None, str]:
        try:
            return (yield from self._tape.skip_space())
        except End:
            self._emit(f"{begun}null")
            raise

    def _read_string(self, begun: str) -> Steps:
        self._emit(f'{begun}"')
        try:
            yield from self._read_raw(lambda text: self._emit(escaped(text)))
        finally:
            self._emit('"')

    def _read_container(self, begun: str) -> Steps:
        self._emit(begun)
        transcoder = Transcoder(self._notation)
        try:
            while not transcoder.is_done:
                self._tape.take_to(transcoder.feed(self._tape.text, self._tape.position))
                self._emit(transcoder.take_output())
                if transcoder.has_failed:
                    raise Mismatch
                if not transcoder.is_done:
                    yield from self._tape.more()
        finally:
            if not transcoder.is_done:
                self._emit(transcoder.complete())
        if not (yield from self._tape.attempt(self._tape.expect(squeezed(self._closer)))):
            raise Mismatch

    def _read_other(self, begun: str, types: frozenset[str]) -> Steps:
        """Read a value that is a scalar or may be a string: its type is known only at its end."""
        collected: list[str] = []
        try:
            yield from self._read_raw(collected.append)
        finally:
            self._emit(begun + _as_json("".join(collected), types, self._notation))

    def _read_raw(self, emit: Callable[[str], None]) -> Steps:
        """Pass on a value unchanged up to its closing tag, and read the tag."""
        tape, core = self._tape, self._closer.strip()
        wraps = self._closer.startswith("\n")
        if self._has_cdata and (yield from self._begins_with(CDATA[0])):
            core = CDATA[1] + core
        num_searched = 0  # characters from the position on that contain no closer
        while True:
            found = tape.text.find(core, tape.position + num_searched)
            end = found if found >= 0 else len(tape.text) - overlap(tape.text, tape.position, core)
            if control := _CONTROL.search(tape.text, tape.position, end):
                emit(tape.take_to(control.start()))
                raise Mismatch
            is_end = self._is_value_end(found + len(core)) if found >= 0 else None
            if is_end is False:
                num_searched = found + len(core) - tape.position
                continue
            has_break = wraps and tape.text[tape.position : end].endswith("\n")
            emit(tape.take_to(end - 1 if has_break else end))
            if is_end:
                tape.take_to(found + len(core))
                return
            num_searched = 0
            try:
                yield from tape.more()
            except End:
                control = _CONTROL.search(tape.text, tape.position)
                emit(tape.take_to(control.start() if control else len(tape.text)))
                raise

    def _begins_with(self, opener: str) -> Generator[None, None, bool]:
        """Read a fixed text if it is next; return whether it was."""
        tape = self._tape
        while len(tape.text) - tape.position < len(opener) and opener.startswith(tape.text[tape.position :]):
            try:
                yield from tape.more()
            except End:
                return False
        found = tape.text.startswith(opener, tape.position)
        tape.take_to(tape.position + (len(opener) if found else 0))
        return found

    def _is_value_end(self, position: int) -> bool | None:
        """Return whether a value ends before this position; None: more text is needed to decide."""
        text = self._tape.text
        spaces = _SPACES.match(text, position)
        assert spaces is not None
        followers = [marker for marker in (self._opening, self._end.strip()) if marker]
        following = text[spaces.end() : spaces.end() + max(map(len, followers))]
        if any(following.startswith(marker) for marker in followers) or (self._tape.is_over and not following):
            return True
        if spaces.end() - position > _MAX_SPACE_AFTER_CLOSER:
            return False
        is_open = spaces.end() + len(following) == len(text) and not self._tape.is_over
        return None if is_open and any(marker.startswith(following) for marker in followers) else False


@cache
def _key_end(following: str) -> re.Pattern[str]:
    return re.compile(f"[\\n\ud800-\udfff{re.escape(following)}]")


def _schema_of(key: str, parameters: Mapping[str, Any]) -> Any:
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return parameters.get("additionalProperties") if schema is None else schema


def _inner_schema(schema: Any, root: Mapping[str, Any], key: str | None) -> Any:
    """Return the schema of a property; without a key, that of a list's items."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolve(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return None
    return schema.get("items") if key is None else _schema_of(key, schema)


def _as_json(text: str, types: frozenset[str], notation: Notation) -> str:
    """Return a value unchanged if it is JSON of an allowed type, else as a string."""
    stripped = text.strip()
    for one in (JSON, notation):
        transcoder = Transcoder(one)
        end = transcoder.feed(stripped + " ", 0)
        if transcoder.is_done and end >= len(stripped) and stripped[:1] not in "\"'":
            written = transcoder.take_output()
            if not types & _STRING or _type_written(written) in types:
                return written
    return f'"{escaped(text)}"'


def _type_written(written: str) -> str:
    try:
        return type_of(json.loads(written))
    except (ValueError, RecursionError):  # a number with too many digits, or lists nested too deep
        return {"[": "array", "{": "object"}.get(written[0], "number")
