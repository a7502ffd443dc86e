"""The conversation of a Messages body, `system` and `messages`, as `Message`s that know no dialect.

A turn is a string or a list of blocks. Text blocks of a turn are joined by line breaks; turns of one role in a row are
one turn. An assistant's blocks become one message: its thoughts, its text, its calls. A user's `tool_result` blocks
become messages of the role `tool`.

    user       [text, tool_result, tool_result, text]  ──►  user, tool, tool, user
    assistant  [thinking, text, tool_use]              ──►  assistant (reasoning, content, tool_calls)
    system                                             ──►  system, where it stands

Claude Code begins its system prompt with a block for Anthropic's accounting that differs between requests. It says
nothing to a model and would keep every prompt from finding its prefix in the cache, so it is left out.

A thought counts only with this server's signature (`signatures.py`). What a model can't read (images, results of
tools that Anthropic's servers run) is refused by name. An assistant's turn at the end (prefill) is continued.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import orjson

from tokenmill.server.anthropic.tools import native_id
from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import Message, ToolCall

MAX_MESSAGES = 100_000  # Anthropic's
MAX_BLOCKS = 10_000
ROLES = ("user", "assistant", "system")
ACCOUNTING = "x-anthropic-billing-header:"
USER_BLOCKS = "text, document or tool_result"
ASSISTANT_BLOCKS = "text, thinking, redacted_thinking or tool_use"


@dataclass(frozen=True)
class ParsedTurns:
    """Messages in order, and the tools that were loaded in the course of them."""

    messages: list[Message]
    loaded_tools: frozenset[str]  # named by `tool_reference` blocks


def parse_conversation(fields: BodyFields, signer: ThoughtSigner) -> ParsedTurns:
    given = fields.items("messages", MAX_MESSAGES)
    if not given:
        refuse("messages", "is required and must not be empty")
    turns = _Turns(signer)
    system = _system(fields)
    if system:
        turns.add(Message(role="system", content=system))
    for number, value in enumerate(given):
        turns.add_turn(value, f"messages[{number}]")
    _check_prefill(turns.messages[-1])
    return ParsedTurns(turns.messages, frozenset(turns.loaded_tools))


def _check_prefill(last: Message) -> None:
    """Refuse an assistant's turn at the end that can't be continued."""
    if last.role == "assistant" and (last.tool_calls or not last.content):
        refuse("messages", "that end with an assistant turn must end with its text, which is continued")
    if last.role == "assistant" and (last.content or "")[-1:].isspace():
        refuse("messages", "final assistant content cannot end with trailing whitespace")


def _system(fields: BodyFields) -> str:
    if isinstance(fields.get("system"), str):
        blocks = [fields.required_text("system")]
    else:
        given = fields.items("system", MAX_BLOCKS) or []
        blocks = [_text_only(value, f"system[{number}]") for number, value in enumerate(given)]
    return "\n".join(text for text in blocks if not text.startswith(ACCOUNTING))


def _text_only(value: object, path: str) -> str:
    block = _block(value, path)
    if block.required_text("type") != "text":
        refuse(block.name("type"), f"must be text, got {shown(block.get('type'))}")
    return block.required_text("text")


def _block(value: object, path: str) -> BodyFields:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with a type, got {kind_of(value)}")
    return BodyFields(value, f"{path}.")


def _blocks(fields: BodyFields, key: str) -> list[BodyFields]:
    """The blocks of a content; a string is one block of text."""
    content = fields.get(key)
    if isinstance(content, str):
        return [BodyFields({"type": "text", "text": content}, f"{fields.name(key)}.")]
    given = fields.items(key, MAX_BLOCKS)
    if given is None:
        refuse(fields.name(key), "is required: a string or a list of blocks")
    return [_block(value, f"{fields.name(key)}[{number}]") for number, value in enumerate(given)]


def _refuse_block(block: BodyFields, kind: str, known: str) -> NoReturn:
    if kind in ("image", "document"):
        refuse(block.name("type"), f"{kind} is not supported by this model; it reads text only")
    refuse(block.name("type"), f"must be {known} here, got {shown(kind)}")


@dataclass
class _Turns:
    """Messages so far; turns of one role in a row are joined."""

    signer: ThoughtSigner
    messages: list[Message] = field(default_factory=list)
    loaded_tools: set[str] = field(default_factory=set)

    def add_turn(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            refuse(path, f"must be an object with role and content, got {kind_of(value)}")
        turn = BodyFields(value, f"{path}.")
        role = turn.required_text("role")
        if role not in ROLES:
            refuse(turn.name("role"), f"must be one of {', '.join(ROLES)}, got {shown(role)}")
        if role == "assistant":
            self.add(self._assistant(turn))
        elif role == "system":
            self.add(Message(role="system", content=_joined(turn)))
        else:
            self._add_user(turn)

    def add(self, message: Message) -> None:
        before = self.messages[-1] if self.messages else None
        if before is None or before.role != message.role or message.role == "tool":
            self.messages.append(message)
            return
        self.messages[-1] = msgspec.structs.replace(
            before,
            content=_lines(before.content, message.content),
            reasoning=_lines(before.reasoning, message.reasoning),
            tool_calls=[*before.tool_calls, *message.tool_calls],
        )

    def _assistant(self, turn: BodyFields) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for block in _blocks(turn, "content"):
            match kind := block.required_text("type"):
                case "text":
                    texts.append(block.required_text("text"))
                case "thinking":
                    thoughts.append(self._thought(block))
                case "tool_use":
                    calls.append(_call(block))
                case "redacted_thinking":
                    block.required_text("data")  # another server's: nothing here can read it
                case _:
                    _refuse_block(block, kind, ASSISTANT_BLOCKS)
        return Message(
            role="assistant",
            content="\n".join(texts) if texts or not calls else None,
            reasoning="\n".join(filter(None, thoughts)) or None,
            tool_calls=calls,
        )

    def _thought(self, block: BodyFields) -> str:
        return self.signer.verified(block.required_text("thinking"), block.required_text("signature")) or ""

    def _add_user(self, turn: BodyFields) -> None:
        texts: list[str] = []
        for block in _blocks(turn, "content"):
            match kind := block.required_text("type"):
                case "text":
                    texts.append(block.required_text("text"))
                case "document":
                    texts.append(_document(block))
                case "tool_result":
                    self._add_texts(texts)
                    self.add(self._result(block))
                case _:
                    _refuse_block(block, kind, USER_BLOCKS)
        self._add_texts(texts, is_empty=not self.messages or self.messages[-1].role not in ("user", "tool"))

    def _add_texts(self, texts: list[str], *, is_empty: bool = False) -> None:
        if texts or is_empty:
            self.add(Message(role="user", content="\n".join(texts)))
            texts.clear()

    def _result(self, block: BodyFields) -> Message:
        """A tool's result. Templates have no place to say that a call failed, so its text does."""
        call_id = native_id(block.required_text("tool_use_id"))
        parts = [] if block.get("content") is None else _blocks(block, "content")
        text = "\n".join(map(self._result_text, parts))
        return Message(
            role="tool", content=f"Error: {text}" if block.boolean("is_error") else text, tool_call_id=call_id
        )

    def _result_text(self, part: BodyFields) -> str:
        match kind := part.required_text("type"):
            case "text":
                return part.required_text("text")
            case "document":
                return _document(part)
            case "tool_reference":
                name = part.required_text("tool_name")
                self.loaded_tools.add(name)
                return f"The tool {name} is available."
            case _:
                _refuse_block(part, kind, "text, document or tool_reference")


