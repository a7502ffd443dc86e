"""Converts the conversation of a Messages body (`system` and `messages`) to `Message`s, which know no dialect.

The content of a turn is a string or a list of blocks. The text blocks of a turn are joined by line breaks, and
consecutive turns of the same role are merged. An assistant's blocks become one message with reasoning, text and calls.
A user's `tool_result` blocks become messages of the role `tool`.

    user       [text, tool_result, tool_result, text]  ──►  user, tool, tool, user
    assistant  [thinking, text, tool_use]              ──►  assistant (reasoning, content, tool_calls)
    system                                             ──►  system, at the same position

Claude Code begins its system prompt with a block for Anthropic's accounting, which differs between requests. It has no
meaning for a model and would prevent all prefix cache hits, so it is removed.

Thinking blocks are used only with a valid signature of this server (`signatures.py`). Blocks that no model here can
read (images, results of Anthropic's server tools) are refused with their type. A final assistant turn (prefill) is
continued.
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

MAX_MESSAGES = 100_000  # Anthropic's limit
MAX_BLOCKS = 10_000
ROLES = ("user", "assistant", "system")
ACCOUNTING_PREFIX = "x-anthropic-billing-header:"
USER_BLOCKS = "text, document or tool_result"
ASSISTANT_BLOCKS = "text, thinking, redacted_thinking or tool_use"


@dataclass(frozen=True)
class ParsedTurns:
    """The messages of a conversation, and the tools that were loaded in it."""

    messages: list[Message]
    loaded_tools: frozenset[str]  # named by `tool_reference` blocks


def parse_conversation(fields: BodyFields, signer: ThoughtSigner) -> ParsedTurns:
    values = fields.items("messages", MAX_MESSAGES)
    if not values:
        refuse("messages", "is required and must not be empty")
    turns = _Turns(signer)
    system = _system(fields)
    if system:
        turns.add(Message(role="system", content=system))
    for number, value in enumerate(values):
        turns.add_turn(value, f"messages[{number}]")
    _check_prefill(turns.messages[-1])
    return ParsedTurns(turns.messages, frozenset(turns.loaded_tools))


def _check_prefill(last: Message) -> None:
    """Refuse a final assistant turn that can't be continued."""
    if last.role == "assistant" and (last.tool_calls or not last.content):
        refuse("messages", "may end with an assistant turn only if it ends with text, which is continued")
    if last.role == "assistant" and (last.content or "")[-1:].isspace():
        refuse("messages", "final assistant content cannot end with trailing whitespace")


def _system(fields: BodyFields) -> str:
    if isinstance(fields.get("system"), str):
        blocks = [fields.required_text("system")]
    else:
        values = fields.items("system", MAX_BLOCKS) or []
        blocks = [_text_only(value, f"system[{number}]") for number, value in enumerate(values)]
    return "\n".join(text for text in blocks if not text.startswith(ACCOUNTING_PREFIX))


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
    """Return the blocks of a content; a string is one text block."""
    content = fields.get(key)
    if isinstance(content, str):
        return [BodyFields({"type": "text", "text": content}, f"{fields.name(key)}.")]
    values = fields.items(key, MAX_BLOCKS)
    if values is None:
        refuse(fields.name(key), "is required: a string or a list of blocks")
    return [_block(value, f"{fields.name(key)}[{number}]") for number, value in enumerate(values)]


def _refuse_block(block: BodyFields, kind: str, known: str) -> NoReturn:
    if kind in ("image", "document"):
        refuse(block.name("type"), f"{kind} is not supported by this model; it reads text only")
    refuse(block.name("type"), f"must be {known} here, got {shown(kind)}")


@dataclass
class _Turns:
    """Collects messages; consecutive turns of the same role are merged."""

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
            self.add(Message(role="system", content=_joined_text(turn)))
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
                    block.required_text("data")  # encrypted by another server, so it is dropped
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
        """Convert a tool's result. Chat templates have no field for a failed call, so the text says it."""
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


def _joined_text(fields: BodyFields) -> str:
    """Return the text of a content that may hold only text blocks."""
    return "\n".join(_text_only(block.values, block.prefix.rstrip(".")) for block in _blocks(fields, "content"))


def _lines(first: str | None, second: str | None) -> str | None:
    return second if first is None else first if second is None else f"{first}\n{second}"


def _call(block: BodyFields) -> ToolCall:
    arguments = block.object("input")
    if arguments is None:
        refuse(block.name("input"), "is required: an object")
    call_id, name = native_id(block.required_text("id")), block.required_text("name")
    return ToolCall(id=call_id, name=name, arguments=orjson.dumps(arguments.values).decode())


def _document(block: BodyFields) -> str:
    """Return the title, context and text of a plain-text document. Other kinds need a model that reads images."""
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
        text = _joined_text(source)
    else:
        refuse(source.name("type"), f"{shown(kind)} is not supported by this model; it reads text only")
    return "\n".join(filter(None, (block.text("title"), block.text("context"), text)))


def keep_recent_reasoning(messages: list[Message], num_turns: int) -> list[Message]:
    """Return the messages with reasoning only in the last `num_turns` assistant turns that have any."""
    edited, num_left = [], num_turns
    for message in reversed(messages):
        if message.reasoning is not None:
            num_left -= 1
            if num_left < 0:
                message = msgspec.structs.replace(message, reasoning=None)
        edited.append(message)
    return edited[::-1]
