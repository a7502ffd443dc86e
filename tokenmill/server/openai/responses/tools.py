"""Parses the tools of a Responses body: for each tool the form that the model sees and the form that the client knows.

    function      {name, description, parameters, strict}                  ──► a tool
    custom        {name, description, format: {syntax, definition}}        ──► a tool whose input is text, by a grammar
    namespace     {name, description, tools: [function | custom]}          ──► tools named NAMESPACE__NAME
    tool_search   {description, parameters, execution}                     ──► a tool `tool_search`

Calls are returned with the client's names: `function_call` with `namespace` and `name`, `custom_tool_call`,
`tool_search_call`. Tools with `defer_loading` are shown to the model once a `tool_search_output` contains them. If the
server is supposed to search, all tools are shown from the beginning, so that no search is necessary.

`web_search` needs a service that this server does not have. Codex sends it with every request, so it is dropped (and
not repeated in the response) if there are other tools. Alone it is refused, like all other tools of OpenAI's service.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tokenmill.observe.log import get_log
from tokenmill.params import Guided
from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.server.openai.tools import MAX_DESCRIPTION, MAX_TOOLS, MODES, custom_tool, function_tool, parse_grammar
from tokenmill.types import Tool, ToolChoice

log = get_log("server")
CallKind = Literal["function", "custom", "tool_search"]
TOOL_SEARCH = "tool_search"
DROPPED = ("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11")
KNOWN = "function, custom, namespace or tool_search"
ANY_QUERY: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "what the wanted tool does"}},
    "required": ["query"],
}


@dataclass(frozen=True)
class CalledTool:
    """A tool with the client's names."""

    kind: CallKind
    name: str
    namespace: str | None = None


@dataclass
class OfferedTools:
    """All tools of a request."""

    tools: list[Tool] = field(default_factory=list)
    called: dict[str, CalledTool] = field(default_factory=dict)  # by the name that the model sees
    repeated: list[dict[str, Any]] = field(default_factory=list)  # in the form of the response object
    deferred: dict[str, Tool] = field(default_factory=dict)  # not shown to the model until a search has found them
    _dropped: str | None = None  # the field with the type of a dropped tool

    def add_all(self, values: Iterable[Any], path: str, *, are_loaded: bool = False) -> list[str]:
        """Add tools of a body and return their names, as the model sees them. `are_loaded`: a search has found them."""
        tools = [_fields(value, f"{path}[{number}]") for number, value in enumerate(values)]
        is_server_search = any(one.get("type") == TOOL_SEARCH and one.get("execution") != "client" for one in tools)
        return [name for tool in tools for name in self._add(tool, shows_all=are_loaded or is_server_search)]

    def require_usable(self) -> None:
        if self._dropped is not None and not self.tools:
            refuse(self._dropped, f"must be {KNOWN}: this server has no web search")
        if self._dropped is not None:
            log.info("ignoring a client's web_search tool: this server has no web search")

    def load(self, name: str) -> None:
        """Show a deferred tool to the model."""
        if (tool := self.deferred.pop(name, None)) is not None:
            self.tools.append(tool)

    def _add(self, fields: BodyFields, *, shows_all: bool) -> list[str]:
        match fields.required_text("type"):
            case "function" | "custom":
                names = [self._add_one(fields, None, shows_all=shows_all)]
            case "namespace":
                names = self._add_namespace(fields, shows_all=shows_all)
            case "tool_search":
                names = self._add_search(fields)
            case kind if kind in DROPPED:
                self._dropped = fields.name("type")
                return []
            case kind:
                refuse(fields.name("type"), f"must be {KNOWN}, got {shown(kind)}")
        self.repeated.append(_repeated(fields.values))
        return names

    def _add_one(self, fields: BodyFields, namespace: str | None, *, shows_all: bool) -> str:
        kind: CallKind = "custom" if fields.get("type") == "custom" else "function"
        tool = function_tool(fields) if kind == "function" else custom_tool(fields, _grammar(fields.object("format")))
        called = CalledTool(kind, tool.name, namespace)
        name = flat_name(called)
        is_repeated = self.called.get(name) == called and (name in self.deferred or shows_all)
        if is_repeated:  # the output of a search describes the tool again
            self.load(name)
            return name
        self.called[name] = called
        tool = msgspec.structs.replace(tool, name=name)
        if fields.boolean("defer_loading") and not shows_all:
            self.deferred[name] = tool
        else:
            self.tools.append(tool)
        return name

    def _add_namespace(self, fields: BodyFields, *, shows_all: bool) -> list[str]:
        namespace = fields.required_text("name")
        fields.text("description", MAX_DESCRIPTION)
        inner = fields.items("tools", MAX_TOOLS)
        if not inner:
            refuse(fields.name("tools"), "is required and must not be empty")
        names = []
        for number, value in enumerate(inner):
            one = _fields(value, f"{fields.name('tools')}[{number}]")
            kind = one.required_text("type")
            if kind not in ("function", "custom"):
                refuse(one.name("type"), f"must be function or custom, got {shown(kind)}")
            names.append(self._add_one(one, namespace, shows_all=shows_all))
        return names

    def _add_search(self, fields: BodyFields) -> list[str]:
        if fields.one_of("execution", ("server", "client")) != "client":
            return []
        parameters = fields.object("parameters")
        description = fields.text("description", MAX_DESCRIPTION) or "Searches for tools that are not loaded yet."
        schema = ANY_QUERY if parameters is None else parameters.values
        self.tools.append(Tool(name=TOOL_SEARCH, description=description, parameters=schema))
        self.called[TOOL_SEARCH] = CalledTool("tool_search", TOOL_SEARCH)
        return [TOOL_SEARCH]


