"""Tools and thinking of a chat request: checked, narrowed, and turned into a grammar and a thinking budget.

    tools + choice   ──► what the model sees (all), what it may call (the allowed ones), a grammar where it must
    reasoning        ──► variables of the chat template, a thinking budget
    response_format  ──► on a model that thinks: a grammar for what follows the thinking

Without a grammar (`auto`, no tool strict) the model writes freely, and what is not a call of a known tool is text. A
grammar is used where the choice or a tool asks for it: required, named, allowed tools, strict, one call only. Then the
arguments follow the tool's schema, unless the tool says `strict: false`.
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

MAX_TEMPLATES = 16  # of requests that bring their own, kept
MAX_TOOL_NAME = 128
MAX_NESTING = 100  # of a tool's parameters
TAIL_TOKENS, TAIL_CHARACTERS = 128, 200  # of a prompt: they say in which state the answer begins
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
        """`tool_format`: the name of a call format, `none` for a model that shall call nothing, or `auto`."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self.of: Callable[[str | None], Speech | None] = lru_cache(MAX_TEMPLATES)(self._find)

    def _find(self, template: str | None) -> Speech | None:
        """The speech by the source of a template; None: the model's own. None also where the template is broken, and
        conversations are refused."""
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
    """Describe in one line how a model writes calls and thoughts."""
    if speech is None:
        return "no tool calls: no chat template can be read"
    calls = "none" if speech.calls is None else speech.calls.name
    why = "its chat template writes them so" if speech.is_proved else "not written by its chat template"
    thinking = "" if speech.thinking is None else f"; thinks in {speech.thinking.opener.strip() or 'text'}"
    return f"tool calls {calls} ({why}){thinking}"


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """A model's own chat template, or the layout for models that have none."""
    fallback = PLAIN if tokenizer.token_id(CHATML_MARKER) is None else CHATML
    return ChatTemplate(tokenizer.chat_template or fallback, tokenizer.special_tokens)


# ── checks ─────────────────────────────────────────────────────────────────────────────────────────────


def check_tools(asked: ChatRequest) -> None:
    """Refuse tools that can't be told apart or called, and a choice that names others."""
    names = [tool.name for tool in asked.tools]
    for number, name in enumerate(names):
        if not isinstance(name, str) or len(name) > MAX_TOOL_NAME or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a tool's name has 1 to {MAX_TOOL_NAME} letters, digits and any of _.:/-, got {str(name)[:80]!r}",
                param=f"tools[{number}].name",
            )
        if name in names[:number]:
            raise InvalidRequest(f"two tools have the name {name!r}", param="tools")
        if _nesting(asked.tools[number].parameters) > MAX_NESTING:
            raise InvalidRequest(f"the parameters of {name!r} are nested deeper than {MAX_NESTING}", param="tools")
    for name in asked.tool_choice.names or ():
        if name not in names:
            raise InvalidRequest(f"there is no tool {str(name)[:80]!r} in tools", param="tool_choice")
    if asked.tool_choice.mode == "required" and not callable_tools(asked):
        raise InvalidRequest("a tool must be called, and there is none", param="tool_choice")


def _nesting(value: Any) -> int:
    """The depth of objects and lists in each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list) and one]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        if depth > MAX_NESTING:
            break
    return depth


def callable_tools(asked: ChatRequest) -> list[Tool]:
    """Return the tools that the answer may call."""
    choice = asked.tool_choice
    if choice.mode == "none":
        return []
    return [tool for tool in asked.tools if choice.names is None or tool.name in choice.names]


def shown_tools(asked: ChatRequest) -> list[Tool]:
    """The tools that the model sees: all of them, so that narrowing the choice keeps the prompt (and its cache)."""
    return [] if asked.tool_choice.mode == "none" else asked.tools


# ── the prompt ─────────────────────────────────────────────────────────────────────────────────────────


def is_off(reasoning: Reasoning) -> bool:
    return reasoning.is_on is False or (reasoning.is_on is None and reasoning.effort == "none")


def history(asked: ChatRequest, speech: Speech | None) -> list[Message]:
    """Return the messages as the model's template expects them: call ids in the family's format; reasoning only since
    the last user message, unless all of it is wanted."""
    keeps_all = asked.reasoning.keep_history
    keeps_all = keeps_all or any(asked.template_args.get(name) is value for name, value in KEEP_HISTORY.items())
    questions = [number for number, message in enumerate(asked.messages) if message.role == "user"]
    last_question = questions[-1] if questions else 0
    return [
        _for_history(message, speech, keeps_thought=keeps_all or number > last_question)
        for number, message in enumerate(asked.messages)
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
    """Describe the tools in the system message, for a template that knows nothing of tools."""
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
    """Return the reader's state at the beginning of an answer: the prompt may have opened a thinking section."""
    tail = tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return speech.start(tail[-TAIL_CHARACTERS:])