def _joined(turn: BodyFields) -> str:
    return "\n".join(_text_only(block.values, block.prefix.rstrip(".")) for block in _blocks(turn, "content"))


def _lines(first: str | None, second: str | None) -> str | None:
    return second if first is None else first if second is None else f"{first}\n{second}"


def _call(block: BodyFields) -> ToolCall:
    given = block.object("input")
    if given is None:
        refuse(block.name("input"), "is required: an object")
    name = block.required_text("name")
    return ToolCall(id=native_id(block.required_text("id")), name=name, arguments=orjson.dumps(given.values).decode())


def _document(block: BodyFields) -> str:
    """A document of plain text, after its title and context. Others need a model that reads images."""
    source = block.object("source")
    if source is None:
        refuse(block.name("source"), "is required")
    citations = block.object("citations")
    if citations is not None and citations.boolean("enabled"):
        refuse(citations.name("enabled"), "is not supported by this server")
    kind = source.required_text("type")
    if kind == "text":
        text = source.required_text("data")
    elif kind == "content":
        text = _joined_source(source)
    else:
        refuse(source.name("type"), f"{shown(kind)} is not supported by this model; it reads text only")
    return "\n".join(filter(None, (block.text("title"), block.text("context"), text)))


def _joined_source(source: BodyFields) -> str:
    return "\n".join(_text_only(part.values, part.prefix.rstrip(".")) for part in _blocks(source, "content"))


def with_thinking_of(messages: list[Message], num_turns: int) -> list[Message]:
    """The messages without the thoughts of all but the last `num_turns` assistant turns that have any."""
    kept, left = [], num_turns
    for message in reversed(messages):
        if message.reasoning is not None:
            left -= 1
            if left < 0:
                message = msgspec.structs.replace(message, reasoning=None)
        kept.append(message)
    return kept[::-1]


def num_characters(messages: list[Message]) -> int:
    """The length of all contents; what a template makes of the rest is measured once it is rendered."""
    return sum(len(message.content or "") for message in messages)
