"""Chat templates: messages in the shape that templates read, rendered in a sandbox with bounds.

Templates of different model families expect different shapes (content as text or as parts, tool call arguments as an
object or as text, a missing value as None or absent), so a template that fails with one shape is tried with the next.
Some know a system message at the beginning only: one that stands elsewhere is moved there if they do not show it.
A conversation is refused as the caller's error where its template refuses it (`raise_exception`) or can't render it; a
template that can't even render "hi", does not compile or exceeds its bounds is the model's error. The template runs in
a Jinja sandbox (`template_sandbox.py`) that counts its work, so that no template can hang or fill the memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.meta

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.template_sandbox import Bounds, Budget, ChatSandbox, OutOfBounds, Refusal, current_budget
from tokenmill.types import Message, Tool, ToolCall

CUSTOM_INPUT = "input"  # the one argument of a custom tool, as the model sees it
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    # `content` stays even where it is None: templates tell a turn that only calls tools by that.
    content = message.content or None if message.tool_calls else message.content
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        plain |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {key: value for key, value in optional.items() if value is not None}


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """A call as templates read it: arguments as an object. A custom tool is a function with one argument."""
    arguments = {CUSTOM_INPUT: call.arguments} if call.kind == "custom" else _parsed(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The object that JSON text stands for; anything else as it is (a model may have written no JSON)."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools as templates read them, whatever dialect they came in."""
    return [_plain_tool(tool) for tool in tools] or None


def _plain_tool(tool: Tool) -> dict[str, Any]:
    parameters = CUSTOM_PARAMETERS if tool.kind == "custom" else tool.parameters or NO_PARAMETERS
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def renditions(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """As given; with arguments as text; with "" for null contents; with both. What changes nothing is left out."""
    given = list(messages)
    yield given  # nearly always the only one that is asked for
    with_text = [_with_written_calls(message) for message in given]
    seen = [given]
    for one in (with_text, without_null(given), without_null(with_text)):
        if one not in seen:
            seen.append(one)
            yield one


def has_null(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("content", "") is None for message in messages)


def without_null(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message if message.get("content", "") is not None else {**message, "content": ""} for message in messages]


def with_one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with all system messages in the first one, for templates that know no others."""
    systems = [message["content"] for message in messages if message["role"] == "system" and message["content"]]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(systems)}, *rest]


def _with_written_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_written_call(call) for call in calls]} if calls else message


def _written_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def up_to_last(text: str, message: Message) -> str:
    """A rendered conversation up to the end of its last message's content, without what a template puts behind it."""
    content = message.content or ""
    end = text.rfind(content) + len(content)
    if message.role != "assistant" or message.tool_calls or not content.strip() or end < len(content):
        raise InvalidRequest(
            "only an assistant's message that has text and calls no tool can be continued", param="messages"
        )
    return text[:end]


# Layouts for a model without a template: ChatML where its vocabulary has the markers, else plain text. Whether to use
# them is the caller's decision.
PLAIN_TURN = "\nUser:"  # ends an answer: a model that was not trained for conversations writes the next turn, too
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% else %}"
    "{{ message['role'] | capitalize + ': ' + (message['content'] or '') + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
CHATML_MARKER = "<|im_start|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MAX_SOURCE_CHARS = 1 << 20
_RUNTIME_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_SIMPLEST = [{"role": "user", "content": "hi"}]
NO_ARGUMENTS: Mapping[str, Any] = {}
OUR_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], bounds: Bounds | None = None) -> None:
        """Raises ModelError where the source does not compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._bounds = bounds or Bounds()
        self._template = _compiled(source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """All names that the template reads and nothing defines but its caller."""
        return frozenset(jinja2.meta.find_undeclared_variables(_sandbox().parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> str:
        """`extra`: more variables for the template, by the client's names: a mapping, since they may be any."""
        if taken := OUR_VARIABLES & extra.keys():
            raise InvalidRequest(f"{sorted(taken)[0]!r} can't be given as a template argument", param="template_args")
        tools_given = None if tools is None else list(tools)
        asked = {"tools": tools_given, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables = {**self._special_tokens, **extra, **asked, "messages": list(messages)}
        try:
            return self._without_none(variables, self._with_systems_shown(variables))
        except Refusal as refusal:
            raise InvalidRequest(f"the model's chat template refuses this: {refusal}", param="messages") from refusal
        except (OutOfBounds, RecursionError, MemoryError) as excess:
            raise ModelError(f"the model's chat template was stopped: {str(excess) or 'too deep'}") from excess
        except _RUNTIME_FAULTS as fault:
            raise self._blamed(fault) from fault

    def _with_systems_shown(self, variables: dict[str, Any]) -> str:
        """System messages inside a conversation where they stand, if the template shows them there; else in front."""
        later = [one["content"] for one in variables["messages"][1:] if one["role"] == "system" and one["content"]]
        if not later:
            return self._first_rendered(variables)
        with suppress(Refusal, *_RUNTIME_FAULTS):
            text = self._first_rendered(variables)
            if all(content.strip() in text for content in later):
                return text
        return self._first_rendered({**variables, "messages": with_one_system(variables["messages"])})

    def _first_rendered(self, variables: dict[str, Any]) -> str:
        """By the first rendition that the template can do with; the first fault where there is none."""
        faults: list[Exception] = []
        for messages in renditions(variables["messages"]):
            try:
                return self._run({**variables, "messages": messages})
            except Refusal:
                raise
            except _RUNTIME_FAULTS as fault:
                faults.append(fault)
        raise faults[0]

    def _without_none(self, variables: dict[str, Any], text: str) -> str:
        """Templates that print a null content as the word None mean nothing by it."""
        if "None" in text and has_null(variables["messages"]):
            with suppress(*_RUNTIME_FAULTS):
                plain = self._with_systems_shown({**variables, "messages": without_null(variables["messages"])})
                return plain if plain.count("None") < text.count("None") else text
        return text

    def _run(self, variables: dict[str, Any]) -> str:
        budget = Budget(self._bounds, variables)
        token = current_budget.set(budget)
        try:
            return self._collected(variables, budget)
        finally:
            current_budget.reset(token)

    def _collected(self, variables: dict[str, Any], budget: Budget) -> str:
        chunks, num_chars = [], 0
        for chunk in self._template.generate(variables):
            num_chars += len(chunk)
            if num_chars > self._bounds.max_chars:
                raise OutOfBounds(f"it wrote more than {self._bounds.max_chars} characters")
            budget.tick()
            chunks.append(chunk)
        return "".join(chunks)

    def _blamed(self, fault: Exception) -> InvalidRequest | ModelError:
        """The conversation is at fault if a simpler one renders, the template if none does."""
        said = f"{type(fault).__name__}: {fault}"
        try:
            self._run({**self._special_tokens, "messages": _SIMPLEST, "add_generation_prompt": True, "tools": None})
        except Refusal:
            pass
        except (*_RUNTIME_FAULTS, RecursionError, MemoryError):
            return ModelError(f"the model's chat template is broken: {said}", hint="give another chat template")
        return InvalidRequest(f"the model's chat template can't render these messages: {said}", param="messages")


@cache
def _sandbox() -> ChatSandbox:
    return ChatSandbox()


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > _MAX_SOURCE_CHARS:
        raise ModelError(f"the chat template has {len(source)} characters, more than {_MAX_SOURCE_CHARS}")
    try:
        return _sandbox().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
    except (*_RUNTIME_FAULTS, RecursionError, MemoryError, SyntaxError) as error:
        raise ModelError(f"the chat template does not compile: {error}") from error
