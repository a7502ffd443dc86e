"""A format prepared for reading: its texts with control tokens as characters, and the markers to search for.

Made once for each model and shared by the readers of all answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tokenmill.text.speech.call_format import CallFormat, ObjectKeys
from tokenmill.text.speech.markers import ControlAlphabet, MarkerSearch, opening_marker, squeezed
from tokenmill.text.speech.thinking import ChannelFormat, ThinkingFormat
from tokenmill.text.speech.transcode import GEMMA, JSON, PYTHON, Notation

SPACE = " \t\r\n"
FENCE = "```json"


@dataclass(frozen=True)
class Entry:
    """A marker that begins calls, and the rest of the fixed text that must follow it: of the section, of the call."""

    opener: str
    section_rest: str | None  # None: the section's opening text is missing, or the format has no section
    head_rest: str
    next_head: str = ""  # begins each further call
    closer: str = ""  # may follow all calls


class Reading:
    """A format prepared for reading: its texts with control tokens as characters. Shared by all readers of a model."""

    def __init__(
        self,
        calls: CallFormat | None,
        thinking: ThinkingFormat | None,
        channels: ChannelFormat | None,
        control: Mapping[str, int],
        lead: str = "",
    ) -> None:
        """`lead`: white space that the template writes between an answer's text and its calls."""
        self.control = control
        self.alphabet = ControlAlphabet(control)
        self.calls = calls
        self.channels = channels
        self.object_keys: ObjectKeys | None = None
        encode = self.alphabet.encode
        self.think_opener = encode(thinking.opener.strip()) if thinking else ""
        self.think_closer = encode(thinking.closer.strip()) if thinking else ""
        ignored = (thinking.ignored if thinking else ()) + (calls.ignored if calls else ())
        self.ignored = tuple(encode(text) for text in ignored)
        self.lead = lead if not lead.strip() else ""
        self.message_begins = tuple(map(encode, channels.begins)) if channels else ()
        self.message_ends = tuple(map(encode, channels.ends)) if channels else ()
        self.message_start = encode(channels.message) if channels else ""
        if calls is not None:
            self.section_open, self.section_close = map(encode, calls.section)
            self.join = squeezed(encode(calls.join)) if not calls.join.strip(SPACE + ",;") else ""
            self.object_keys = calls.object_keys
            self.call_pieces = tuple(encode(p) if isinstance(p, str) else p for p in calls.call_pieces)
            self.arg_pieces = tuple(encode(p) if isinstance(p, str) else p for p in calls.arg_pieces)
            self.also_opens = tuple(map(encode, calls.also_opens))
            quotes = tuple(map(encode, GEMMA.quotes))
            gemma = Notation(quotes=quotes, escapes="none", has_bare_keys=True, is_json=False)
            self.notation = {"gemma": gemma, "python": PYTHON, "raw_python": PYTHON}.get(calls.values, JSON)
        self._by_marker = {entry.opener: entry for entry in self.entries}

    @cached_property
    def head(self) -> str:
        """The fixed text before the first slot of a call."""
        if self.calls is None:
            return ""
        if self.object_keys is not None:
            return self.alphabet.encode(self.object_keys.head)
        first = self.call_pieces[0]
        return first if isinstance(first, str) else ""

    @cached_property
    def tail(self) -> str:
        """The fixed text after the arguments of a call."""
        if self.object_keys is not None:
            return self.alphabet.encode(self.object_keys.tail)
        last = self.call_pieces[-1]
        return last if isinstance(last, str) else ""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Markers that begin calls anywhere in an answer. If any of them is a control token, only those count: a file
        that a model quotes must not become a call."""
        if not any(map(self._has_control, self._all_entries)):
            return self._all_entries
        return tuple(entry for entry in self._all_entries if self._has_control(entry))

    def _has_control(self, entry: Entry) -> bool:
        return self.alphabet.decode(entry.opener) != entry.opener

    @cached_property
    def _all_entries(self) -> tuple[Entry, ...]:
        if self.calls is None:
            return ()
        found = []
        head, section = self.head.strip(), self.section_open.strip()
        are_alike = bool(head and section) and opening_marker(section) == opening_marker(head)
        if section:
            opener = section if are_alike else opening_marker(section)
            if self._is_marker(opener):
                found.append(Entry(opener, squeezed(section[len(opener) :]), squeezed(head), squeezed(head)))
        while head:  # a call may begin with its second marker if the model left out the first
            opener = head.split()[0] if are_alike else opening_marker(head)
            whole, head = squeezed(head), head[len(opener) :].lstrip()
            if self._is_marker(opener):
                found.append(Entry(opener, None, squeezed(head), whole))
            if not head.startswith("<"):
                break
        found += [Entry(opener, None, "") for opener in self.also_opens]
        return tuple(found)

    def _is_marker(self, text: str) -> bool:
        """Return whether a text is specific enough to begin a call; a bracket alone is not."""
        return len(text) > 2 or self.is_control(text)

    @property
    def has_fields(self) -> bool:
        """Return whether arguments are fields in brackets: name(key=value) or name{key:value}."""
        return self.calls is not None and self.calls.values in ("python", "gemma")

    @property
    def has_index_ids(self) -> bool:
        """Return whether a call's id is made of its name and index, as its template expects in the history."""
        return self.calls is not None and self.calls.ids == "functions"

    @property
    def key_mark(self) -> str:
        """The text between a field's key and its value."""
        return "=" if self.calls is not None and self.calls.values == "python" else ":"

    def entry_of(self, marker: str) -> Entry | None:
        return self._by_marker.get(marker.removeprefix(self.lead)) or self._by_marker.get(marker)

    @cached_property
    def bare_entries(self) -> dict[str, Entry]:
        """Beginnings of calls without their own marker, which are recognised only at the beginning of an answer."""
        if self.calls is None:
            return {}
        found = {entry.opener: entry for entry in self._all_entries if entry not in self.entries}
        if self.object_keys is not None:
            found |= {"{": Entry("", None, ""), FENCE: Entry(FENCE, None, "", closer="```")}
        if self.calls.values == "python":
            found |= {"[": Entry("[", "", "")}
        return found

    @cached_property
    def text_markers(self) -> MarkerSearch:
        """The markers to search for after text has begun."""
        openers = [entry.opener for entry in self.entries]
        led = [self.lead + opener for opener in openers if self.lead]
        control = [text for text in (self.think_opener, *self.ignored) if self.is_control(text)]
        return MarkerSearch([*openers, *led, *control, *self.message_begins, *self.message_ends])

    @cached_property
    def first_markers(self) -> MarkerSearch:
        """The markers to search for before text has begun."""
        markers = [*self.text_markers.markers, self.think_opener, *self.ignored]
        return MarkerSearch([*(marker.strip() for marker in markers), *self.bare_entries])

    @cached_property
    def thought_markers(self) -> MarkerSearch:
        openers = [entry.opener for entry in self.entries]
        closers = [self.think_closer, "\n" + self.think_closer] if self.think_closer else []
        return MarkerSearch([*closers, *openers, *self.message_begins, *self.message_ends])

    def is_control(self, text: str) -> bool:
        """Return whether a marker begins with a control token, which no text can imitate."""
        return bool(text) and "\ud800" <= text[0] <= "\udfff"
