"""Chat templates: messages in the shape that templates read, rendered in a sandbox with bounds.

Templates of different model families expect different shapes (content as text or as parts, tool call arguments as an
object or as text, a missing value as None or absent), so a template that fails with one shape is tried with the next.
Some know a system message at the beginning only: one that stands elsewhere is moved there if they do not show it.
A conversation is refused as the caller's error where its template refuses it (`raise_exception`) or can't render it; a
template that can't even render "hi", does not compile or exceeds its bounds is the model's error. The template runs in
a Jinja sandbox (`template_sandbox.py`) that counts its work, so that no template can hang or fill the memory.

Text of clients that spells a control token stays text: `<|im_start|>system` in a message opens no turn. A tokenizer
reads control tokens wherever they stand: in what the template wrote and in what a user wrote. Before a conversation is
rendered, what spells one in its messages is put between two marks. The marks are taken out of the rendered text, which
tells where such text stands; and tokens that were read there are written out in ordinary ones.

    "Hi <|im_end|>"  ─►  "Hi ⟦<|im_end|>⟧"  ─ template ─►  "…user\\nHi ⟦<|im_end|>⟧<|im_end|>\\n"
                     ─►  text without marks, spans of what was marked  ─►  token ids

Such text is tokenised apart from what stands beside it; a tokenizer that puts a space before every piece of a text puts
one behind it. Nearly all conversations hold nothing of the kind, and cost one search.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.meta
import msgspec

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.template_sandbox import Bounds, Budget, ChatSandbox, OutOfBounds, Refusal, current_budget
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import Message, Tool, ToolCall

CUSTOM_INPUT = "input"  # the one argument of a custom tool, as the model sees it
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MARKS = tuple(chr(code) for code in range(0xF0000, 0xF0100))  # private use: in no vocabulary, in hardly any text
BEFORE = "\x02"  # a character that no merge crosses: what a tokenizer adds to the beginning of a text comes before it

Span = tuple[int, int]


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
    """Yield forms of the messages: as given; with arguments as text; with "" for null contents; with both. Equal ones
    are left out."""
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
        """Return all names that the template reads and expects its caller to define."""
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
        """Render the first form of the messages that the template accepts; raise the first error where there is
        none."""
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
        """Return the error to blame: the conversation's if a simpler one renders, the template's if none does."""
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


# ── text that spells control tokens ────────────────────────────────────────────────────────────────────


class MarkedText(msgspec.Struct, frozen=True):
    """A rendered conversation, and where in it stands what clients wrote that spells a control token."""

    text: str
    spans: list[Span] = []


class LiteralContents:
    """Marks the control tokens of one tokenizer in messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spelled = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids}
        self._ids = {text: token_id for text, token_id in spelled.items() if text}
        self._pattern = re.compile(trie_pattern(self._ids)) if self._ids else None

    def mark(self, messages: Sequence[Message], allowed: Collection[int]) -> tuple[list[Message], tuple[str, str]]:
        """The messages with marks around what spells a control token, and the two marks. `allowed`: control tokens that
        an assistant's message may hold, such as the markers of its thoughts."""
        if self._pattern is None or not any(self._pattern.search(message.content or "") for message in messages):
            return list(messages), ("", "")
        everything = "".join(message.content or "" for message in messages)
        free = [mark for mark in MARKS if mark not in everything]
        if len(free) < 2:
            raise InvalidRequest("the messages hold too many characters of private use", param="messages")
        opening, closing = free[:2]
        return [self._marked(message, allowed, opening, closing) for message in messages], (opening, closing)

    def _marked(self, message: Message, allowed: Collection[int], opening: str, closing: str) -> Message:
        if not message.content or self._pattern is None:
            return message

        def between_marks(found: re.Match[str]) -> str:
            if message.role == "assistant" and self._ids[found.group()] in allowed:
                return found.group()
            return f"{opening}{found.group()}{closing}"

        return msgspec.structs.replace(message, content=self._pattern.sub(between_marks, message.content))


def unmarked(text: str, marks: tuple[str, str]) -> MarkedText:
    """A rendered text without its marks, and the spans between them."""
    opening, closing = marks
    if not opening:
        return MarkedText(text)
    pieces, spans, length = [], list[Span](), 0
    for number, piece in enumerate(re.split(f"{opening}(.*?){closing}", text, flags=re.DOTALL)):
        if number % 2:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    plain = "".join(pieces)
    if opening in plain or closing in plain or f"\\u{0xD800 + (0xF0000 - 0x10000 >> 10):04x}" in plain.lower():
        raise InvalidRequest(
            "the messages spell a control token of this model, and its chat template does not leave them whole",
            param="messages",
        )
    return MarkedText(plain, spans)


def encode_literally(tokenizer: Tokenizer, marked: MarkedText, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text in which control tokens are read except within the spans."""
    ids: list[int] = []
    spans = iter([*marked.spans, (len(marked.text) + 1, len(marked.text) + 1)])
    start, end = next(spans)
    for token_id, (first, last) in tokenizer.encode_with_offsets(marked.text, add_special_tokens=add_special_tokens):
        while end <= first:
            start, end = next(spans)
        is_spelled = last > start and first < last and token_id in tokenizer.special_ids
        ids += written_out(tokenizer, marked.text[first:last]) if is_spelled else [token_id]
    return ids


def written_out(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the characters of a text that spells a control token: cut until none is read."""
    ids = _inside(tokenizer, text[:1]) + _inside(tokenizer, text[1:])
    if tokenizer.special_ids.isdisjoint(ids):
        return ids
    return [token_id for char in text for token_id in _inside(tokenizer, char)]


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    found = tokenizer.encode_with_offsets(BEFORE + text, add_special_tokens=False)
    return [token_id for token_id, (_, last) in found if last > len(BEFORE)]


def trie_pattern(texts: Collection[str]) -> str:
    """A pattern for any of these texts, the longest that fits; thousands of them cost no more than a few."""
    trie: dict[str, dict[str, object]] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, dict[str, object]]) -> str:
    branches = [re.escape(char) + _pattern_of(rest) for char, rest in sorted(node.items()) if char]  # type: ignore[arg-type]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")
