"""Converts the items of a Responses conversation to `Message`s, which know no dialect.

    message                        ──► a message of its role; an assistant's is merged with adjacent reasoning and calls
    reasoning                      ──► the assistant's reasoning
    function_call, custom_tool_call, tool_search_call, local_shell_call, mcp_call      ──► the assistant's calls
    ..._output                     ──► a message of the role `tool`
    additional_tools               ──► more tools
    web_search_call                ──► a line of text with the query of another server's search

Clients send reasoning back in one of three forms: encrypted by this server (`encrypted_content`), as `content`, or as
`summary`, which here is the complete reasoning. Reasoning encrypted by another server is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.server.openai.parse import arguments_text
from tokenmill.server.openai.responses.tools import TOOL_SEARCH, CalledTool, OfferedTools, flat_name
from tokenmill.server.openai.tools import MAX_TOOLS
from tokenmill.server.request_ids import new_id
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import Message, ToolCall, ToolKind

Item = dict[str, Any]
MAX_ITEMS = 16_384
MAX_PARTS = 1024
MAX_ID = 256  # characters
ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "refusal": "refusal"}
ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "tool_search_call": "tsc_",
    "tool_search_output": "tso_",
}


@dataclass
class ItemReader:
    """Collects the messages and the tools of a list of items."""

    signer: ThoughtSigner
    offered: OfferedTools
    messages: list[Message] = field(default_factory=list)
    _is_open: bool = False  # the last message is the assistant's, and the next item may belong to the same turn

    def read(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            refuse(path, f"must be an object, got {kind_of(value)}")
        fields = BodyFields(value, f"{path}.")
        kind = kind_of_item(fields)
        fields.text("id", MAX_ID)
        read = READERS.get(kind)
        if read is None:
            refuse(fields.name("type"), f"{shown(kind)} is not supported by this server")
        read(self, fields)

    # ── messages and reasoning ─────────────────────────────────────────────────────────────────────────

    def _message(self, fields: BodyFields) -> None:
        role = fields.required_text("role")
        if role not in ROLES:
            refuse(fields.name("role"), f"must be one of {', '.join(ROLES)}, got {shown(role)}")
        text = content_text(fields, "content")
        if role == "assistant":
            self._assistant(content=text)
        else:
            self._add(Message(role=ROLES[role], content=text))

    def _reasoning(self, fields: BodyFields) -> None:
        sealed = fields.text("encrypted_content")
        thought = self.signer.verified("", sealed) if sealed else None
        for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
            thought = thought or _reasoning_text(fields, key, kind)
        if thought:
            self._assistant(reasoning=thought)

    def _web_search_call(self, fields: BodyFields) -> None:
        action = fields.object("action")
        query = None if action is None else action.text("query")
        self._assistant(content=f"[searched the web{f': {query}' if query else ''}]")

    # ── calls and their outputs ────────────────────────────────────────────────────────────────────────

    def _function_call(self, fields: BodyFields) -> None:
        name = flat_name(CalledTool("function", fields.required_text("name"), fields.text("namespace")))
        self._call(fields.required_text("call_id"), name, arguments_text(fields))

    def _custom_call(self, fields: BodyFields) -> None:
        name = flat_name(CalledTool("custom", fields.required_text("name"), fields.text("namespace")))
        self._call(fields.required_text("call_id"), name, fields.required_text("input"), "custom")

    def _search_call(self, fields: BodyFields) -> None:
        self._call(_call_id(fields), TOOL_SEARCH, arguments_text(fields))

    def _shell_call(self, fields: BodyFields) -> None:
        action = fields.object("action")
        if action is None:
            refuse(fields.name("action"), "is required")
        self._call(_call_id(fields), "local_shell", orjson.dumps(action.values).decode())

    def _mcp_call(self, fields: BodyFields) -> None:
        call_id = fields.required_text("id")
        name = flat_name(CalledTool("function", fields.required_text("name"), fields.required_text("server_label")))
        self._call(call_id, name, arguments_text(fields))
        if fields.get("output") is not None or fields.get("error") is not None:
            error = fields.get("error")
            text = fields.text("output") if error is None else f"Error: {orjson.dumps(error).decode()}"
            self._add(Message(role="tool", content=text, tool_call_id=call_id))

    def _output(self, fields: BodyFields) -> None:
        self._add(Message(role="tool", content=content_text(fields, "output"), tool_call_id=_call_id(fields)))

    def _search_output(self, fields: BodyFields) -> None:
        tools = fields.items("tools", MAX_TOOLS) or []
        names = self.offered.add_all(tools, fields.name("tools"), are_loaded=True)
        text = f"Available now: {', '.join(names)}." if names else "Nothing was found."
        self._add(Message(role="tool", content=text, tool_call_id=_call_id(fields)))

    def _additional_tools(self, fields: BodyFields) -> None:
        self.offered.add_all(fields.items("tools", MAX_TOOLS) or [], fields.name("tools"))

    # ── turns ──────────────────────────────────────────────────────────────────────────────────────────

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._is_open = False

    def _call(self, call_id: str, name: str, arguments: str, kind: ToolKind = "function") -> None:
        self._assistant(call=ToolCall(id=call_id, name=name, arguments=arguments, kind=kind))

    def _assistant(
        self, *, content: str | None = None, reasoning: str | None = None, call: ToolCall | None = None
    ) -> None:
        """Add to the assistant's message. Reasoning after text or calls begins a new message."""
        last = self.messages[-1] if self._is_open else None
        if last is None or (reasoning is not None and (last.content is not None or last.tool_calls)):
            self.messages.append(last := Message(role="assistant"))
            self._is_open = True
        self.messages[-1] = msgspec.structs.replace(
            last,
            content=_lines(last.content, content),
            reasoning=_lines(last.reasoning, reasoning),
            tool_calls=last.tool_calls if call is None else [*last.tool_calls, call],
        )


