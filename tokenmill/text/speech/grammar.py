"""The grammar of an answer: text, reasoning and tool calls of a model, as Lark text for llguidance.

    auto       (text calls)* text      once an opening marker is written, a valid call must follow
    required   calls                   after reasoning, if the model reasons
    none       the answer's own grammar, after reasoning

Fixed texts come from the format's row, names and arguments from the tools (`argument_rules.py`). The reader reads every
call that the grammar allows as a call of a known tool with arguments that follow its schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.text.speech.argument_rules import ArgumentRules
from tokenmill.text.speech.call_format import CallFormat, Pieces, Slot, pieces
from tokenmill.text.speech.lark_rules import LarkRules, regex_of, without
from tokenmill.text.speech.reading import FENCE, Reading
from tokenmill.text.speech.thinking import ChannelFormat, ThinkingFormat
from tokenmill.types import Tool, ToolChoice

_IDS = {"nine": "/[a-zA-Z0-9]{9}/", "call": "/[a-zA-Z0-9_\\-]{1,40}/", "functions": "/[a-zA-Z0-9_\\-]{1,40}/"}
_INDEX = "/[0-9]{1,3}/"
_GAP = "/[ \\n]{0,3}/"


class AnswerGrammar:
    """Builds the grammar of one answer."""

    def __init__(
        self, reading: Reading, thinking: ThinkingFormat | None, tools: Sequence[Tool], choice: ToolChoice
    ) -> None:
        self._reading = reading
        self._thinking = thinking
        self._tools = tools
        self._choice = choice
        self._rules = LarkRules(reading.control)
        self._row = reading.calls
        self._arguments: dict[str, str] = {}  # by the name of a tool

    def text(self, *, is_thinking: bool, may_think: bool, primer: str, answer: str | None) -> str:
        """Return the grammar as Lark text."""
        if self._reading.channels is not None:
            start = self._channels(self._reading.channels, is_thinking, may_think, primer, answer)
        else:
            start = " ".join(filter(None, (self._thought(is_thinking, may_think), self._body(primer, answer))))
        return self._rules.text(start)

    # ── thinking ─────────────────────────────────────────────────────────────────────────────────────────

    def _thought(self, is_thinking: bool, may_think: bool) -> str:
        if self._thinking is None or not (is_thinking or may_think):
            return ""
        rules, thinking = self._rules, self._thinking
        body = without(regex_of(text) for text in (*self._openers(), thinking.closer.strip()))
        rest = f"{rules.until(body, thinking.closer.strip())} {rules.add('GAP', _GAP)}"
        if is_thinking:
            return rest
        return "(" + rules.add("thought", f"{rules.fixed(thinking.opener)} {rest}") + ")?"

    def _openers(self) -> list[str]:
        return [self._reading.alphabet.decode(entry.opener) for entry in self._reading.entries] if self._tools else []

    # ── the answer ───────────────────────────────────────────────────────────────────────────────────────

    def _body(self, primer: str, answer: str | None) -> str:
        rules = self._rules
        if not self._tools or self._choice.mode == "none":
            return f"{self._gap()} {answer}" if answer is not None else self._text(())
        if self._choice.mode == "required":
            return f"{self._gap()} {self._calls(skipped=primer)}"
        if answer is not None:
            return f"{self._gap()} " + rules.add("either", f"{self._calls(skipped=primer)} | {answer}")
        return self._auto(primer)

    def _auto(self, primer: str) -> str:
        row, rules, reading = self._row, self._rules, self._reading
        assert row is not None
        if not reading.entries:  # calls without a marker are calls only at the beginning
            return rules.add("either", f"{self._calls()} | {self._text(())}")
        opener = reading.alphabet.decode(reading.entries[0].opener)
        others = [text for text in self._openers() if text != opener and not rules.is_control(text)]
        if opener == row.prompt:
            openers, segment = self._named_segments(row)
        else:
            written = "" if opener in row.also_opens else opener
            trigger = rules.until(self._text_body(others), opener)
            openers = [] if any(map(rules.is_control, rules.split(opener))) else [opener]
            segment = rules.add("segment", f"{self._marked(others)} {trigger} {self._calls(skipped=written)}")
        text = self._text([*openers, *others])
        body = f"{segment}* {text}" if self._choice.parallel else f"({segment} | {text})"
        if primer and row.prompt == primer:
            rest = rules.fixed(row.ignored[0][len(primer) :])
            return rules.add("either", f"{self._calls(skipped=primer)} | {rest} {body}")
        return rules.add("either", f"{self._bare()} | {body}") if reading.object_keys else body

    def _named_segments(self, row: CallFormat) -> tuple[list[str], str]:
        """Return, for a marker that text may contain too (`>>>`), the texts that open a call of each tool, and the rule
        for text and such a call."""
        openers = [f"{row.prompt}{tool.name}\n" for tool in self._tools]
        calls = [
            self._rules.until(self._text_body(()), opener) + " " + self._call(row.call_pieces, tool, opener)
            for tool, opener in zip(self._tools, openers, strict=True)
        ]
        return openers, self._rules.add("segment", " | ".join(calls))

    def _text(self, excluded: Sequence[str]) -> str:
        """Return any text without the given markers; it may contain control tokens that surround an answer."""
        text = self._rules.add("TEXT", self._text_body(excluded))
        marked = self._marked(excluded)
        return self._rules.add("text", f"{marked} {text}") if marked else text

    def _marked(self, excluded: Sequence[str]) -> str:
        """Return any number of texts that each end with a control token that surrounds an answer."""
        text, marks = self._rules.add("TEXT", self._text_body(excluded)), self._ignored()
        return self._rules.add("marked", f"{text} {marks}") + "*" if marks else ""

    def _text_body(self, excluded: Sequence[str]) -> str:
        """Return a terminal for text that contains none of the given markers, and does not begin like a bare call."""
        body = without(map(regex_of, excluded))
        names = "|".join(regex_of(tool.name) for tool in self._tools)
        bare = self._reading.bare_entries
        openers = "|".join(regex_of(opener) for opener in bare if len(opener) > 2 and opener != FENCE)
        if openers and names:
            body = rf"{body} & ~/\s*({openers})(?s:.*)/"
        if not names or ("{" not in bare and "[" not in bare):
            return body
        if self._reading.object_keys is None:
            return rf"{body} & ~/\s*\[\s*({names})\((?s:.*)/"
        begins = rf"\"({names})\""
        if self._reading.object_keys.name is not None:
            begins = rf"(\"(name|tool_name)\"\s*:\s*{begins}|\"(arguments|parameters)\")"
        return rf"{body} & ~/\s*(```json\s*)?\{{\s*{begins}(?s:.*)/"

    def _ignored(self) -> str:
        rules, reading = self._rules, self._reading
        marks = [
            text for text in map(reading.alphabet.decode, reading.ignored) if rules.is_control(rules.split(text)[0])
        ]
        return rules.add("mark", " | ".join(map(rules.fixed, marks))) if marks else ""

    def _gap(self) -> str:
        marks = self._ignored()
        return f"{marks}*" if marks else ""

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────

    def _bare(self) -> str:
        """Return a call without its markers, at the beginning of an answer: some models leave them out."""
        keys = self._reading.object_keys
        assert keys is not None
        if not keys.head and self._row and not self._row.section[0]:
            return self._calls()
        call = self._any_call(pieces(keys.template.strip()))
        return self._rules.add("bare", f'{call} | "```json\\n" {call} "\\n```"')

    def _calls(self, skipped: str = "") -> str:
        """Return all calls of an answer with their section; `skipped`: the part of them that is already written."""
        row, rules = self._row, self._rules
        assert row is not None
        opening, closing = row.section
        template = pieces(row.header) + row.call_pieces
        first = self._any_call(pieces(opening) + template, skipped)
        more = self._any_call(pieces(row.join) + template) + "*" if self._choice.parallel else ""
        parts = (first, more, rules.fixed(closing))
        return rules.add("calls", " ".join(part for part in parts if part))

    def _any_call(self, template: Pieces, skipped: str = "") -> str:
        rules = self._rules
        calls = [rules.add("call", self._call(template, tool, skipped)) for tool in self._tools]
        return rules.add("any_call", " | ".join(calls))

    def _call(self, template: Pieces, tool: Tool, skipped: str) -> str:
        row, rules = self._row, self._rules
        assert row is not None
        parts, text = [], ""
        for piece in template:
            if isinstance(piece, str):
                text += piece
                continue
            if piece.name == "name":
                text += tool.name
                continue
            parts += [rules.fixed(text.removeprefix(skipped)), self._slot(piece, tool)]
            text, skipped = "", ""
        return " ".join(part for part in (*parts, rules.fixed(text)) if part)

    def _slot(self, slot: Slot, tool: Tool) -> str:
        row = self._row
        assert row is not None
        if slot.name == "args":
            if tool.name not in self._arguments:
                rule = self._rules.add("arguments", ArgumentRules(self._rules, row).of(tool))
                self._arguments[tool.name] = rule
            return self._arguments[tool.name]
        return self._rules.add("SLOT", _INDEX if slot.name == "index" else _IDS[row.ids])

    # ── answers made of messages with headers ────────────────────────────────────────────────────────────

    def _channels(
        self, channels: ChannelFormat, is_thinking: bool, may_think: bool, primer: str, answer: str | None
    ) -> str:
        """Return messages up to one that ends the answer: a call, or text for the user."""
        rules = self._rules
        message, begin = rules.fixed(channels.message), rules.fixed(channels.prompt)
        body = without(regex_of(one) for one in (*self._openers(), *channels.ends, *channels.begins))
        text = rules.add("TEXT", body)
        ended = rules.until(body, channels.ends[0] + channels.prompt)
        thought = rules.add("thought", f"{rules.fixed(channels.thought_header)} {message} {ended}")
        last = []
        if self._tools and self._choice.mode != "none":
            last.append(self._message_calls(channels))
        if self._choice.mode != "required" or not self._tools:
            content = answer if answer is not None else text
            last += [f"{rules.fixed(header)} {message} {content}" for header in channels.text_headers[:1]]
        is_forced = self._choice.mode == "required" and bool(self._tools)
        headers = () if is_forced else channels.text_headers[1:]  # or text messages could delay the call forever
        asides = [f"{rules.fixed(header)} {message} {ended}" for header in headers]
        before = rules.add("aside", " | ".join([*([thought] if may_think or is_thinking else []), *asides]) or '""')
        start = [] if primer else [begin]
        if is_thinking:
            start = [ended]
        return " ".join([*start, f"{before}*", rules.add("last", " | ".join(last))])

    def _message_calls(self, channels: ChannelFormat) -> str:
        row, rules = self._row, self._rules
        assert row is not None
        calls = [
            rules.add("call", self._call(pieces(header + channels.message) + row.call_pieces[:-1], tool, ""))
            for tool in self._tools
            for header in channels.call_headers
        ]
        one = rules.add("any_call", " | ".join(calls))
        tail = rules.fixed(str(row.call_pieces[-1]))
        ending = f"({tail})?" if row.call_pieces[-1] in channels.ends else tail
        joined = f"{tail} {rules.fixed(row.join + channels.prompt)}"
        more = f"({one} {joined})*" if self._choice.parallel else ""
        return " ".join(part for part in (more, one, ending) if part)
