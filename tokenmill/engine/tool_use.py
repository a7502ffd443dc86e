"""Checks the tools and reasoning settings of a chat request and turns them into a grammar and a thinking budget.

    tools + choice   ──► the tools in the prompt (all), the tools that may be called, a grammar if needed
    reasoning        ──► variables of the chat template, a thinking budget
    response_format  ──► for a model that thinks: a grammar of the text after the think section

Without a grammar (`auto`, no strict tool) the model writes freely, and anything that is not a call of a known tool is
text. A grammar is used if the choice or a tool requires it: required, named or allowed tools, strict tools, at most one
call. Then the arguments follow the tool's schema, unless the tool has `strict: false`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.guided.grammar import lark_rule, schema_problem
from tokenmill.guided.json_escape import json_escaped_lark
from tokenmill.guided.schema import schema_locations
from tokenmill.params import MAX_GUIDED_BYTES, Guided, SamplingParams
from tokenmill.text.effort import KEEP_HISTORY
from tokenmill.text.speech import Speech, SpeechStart, detect_speech
from tokenmill.text.template import CHATML, CHATML_MARKER, CUSTOM_INPUT, CUSTOM_PARAMETERS, PLAIN, ChatTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import ChatRequest, Effort, Message, Reasoning, Tool

MAX_TEMPLATES = 16  # cached formats of chat templates sent with requests
MAX_TOOL_NAME = 128  # characters
MAX_NESTING = 100  # depth of a tool's parameters
TAIL_TOKENS, TAIL_CHARACTERS = 128, 200  # the end of a prompt, which decides the state in which the answer starts
EFFORT_BUDGETS: dict[Effort, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "xhigh": 32768,
    "max": None,
}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NAME = re.compile(r"[\w.:/-]+")


class SpeechFinder:
    """Finds the formats of tool calls and thinking for a chat template, the model's own or a request's; cached per
    template."""

    def __init__(self, tokenizer: Tokenizer | None, tool_format: str = "auto") -> None:
        """`tool_format`: the name of a call format, `none` to turn tool calls off, or `auto` to detect it."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self.of: Callable[[str | None], Speech | None] = lru_cache(MAX_TEMPLATES)(self._find)

    def _find(self, template: str | None) -> Speech | None:
        """Return the format for the source of a template (None: the model's own). The result is None without a
        tokenizer, and for an invalid template, whose conversations are refused."""
        if self._tokenizer is None:
            return None
        try:
            source = (
                ChatTemplate(template, self._tokenizer.special_tokens) if template else chat_template(self._tokenizer)
            )
            return detect_speech(source, self._tokenizer, self._tool_format)
        except ModelError:
            return None


def describe_speech(speech: Speech | None) -> str:
    """Describe in one line how a model writes tool calls and reasoning."""
    if speech is None:
        return "no tool calls: the chat template can't be read"
    calls = "none" if speech.calls is None else speech.calls.name
    why = "its chat template writes this format" if speech.is_proved else "not written by its chat template"
    thinking = "" if speech.thinking is None else f"; thinks in {speech.thinking.opener.strip() or 'text'}"
    return f"tool calls {calls} ({why}){thinking}"


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return a model's own chat template, or the fallback for models without one."""
    fallback = PLAIN if tokenizer.token_id(CHATML_MARKER) is None else CHATML
    return ChatTemplate(tokenizer.chat_template or fallback, tokenizer.special_tokens)


# ── checks ─────────────────────────────────────────────────────────────────────────────────────────────


def check_tools(chat: ChatRequest) -> None:
    """Refuse tools with invalid or duplicate names or too deeply nested parameters, and a choice of unknown tools."""
    names = [tool.name for tool in chat.tools]
    for number, name in enumerate(names):
        if not isinstance(name, str) or len(name) > MAX_TOOL_NAME or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a tool's name must be 1 to {MAX_TOOL_NAME} letters, digits or any of _.:/-, got {str(name)[:80]!r}",
                param=f"tools[{number}].name",
            )
        if name in names[:number]:
            raise InvalidRequest(f"two tools have the name {name!r}", param="tools")
        if _nesting(chat.tools[number].parameters) > MAX_NESTING:
            raise InvalidRequest(f"the parameters of {name!r} are nested deeper than {MAX_NESTING}", param="tools")
    for name in chat.tool_choice.names or ():
        if name not in names:
            raise InvalidRequest(f"there is no tool {str(name)[:80]!r} in tools", param="tool_choice")
    if chat.tool_choice.mode == "required" and not callable_tools(chat):
        raise InvalidRequest("tool_choice requires a call, but there is no tool to call", param="tool_choice")


