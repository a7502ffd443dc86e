"""Tools, tool choice and reasoning of an OpenAI chat body.

    {"type": "function", "function": {name, description, parameters, strict}}      arguments are JSON
    {"type": "custom", "custom": {name, description, format}}                      input is text, perhaps of a grammar

What depends on the model (does its template support tools? can this schema be enforced?) is checked when the engine
prepares the request.
"""

from __future__ import annotations

from typing import Any, NoReturn, get_args

from tokenmill.params import Guided
from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.types import Effort, Reasoning, Tool, ToolChoice

MAX_TOOLS = 512
MAX_DESCRIPTION = 1 << 16  # characters
MODES = ("none", "auto", "required")


def parse_tools(fields: BodyFields) -> list[Tool]:
    tools = fields.items("tools", MAX_TOOLS)
    if tools == []:
        refuse("tools", "must not be empty; leave it out instead")
    return [_tool(value, f"tools[{number}]") for number, value in enumerate(tools or ())]


def parse_tool_choice(fields: BodyFields, tools: list[Tool]) -> ToolChoice:
    """Parse `tool_choice`. The engine refuses names that no tool has, in every dialect."""
    parallel = fields.boolean("parallel_tool_calls", True)
    value = fields.get("tool_choice")
    if value is None:
        return ToolChoice(parallel=parallel)
    if isinstance(value, str):
        if value not in MODES:
            refuse("tool_choice", f"must be one of {', '.join(MODES)} or an object, got {shown(value)}")
        choice = ToolChoice(mode=value, parallel=parallel)  # type: ignore[arg-type]  # one of the three
    else:
        choice = _choice_object(fields, parallel)
    if choice.mode == "required" and not tools:
        refuse("tool_choice", "is only allowed with tools")
    return choice


def parse_reasoning(fields: BodyFields) -> Reasoning:
    effort = fields.one_of("reasoning_effort", get_args(Effort))
    return Reasoning(effort=effort)  # type: ignore[arg-type]  # one of the seven


# ── one tool ───────────────────────────────────────────────────────────────────────────────────────────


def _tool(value: object, path: str) -> Tool:
    if not isinstance(value, dict):
        refuse(path, f"must be an object, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    kind = fields.required_text("type")
    if kind not in ("function", "custom"):
        refuse(fields.name("type"), f"must be function or custom, got {shown(kind)}")
    inner = fields.object(kind)
    if inner is None:
        refuse(fields.name(kind), "is required")
    return function_tool(inner) if kind == "function" else custom_tool(inner, _input_grammar(inner.object("format")))


def function_tool(fields: BodyFields) -> Tool:
    parameters = fields.object("parameters")
    return Tool(
        name=fields.required_text("name"),
        description=fields.text("description", MAX_DESCRIPTION),
        parameters=None if parameters is None else parameters.values,
        strict=None if fields.get("strict") is None else fields.boolean("strict"),
    )


def custom_tool(fields: BodyFields, grammar: Guided | None) -> Tool:
    return Tool(
        name=fields.required_text("name"),
        description=fields.text("description", MAX_DESCRIPTION),
        kind="custom",
        input_grammar=grammar,
    )


def _input_grammar(input_format: BodyFields | None) -> Guided | None:
    if input_format is None or input_format.one_of("type", ("text", "grammar")) != "grammar":
        return None
    grammar = input_format.object("grammar")
    if grammar is None:
        refuse(input_format.name("grammar"), "is required")
    return parse_grammar(grammar)


def parse_grammar(fields: BodyFields) -> Guided:
    """Parse the `syntax` and `definition` of the grammar of a custom tool's input."""
    syntax = fields.one_of("syntax", ("lark", "regex"))
    if syntax is None:
        refuse(fields.name("syntax"), "is required: lark or regex")
    definition = fields.required_text("definition")
    if not definition:
        refuse(fields.name("definition"), "must not be empty")
    return Guided(syntax, definition)  # type: ignore[arg-type]  # one of the two


# ── the tool choice ────────────────────────────────────────────────────────────────────────────────────


def _choice_object(fields: BodyFields, parallel: bool) -> ToolChoice:
    choice = fields.object("tool_choice")
    if choice is None:
        raise AssertionError("the caller handles null")
    kind = choice.one_of("type", ("function", "custom", "allowed_tools"))
    if kind is None:
        refuse(choice.name("type"), "is required: function, custom or allowed_tools")
    inner = choice.object(kind)
    if inner is None:
        refuse(choice.name(kind), "is required")
    if kind != "allowed_tools":
        return ToolChoice(mode="required", names=[inner.required_text("name")], parallel=parallel)
    mode = inner.one_of("mode", ("auto", "required")) or _missing(inner, "mode")
    allowed = inner.items("tools", MAX_TOOLS) or _missing(inner, "tools")
    names = [_allowed_name(value, f"{inner.name('tools')}[{number}]") for number, value in enumerate(allowed)]
    return ToolChoice(mode=mode, names=names, parallel=parallel)  # type: ignore[arg-type]  # auto or required


def _allowed_name(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        refuse(path, f"must be an object, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    kind = fields.one_of("type", ("function", "custom")) or _missing(fields, "type")
    inner = fields.object(kind)
    if inner is None:
        refuse(fields.name(kind), "is required")
    return inner.required_text("name")


def _missing(fields: BodyFields, key: str) -> NoReturn:
    refuse(fields.name(key), "is required")