READERS = {
    "message": ItemReader._message,
    "reasoning": ItemReader._reasoning,
    "function_call": ItemReader._function_call,
    "function_call_output": ItemReader._output,
    "custom_tool_call": ItemReader._custom_call,
    "custom_tool_call_output": ItemReader._output,
    "tool_search_call": ItemReader._search_call,
    "tool_search_output": ItemReader._search_output,
    "local_shell_call": ItemReader._shell_call,
    "local_shell_call_output": ItemReader._output,
    "mcp_call": ItemReader._mcp_call,
    "web_search_call": ItemReader._web_search_call,
    "additional_tools": ItemReader._additional_tools,
}


def kind_of_item(fields: BodyFields) -> str:
    """Return the type of an item, which messages and item references may omit."""
    kind = fields.text("type")
    if kind is not None:
        return kind
    return "message" if fields.get("role") is not None else "item_reference" if fields.get("id") else "message"


def content_text(fields: BodyFields, key: str) -> str:
    """Return the text of a string or of a list of parts; parts other than text are refused with their type."""
    value = fields.get(key)
    if isinstance(value, str):
        return value
    parts = fields.items(key, MAX_PARTS)
    if parts is None:
        refuse(fields.name(key), "is required: a string or a list of parts")
    return "".join(_part_text(part, f"{fields.name(key)}[{number}]") for number, part in enumerate(parts))


def _part_text(value: object, path: str) -> str:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with a type, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    kind = fields.required_text("type")
    if kind not in TEXT_PARTS:
        refuse(fields.name("type"), f"{shown(kind)} is not supported by this model; it reads text only")
    return fields.required_text(TEXT_PARTS[kind])


def _reasoning_text(fields: BodyFields, key: str, kind: str) -> str | None:
    parts = fields.items(key, MAX_PARTS) or []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == kind]
    return "\n".join(text for text in texts if isinstance(text, str)) or None


def _call_id(fields: BodyFields) -> str:
    return fields.text("call_id") or fields.required_text("id")


def _lines(first: str | None, second: str | None) -> str | None:
    return second if first is None else first if second is None else f"{first}\n{second}"


# ── items as they are stored ───────────────────────────────────────────────────────────────────────────


def input_items(fields: BodyFields, key: str) -> list[Item]:
    """Return the items of a body; a string is one message of the user."""
    value = fields.get(key)
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items = fields.items(key, MAX_ITEMS) or []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            refuse(f"{fields.name(key)}[{number}]", f"must be an object, got {kind_of(item)}")
    return items


def stored_item(item: Item) -> Item:
    """Return an item with an id and in the full form that clients' types expect: a status, and content as parts."""
    kind = kind_of_item(BodyFields(item))
    stored = {"type": kind, **item}
    if not isinstance(stored.get("id"), str):
        stored["id"] = new_id(ID_PREFIXES.get(kind, "item_"))
    if kind == "message":
        stored.setdefault("status", "completed")
        if isinstance(stored.get("content"), str):
            text = {"text": stored["content"]}
            is_output = stored.get("role") == "assistant"
            stored["content"] = [
                {"type": "output_text", **text, "annotations": [], "logprobs": []}
                if is_output
                else {"type": "input_text", **text}
            ]
    return stored
