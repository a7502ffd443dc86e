"""The reader: splits a model's streamed answer into text, reasoning and tool calls.

It accepts any answer. What is not a call is text: an opening marker that no call follows, an unknown tool, a call that
is truncated before its name is known. No character is lost; only markers, and white space next to them, are left out.
Each character is processed a fixed number of times, and only text that may begin a marker is held back.

A call is announced (`CallStart`) when its name is known to be one of the tools and its arguments begin. Until then its
text is kept, and is returned as text if it turns out not to be a call. After that the call is final: truncated
arguments are completed to valid JSON, and what follows them is text.

The state machine is one generator per answer: it runs until its input is used up, and resumes there when more arrives.
So the result does not depend on how the answer is split into pieces.

Calls may differ from the format in white space between its fixed texts, in spacing and order of keys in JSON objects,
and by a missing closing marker or section, but not inside values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenmill.text.speech.call_reader import CallReader
from tokenmill.text.speech.reading import SPACE, Entry, Reading
from tokenmill.text.speech.tape import End, Mismatch, Steps, Tape
from tokenmill.types import CallArguments, CallEnd, CallStart, Part, TextPart, ThoughtPart, Tool

_NOT_SPACE = re.compile(rf"[^{SPACE}]")
_MAX_HEADER = 512


class SpeechReader:
    """The reader of one answer. `is_thinking`: the next character is part of a think section, as far as is known."""

    def __init__(
        self, reading: Reading, tools: Sequence[Tool], *, starts_thinking: bool = False, primer: str = ""
    ) -> None:
        """`primer`: the end of the prompt, if it is the beginning of a marker that the answer completes."""
        self.control_ids = frozenset(reading.alphabet.char_of_id)
        self._reading = reading
        self._tape = Tape()
        self._output = PartWriter(reading)
        self._output.is_thinking = starts_thinking
        self._tools = {tool.name: tool for tool in tools}
        self._calls = CallReader(reading, self._tools, self._tape, self._output) if self._tools else None
        self._num_primed = len(primer)
        self._steps = self._run()
        next(self._steps)
        self._tape.add(reading.alphabet.encode(primer))

    @property
    def is_thinking(self) -> bool:
        return self._output.is_thinking

    def push(self, text: str) -> list[Part]:
        """Process more text; return the parts that are certain so far."""
        if text:
            self._tape.add(text)
            self._advance()
        return self._output.take()

    def push_control(self, token_id: int) -> list[Part]:
        """Process a control token, one of `control_ids`; return the parts that are certain so far."""
        return self.push(self._reading.alphabet.char_of_id[token_id])

    def finish(self) -> list[Part]:
        """End the answer: return the remaining parts, with open calls completed."""
        if not self._tape.is_over:
            self._tape.is_over = True
            self._advance()
        return self._output.take()

    def _advance(self) -> None:
        next(self._steps, None)

    # ── text and reasoning ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> Steps:
        yield
        try:
            while True:
                yield from self._thought() if self.is_thinking else self._text()
        except End:
            self._emit(self._tape.rest())
            self._output.finish()

    def _emit(self, text: str) -> None:
        if self._num_primed:  # the primer, which belongs to the prompt, turned out to begin no marker
            primed = min(self._num_primed, len(text))
            text, self._num_primed = text[primed:], self._num_primed - primed
        if self._output.is_thinking:
            self._output.add_thought(text)
        else:
            self._output.add_text(text)

    def _text(self) -> Steps:
        """Pass on text up to the first marker, and process the marker."""
        tape, reading = self._tape, self._reading
        while True:
            is_fresh = self._output.is_fresh
            if is_fresh:
                yield from self._skip_first_space()
            markers = reading.first_markers if is_fresh else reading.text_markers
            found = markers.find(tape.text, tape.position)
            if is_fresh and (found is None or found.start() > tape.position):
                if markers.num_held(tape.text, tape.position) != len(tape.text) - tape.position:
                    self._emit(tape.take_to(tape.position + 1))  # text begins
                    continue
                found = None
            if found is None:
                self._emit(tape.take_to(len(tape.text) - markers.num_held(tape.text, tape.position)))
                yield from tape.more()
                continue
            self._emit(tape.take_to(found.start()))
            yield from self._marker(found.group())
            return

    def _skip_first_space(self) -> Steps:
        """Hold back white space at the beginning of a text: it is part of the text only if text follows."""
        tape = self._tape
        while True:
            first = _NOT_SPACE.search(tape.text, tape.position)
            self._emit(tape.take_to(first.start() if first else len(tape.text)))
            if first:
                return
            yield from tape.more()

    def _marker(self, marker: str) -> Steps:
        reading, tape = self._reading, self._tape
        is_fresh = self._output.is_fresh
        if marker == reading.think_opener and marker:
            tape.take_to(tape.position + len(marker))
            self._begin_thought()
        elif marker in reading.ignored or marker in reading.message_ends:
            tape.take_to(tape.position + len(marker))
            self._output.break_text()
        elif marker in reading.message_begins:
            yield from self._message()
        else:
            entry = reading.entry_of(marker) or (reading.bare_entries.get(marker) if is_fresh else None)
            yield from self._call(entry, marker)

    def _call(self, entry: Entry | None, marker: str) -> Steps:
        """Read the calls after an opening marker; if there are none, the marker is text."""
        tape = self._tape
        if entry is None or self._calls is None:
            self._emit(tape.take_to(tape.position + len(marker)))
            return
        lead = tape.take_to(tape.position + len(marker) - len(entry.opener)) if entry.opener else ""
        try:
            yield from self._calls.read_calls(entry)
        except Mismatch:
            self._emit(lead + tape.take_to(tape.position + max(1, len(entry.opener))))

    def _begin_thought(self) -> None:
        self._output.break_text()
        self._output.is_thinking = True

    def _end_thought(self) -> None:
        self._output.end_thought()
        self._output.is_thinking = False

    def _thought(self) -> Steps:
        """Pass on reasoning up to the closing marker or a call: some models do not close their reasoning first."""
        tape, reading = self._tape, self._reading
        while True:
            markers = reading.thought_markers
            found = markers.find(tape.text, tape.position)
            if found is None:
                self._emit(tape.take_to(len(tape.text) - markers.num_held(tape.text, tape.position)))
                yield from tape.more()
                continue
            self._emit(tape.take_to(found.start()))
            marker = found.group()
            if marker.lstrip("\n") == reading.think_closer or marker in reading.message_ends:
                tape.take_to(tape.position + len(marker))
                self._end_thought()
            elif marker in reading.message_begins:
                yield from self._message()
            else:
                yield from self._call(reading.entry_of(marker), marker)
            return

    # ── answers made of messages with headers ────────────────────────────────────────────────────────────

    def _message(self) -> Steps:
        """Read a header, and switch to what it announces: reasoning, a call's arguments, or text."""
        tape, channels = self._tape, self._reading.channels
        assert channels is not None
        if not (yield from tape.attempt(self._headed_message())):
            self._emit(tape.take_to(tape.position + 1))

    def _headed_message(self) -> Steps:
        tape, reading = self._tape, self._reading
        assert reading.channels is not None
        header = reading.alphabet.decode((yield from tape.until(reading.message_start, _MAX_HEADER)))
        is_thought = reading.channels.is_thought(header)
        if not is_thought and not reading.channels.is_text(header):
            name = reading.channels.called(header)
            if name is None or name not in self._tools or self._calls is None:
                raise Mismatch
            if not reading.head:
                yield from self._calls.read_message(name)
                return
        tape.commit()
        self._num_primed = 0
        if self._output.is_thinking:
            self._end_thought()
        if is_thought:
            self._begin_thought()
        else:
            self._output.break_text()