def _nesting(value: Any) -> int:
    """Return the depth of nested objects and lists."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list) and one]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        if depth > MAX_NESTING:
            break
    return depth


def callable_tools(chat: ChatRequest) -> list[Tool]:
    """Return the tools that the answer may call."""
    choice = chat.tool_choice
    if choice.mode == "none":
        return []
    return [tool for tool in chat.tools if choice.names is None or tool.name in choice.names]


def shown_tools(chat: ChatRequest) -> list[Tool]:
    """Return the tools shown in the prompt: all, so that narrowing the choice keeps the prompt and its cache."""
    return [] if chat.tool_choice.mode == "none" else chat.tools


# ── the prompt ─────────────────────────────────────────────────────────────────────────────────────────


def is_off(reasoning: Reasoning) -> bool:
    return reasoning.is_on is False or (reasoning.is_on is None and reasoning.effort == "none")


def history(chat: ChatRequest, speech: Speech | None) -> list[Message]:
    """Return the messages as the model's template expects them: call ids in the family's format; reasoning only after
    the last user message, unless all of it should be kept."""
    keeps_all = chat.reasoning.keep_history
    keeps_all = keeps_all or any(chat.template_args.get(name) is value for name, value in KEEP_HISTORY.items())
    questions = [number for number, message in enumerate(chat.messages) if message.role == "user"]
    last_question = questions[-1] if questions else 0
    return [
        _for_history(message, speech, keeps_thought=keeps_all or number > last_question)
        for number, message in enumerate(chat.messages)
    ]


def _for_history(message: Message, speech: Speech | None, *, keeps_thought: bool) -> Message:
    changes: dict[str, Any] = {}
    if message.reasoning is not None and not keeps_thought:
        changes["reasoning"] = None
    if speech is not None and message.tool_calls:
        changes["tool_calls"] = [
            msgspec.structs.replace(call, id=speech.history_id(call.id)) for call in message.tool_calls
        ]
    if speech is not None and message.tool_call_id:
        changes["tool_call_id"] = speech.history_id(message.tool_call_id)
    return msgspec.structs.replace(message, **changes) if changes else message


def with_described_tools(messages: list[Message], tools: Sequence[Tool], speech: Speech) -> list[Message]:
    """Describe the tools in the system message, for a template that does not support tools."""
    text = speech.system_text(tools)
    if messages and messages[0].role == "system":
        first = msgspec.structs.replace(messages[0], content=f"{messages[0].content or ''}\n\n{text}")
        return [first, *messages[1:]]
    return [Message(role="system", content=text), *messages]


def thinking_budget(reasoning: Reasoning) -> int | None:
    """Return the largest number of thinking tokens; None: unlimited."""
    if is_off(reasoning):
        return 0
    return reasoning.budget if reasoning.budget is not None else EFFORT_BUDGETS[reasoning.effort or "max"]


# ── the answer ─────────────────────────────────────────────────────────────────────────────────────────


def answer_start(speech: Speech, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> SpeechStart:
    """Return the reader's state at the start of an answer: the prompt may have opened a think section."""
    tail = tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return speech.start(tail[-TAIL_CHARACTERS:])


def settle_thinking(chat: ChatRequest, params: SamplingParams, speech: Speech, start: SpeechStart) -> SamplingParams:
    """Set the thinking budget of the reasoning settings, if the model thinks."""
    if params.thinking_budget is not None or speech.thinking is None:
        return params
    budget = thinking_budget(chat.reasoning)
    if is_off(chat.reasoning) and not start.is_thinking:
        budget = None  # the template has turned thinking off
    if budget is None or not speech.thinking.opener:
        return params
    markers = speech.thinking.opener.strip(), speech.thinking.closer.strip()
    return msgspec.structs.replace(params, thinking_budget=budget, thinking_markers=markers)