def settle_thinking(asked: ChatRequest, params: SamplingParams, speech: Speech, start: SpeechStart) -> SamplingParams:
    """Add the thinking budget that the reasoning settings ask for, if the model thinks."""
    if params.thinking_budget is not None or speech.thinking is None:
        return params
    budget = thinking_budget(asked.reasoning)
    if is_off(asked.reasoning) and not start.is_thinking:
        budget = None  # the template has seen to it
    if budget is None or not speech.thinking.opener:
        return params
    markers = speech.thinking.opener.strip(), speech.thinking.closer.strip()
    return msgspec.structs.replace(params, thinking_budget=budget, thinking_markers=markers)


def settle_grammar(asked: ChatRequest, params: SamplingParams, speech: Speech, start: SpeechStart) -> SamplingParams:
    """Add the grammar that tools, choice and thinking ask for."""
    tools = callable_tools(asked)
    needs_calls = bool(tools) and _needs_grammar(asked, tools)
    if not needs_calls and (params.guided is None or not (speech.thinking or tools)):
        return params
    may_think, answer = not is_off(asked.reasoning), None if params.guided is None else lark_rule(params.guided)

    def grammar(some: Sequence[Tool]) -> str:
        return speech.grammar(some, asked.tool_choice, start, may_think=may_think, answer=answer)

    tools = [_enforceable(tool, speech) for tool in tools]
    loose = [tool if tool.strict else _loosened(tool) for tool in tools]
    try:
        text = grammar(tools)
    except (InvalidRequest, RecursionError) as problem:  # what can't be enforced in this family's style of arguments
        if loose == tools:
            raise InvalidRequest(f"the tools can't be enforced: {problem}", param="tools") from problem
        text = grammar(loose)
    if len(text.encode()) > MAX_GUIDED_BYTES:
        text = grammar(loose)
    if len(text.encode()) > MAX_GUIDED_BYTES:
        raise InvalidRequest(
            f"the grammar of the tools has more than {MAX_GUIDED_BYTES >> 10} KiB", param="tools", hint="fewer tools"
        )
    return msgspec.structs.replace(params, guided=Guided("lark", text))


def _needs_grammar(asked: ChatRequest, tools: Sequence[Tool]) -> bool:
    choice = asked.tool_choice
    if choice.mode == "required" or choice.names is not None or not choice.parallel:
        return True
    return any(tool.strict or tool.input_grammar is not None for tool in tools)


def _enforceable(tool: Tool, speech: Speech) -> Tool:
    """Return a tool whose parameters a grammar can enforce; strict tools that can't be enforced are refused."""
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
    """Arguments are held one by one, so what they refer to must be a definition, not a place in the schema itself."""
    for path, found in schema_locations(schema):
        target = found.get("$ref")
        if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
            return f"$ref must refer to a definition, at {path}"
    return None


def _loosened(tool: Tool) -> Tool:
    """Return a tool whose arguments may be any object; one without parameters keeps none, a custom one its input."""
    is_kept = tool.parameters is None or tool.kind == "custom"
    return tool if is_kept else msgspec.structs.replace(tool, parameters=ANY_OBJECT)


def _custom(tool: Tool, speech: Speech) -> Tool:
    """A custom tool as the function that the model sees. Where it writes JSON, its grammar gets JSON's escapes."""
    grammar, parameters = tool.input_grammar, CUSTOM_PARAMETERS
    is_raw = speech.calls is not None and speech.calls.strings_are_raw
    if grammar is not None and grammar.kind == "regex" and not is_raw:
        text = {"type": "string", "pattern": f"^(?:{grammar.text})$"}
        parameters, grammar = {**CUSTOM_PARAMETERS, "properties": {CUSTOM_INPUT: text}}, None
    elif grammar is not None and not is_raw:
        grammar = Guided("lark", json_escaped_lark(grammar.text))
    return msgspec.structs.replace(tool, parameters=parameters, input_grammar=grammar)