class PartWriter:
    """Collects the parts of an answer, and decides which white space is kept.

    White space at the beginning, after a call or after reasoning is held back until text follows; if a call or the end
    follows instead, it is dropped. A line break at the beginning or end of reasoning belongs to the markers.
    """

    def __init__(self, reading: Reading) -> None:
        self.is_thinking = False
        self.is_fresh = True  # no text since the beginning, the last call or the last thought
        self._reading = reading
        self._pending: list[str] = []  # white space held back
        self._drops_line_breaks = False
        self._chunks: list[str] = []  # of the last part
        self._kind: type[TextPart | ThoughtPart | CallArguments] | None = None
        self._parts: list[Part] = []
        self._index = -1
        self._has_output = False

    def add_text(self, text: str) -> None:
        if self.is_fresh:
            text = self._with_pending_space(text)
        if text:
            self._add(TextPart, self._reading.alphabet.decode(text))

    def add_thought(self, text: str) -> None:
        if self.is_fresh:
            text = self._with_pending_space(text)
        if text:
            self._add(ThoughtPart, self._reading.alphabet.decode(text))

    def _with_pending_space(self, text: str) -> str:
        """Return the text with the white space held back before it; hold it back too if it is only white space."""
        first = _NOT_SPACE.search(text)
        if first is None:
            self._pending.append(text)
            return ""
        space = "".join(self._pending) + text[: first.start()]
        self._pending.clear()
        self.is_fresh = False
        if self.is_thinking:
            space = space.removeprefix("\n")
        elif self._drops_line_breaks:
            space = space.lstrip("\r\n")
        return space + text[first.start() :]

    def break_text(self) -> None:
        """Mark a boundary between text and something else: white space around it is dropped."""
        self._pending.clear()
        self.is_fresh = True

    def end_thought(self) -> None:
        self.break_text()
        self._drops_line_breaks = True

    def start_call(self, name: str, call_id: str | None) -> None:
        self.break_text()
        self.is_thinking = False
        self._index += 1
        self._close()
        calls = self._reading.calls
        assert calls is not None
        self._parts.append(CallStart(self._index, call_id or calls.new_id(name, self._index), name))

    def add_arguments(self, fragment: str) -> None:
        if fragment:
            self._add(CallArguments, fragment)

    def end_call(self) -> None:
        self._close()
        self._parts.append(CallEnd(self._index))

    def finish(self) -> None:
        """End the answer. White space held back is kept only if the answer contains nothing else."""
        if not self._has_output and self._pending and not self.is_thinking:
            self._add(TextPart, "".join(self._pending))
            self._pending.clear()

    def take(self) -> list[Part]:
        """Return the parts added since this was last called."""
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: type[TextPart | ThoughtPart | CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._chunks.append(text)
        self._has_output = True

    def _close(self) -> None:
        if self._chunks:
            text = "".join(self._chunks)
            self._parts.append(
                CallArguments(self._index, text) if self._kind is CallArguments else self._text_part(text)
            )
            self._chunks.clear()
        self._kind = None

    def _text_part(self, text: str) -> Part:
        return TextPart(text) if self._kind is TextPart else ThoughtPart(text)