def settle_grammar(chat: ChatRequest, params: SamplingParams, speech: Speech, start: SpeechStart) -> SamplingParams:
    """Set the grammar that the tools, the tool choice and the reasoning settings require."""
    tools = callable_tools(chat)
    needs_calls = bool(tools) and _needs_grammar(chat, tools)
    if not needs_calls and (params.guided is None or not (speech.thinking or tools)):
        return params
    may_think, answer = not is_off(chat.reasoning), None if params.guided is None else lark_rule(params.guided)

    def grammar(some: Sequence[Tool]) -> str:
        return speech.grammar(some, chat.tool_choice, start, may_think=may_think, answer=answer)

    tools = [_enforceable(tool, speech) for tool in tools]
    loose = [tool if tool.strict else _loosened(tool) for tool in tools]
    try:
        text = grammar(tools)
    except (InvalidRequest, RecursionError) as problem:  # a schema that this family's argument format can't enforce
        if loose == tools:
            raise InvalidRequest(f"the tools can't be enforced: {problem}", param="tools") from problem
        text = grammar(loose)
    if len(text.encode()) > MAX_GUIDED_BYTES:
        text = grammar(loose)
    if len(text.encode()) > MAX_GUIDED_BYTES:
        raise InvalidRequest(
            f"the grammar of the tools is larger than {MAX_GUIDED_BYTES >> 10} KiB",
            param="tools",
            hint="use fewer tools",
        )
    return msgspec.structs.replace(params, guided=Guided("lark", text))


def _needs_grammar(chat: ChatRequest, tools: Sequence[Tool]) -> bool:
    choice = chat.tool_choice
    if choice.mode == "required" or choice.names is not None or not choice.parallel:
        return True
    return any(tool.strict or tool.input_grammar is not None for tool in tools)


def _enforceable(tool: Tool, speech: Speech) -> Tool:
    """Return a tool whose parameters a grammar can enforce; refuse a strict tool that can't be enforced."""
    if tool.kind == "custom":
        return _custom(tool, speech)
    if tool.parameters is None or tool.strict is False:
        return _loosened(tool)
    problem = schema_problem(tool.parameters) or _reference_problem(tool.parameters)
    if problem is None:
        return tool
    if tool.strict:
        raise InvalidRequest(f"the parameters of {tool.name!r} can't be enforced: {problem}", param="tools")
    return _loosened(tool)


def _reference_problem(schema: dict[str, Any]) -> str | None:
    """Return why a schema's references can't be enforced, if so. Each argument is enforced separately, so a $ref must
    refer to a definition, not to another place in the schema."""
    for path, found in schema_locations(schema):
        target = found.get("$ref")
        if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
            return f"$ref must refer to a definition, at {path}"
    return None


def _loosened(tool: Tool) -> Tool:
    """Return a tool whose arguments may be any object; a tool without parameters and a custom tool are unchanged."""
    is_kept = tool.parameters is None or tool.kind == "custom"
    return tool if is_kept else msgspec.structs.replace(tool, parameters=ANY_OBJECT)


def _custom(tool: Tool, speech: Speech) -> Tool:
    """Return a custom tool as a function with one input. If the model writes arguments as JSON, the tool's grammar is
    adapted to JSON's escapes."""
    grammar, parameters = tool.input_grammar, CUSTOM_PARAMETERS
    is_raw = speech.calls is not None and speech.calls.strings_are_raw
    if grammar is not None and grammar.kind == "regex" and not is_raw:
        text = {"type": "string", "pattern": f"^(?:{grammar.text})$"}
        parameters, grammar = {**CUSTOM_PARAMETERS, "properties": {CUSTOM_INPUT: text}}, None
    elif grammar is not None and not is_raw:
        grammar = Guided("lark", json_escaped_lark(grammar.text))
    return msgspec.structs.replace(tool, parameters=parameters, input_grammar=grammar)