def parse_offered(fields: BodyFields) -> OfferedTools:
    offered = OfferedTools()
    offered.add_all(fields.items("tools", MAX_TOOLS) or (), "tools")
    return offered


def flat_name(called: CalledTool) -> str:
    """Return the name that the model sees, which includes the namespace."""
    if called.namespace is None:
        return called.name
    return f"{called.namespace.removesuffix('__')}__{called.name}"


def _repeated(values: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of the response object, with the fields that clients' types require."""
    if values.get("type") != "function":
        return values
    return {"strict": None, "description": None, "parameters": None, **values}


def _fields(value: object, path: str) -> BodyFields:
    if not isinstance(value, dict):
        refuse(path, f"must be an object, got {kind_of(value)}")
    return BodyFields(value, f"{path}.")


def _grammar(input_format: BodyFields | None) -> Guided | None:
    if input_format is None or input_format.one_of("type", ("text", "grammar")) != "grammar":
        return None
    return parse_grammar(input_format)


# ── the tool choice ────────────────────────────────────────────────────────────────────────────────────


def parse_choice(fields: BodyFields, offered: OfferedTools) -> ToolChoice:
    """Parse `tool_choice`. The engine refuses names that no tool has, in every dialect."""
    parallel = fields.boolean("parallel_tool_calls", True)
    value = fields.get("tool_choice")
    if value is None:
        return ToolChoice(parallel=parallel)
    if isinstance(value, str):
        if value not in MODES:
            refuse("tool_choice", f"must be one of {', '.join(MODES)} or an object, got {shown(value)}")
        if value == "required" and not offered.tools:
            refuse("tool_choice", "is only allowed with tools")
        return ToolChoice(mode=value, parallel=parallel)  # type: ignore[arg-type]  # one of the three
    choice = _fields(value, "tool_choice")
    if choice.required_text("type") != "allowed_tools":
        return ToolChoice(mode="required", names=_names(choice, offered), parallel=parallel)
    mode = choice.one_of("mode", ("auto", "required"))
    allowed = choice.items("tools", MAX_TOOLS)
    if mode is None or not allowed:
        refuse(choice.name("tools" if mode else "mode"), "is required")
    values = [_fields(value, f"tool_choice.tools[{number}]") for number, value in enumerate(allowed)]
    names = [name for value in values for name in _names(value, offered)]
    return ToolChoice(mode=mode, names=names, parallel=parallel)  # type: ignore[arg-type]  # auto or required


def _names(fields: BodyFields, offered: OfferedTools) -> list[str]:
    """Return the names of the tools that an entry of a tool choice refers to, as the model sees them."""
    kind = fields.required_text("type")
    if kind == "namespace":
        namespace = fields.required_text("name")
        return [name for name, called in offered.called.items() if called.namespace == namespace]
    if kind == TOOL_SEARCH:
        return [TOOL_SEARCH]
    if kind not in ("function", "custom"):
        refuse(fields.name("type"), f"must be {KNOWN}, got {shown(kind)}")
    return [flat_name(CalledTool("function", fields.required_text("name"), fields.text("namespace")))]
