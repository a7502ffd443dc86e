"""Chat templates: convert messages to the form that templates read, and render them in a sandbox with limits.

Model families expect different forms (tool call arguments as an object or as text, missing content as None or ""), so
a template that fails with one form is tried with the next. Some templates support a system message only at the
beginning: one elsewhere is moved there if they do not show it. If the template refuses a conversation
(`raise_exception`) or cannot render it, that is the client's error; a template that cannot even render "hi", does not
compile or exceeds its limits is the model's error. Templates run in a Jinja sandbox (`template_sandbox.py`) that limits
their work, so that none can hang the server or exhaust its memory.

Client text that spells a control token stays text: `<|im_start|>system` in a message opens no turn. A tokenizer reads
control tokens anywhere, whether the template or a user wrote them. So before a conversation is rendered, each such
spelling in its messages is put between two marks. Removing the marks from the rendered text gives the spans of client
text; control tokens that the tokenizer reads there are replaced by the ordinary tokens of their characters.

    "Hi <|im_end|>"  ─►  "Hi ⟦<|im_end|>⟧"  ─ template ─►  "…user\\nHi ⟦<|im_end|>⟧<|im_end|>\\n"
                     ─►  text without marks, spans of what was marked  ─►  token ids

Such text is tokenised separately from its surroundings; a tokenizer that adds a space before every part of a text adds
one after it. Almost no conversation contains such text; the others cost one search.
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

CUSTOM_INPUT = "input"  # the only argument of a custom tool, as shown to the model
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MARKS = tuple(chr(code) for code in range(0xF0000, 0xF0100))  # private use: in no vocabulary and almost no text
# A character that no merge crosses, put before a text: what a tokenizer adds to the beginning comes before it.
BEFORE = "\x02"

Span = tuple[int, int]


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    # `content` is present even if it is None: that is how templates recognise a turn that only calls tools.
    content = message.content or None if message.tool_calls else message.content
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        plain |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {key: value for key, value in optional.items() if value is not None}


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as templates read it: arguments as an object. A custom tool is a function with one argument."""
    arguments = {CUSTOM_INPUT: call.arguments} if call.kind == "custom" else _parsed(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """Return the object that this JSON text encodes; text that is not a JSON object is returned unchanged."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Return tools as templates read them; None where there are none."""
    return [_plain_tool(tool) for tool in tools] or None


def _plain_tool(tool: Tool) -> dict[str, Any]:
    parameters = CUSTOM_PARAMETERS if tool.kind == "custom" else tool.parameters or NO_PARAMETERS
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def renditions(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the messages as given; with arguments as text; with "" for null contents; with both. Equal forms are
    skipped."""
    original = list(messages)
    yield original  # nearly always the only one needed
    with_text = [_with_text_arguments(message) for message in original]
    seen = [original]
    for one in (with_text, without_null(original), without_null(with_text)):
        if one not in seen:
            seen.append(one)
            yield one


def has_null(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("content", "") is None for message in messages)


def without_null(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message if message.get("content", "") is not None else {**message, "content": ""} for message in messages]


def with_one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with all system messages joined in the first, for templates that support no others."""
    systems = [message["content"] for message in messages if message["role"] == "system" and message["content"]]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(systems)}, *rest]


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]} if calls else message


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def up_to_last(text: str, message: Message) -> str:
    """Return a rendered conversation up to the end of its last message's content, without the template's text after
    it."""
    content = message.content or ""
    end = text.rfind(content) + len(content)
    if message.role != "assistant" or message.tool_calls or not content.strip() or end < len(content):
        raise InvalidRequest(
            "only an assistant's message that has text and calls no tool can be continued", param="messages"
        )
    return text[:end]


# Templates for a model without one: ChatML where its vocabulary has the markers, else plain text. The caller decides
# whether to use them.
PLAIN_TURN = "\nUser:"  # ends an answer: a model not trained for conversations goes on with the user's next turn
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
RESERVED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], bounds: Bounds | None = None) -> None:
        """Compile a template. Raises ModelError if the source does not compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._bounds = bounds or Bounds()
        self._template = _compiled(source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """All names that the template reads and expects its caller to define."""
        return frozenset(jinja2.meta.find_undeclared_variables(_sandbox().parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> str:
        """Render a conversation. `extra`: further template variables, under names that the client chose."""
        if taken := RESERVED_VARIABLES & extra.keys():
            raise InvalidRequest(f"{sorted(taken)[0]!r} can't be given as a template argument", param="template_args")
        reserved = {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables = {**self._special_tokens, **extra, **reserved}
        try:
            return self._without_none(variables, self._with_systems_shown(variables))
        except Refusal as refusal:
            raise InvalidRequest(f"the model's chat template refuses this: {refusal}", param="messages") from refusal
        except (OutOfBounds, RecursionError, MemoryError) as excess:
            raise ModelError(f"the model's chat template was stopped: {str(excess) or 'nested too deep'}") from excess
        except _RUNTIME_FAULTS as fault:
            raise self._error_for(fault) from fault

    def _with_systems_shown(self, variables: dict[str, Any]) -> str:
        """Render with later system messages in place if the template shows them there, else moved to the front."""
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
        """Render again with "" for null contents if the template printed them as the word None."""
        if "None" in text and has_null(variables["messages"]):
            with suppress(*_RUNTIME_FAULTS):
                plain = self._with_systems_shown({**variables, "messages": without_null(variables["messages"])})
                return plain if plain.count("None") < text.count("None") else text
        return text

    def _run(self, variables: dict[str, Any]) -> str:
        budget = Budget(self._bounds, variables)
        token = current_budget.set(budget)
        try:
            return self._generate(variables, budget)
        finally:
            current_budget.reset(token)

    def _generate(self, variables: dict[str, Any], budget: Budget) -> str:
        chunks, num_chars = [], 0
        for chunk in self._template.generate(variables):
            num_chars += len(chunk)
            if num_chars > self._bounds.max_chars:
                raise OutOfBounds(f"it wrote more than {self._bounds.max_chars} characters")
            budget.tick()
            chunks.append(chunk)
        return "".join(chunks)

    def _error_for(self, fault: Exception) -> InvalidRequest | ModelError:
        """Return InvalidRequest if the template renders a trivial conversation, ModelError if it fails on that too."""
        reason = f"{type(fault).__name__}: {fault}"
        try:
            self._run({**self._special_tokens, "messages": _SIMPLEST, "add_generation_prompt": True, "tools": None})
        except Refusal:
            pass
        except (*_RUNTIME_FAULTS, RecursionError, MemoryError):
            return ModelError(f"the model's chat template is broken: {reason}", hint="give another chat template")
        return InvalidRequest(f"the model's chat template can't render these messages: {reason}", param="messages")


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
    """A rendered conversation, and the spans of client text in it that spell control tokens."""

    text: str
    spans: list[Span] = []


class LiteralContents:
    """Marks the spellings of one tokenizer's control tokens in messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids_by_text = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids}
        self._ids = {text: token_id for text, token_id in ids_by_text.items() if text}
        self._pattern = re.compile(trie_pattern(self._ids)) if self._ids else None

    def mark(self, messages: Sequence[Message], allowed: Collection[int]) -> tuple[list[Message], tuple[str, str]]:
        """Return the messages with marks around every spelling of a control token, and the two marks.

        `allowed`: control tokens that an assistant's message may contain, such as the markers of its reasoning.
        """
        if self._pattern is None or not any(self._pattern.search(message.content or "") for message in messages):
            return list(messages), ("", "")
        everything = "".join(message.content or "" for message in messages)
        free = [mark for mark in MARKS if mark not in everything]
        if len(free) < 2:
            raise InvalidRequest("the messages contain too many private-use characters", param="messages")
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
    """Remove the marks from a rendered text; return it with the spans that were between them."""
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
            "the messages contain the text of a control token, and the model's chat template splits or changes it",
            param="messages",
        )
    return MarkedText(plain, spans)


def encode_literally(tokenizer: Tokenizer, marked: MarkedText, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text; control tokens inside the spans are read as plain characters."""
    ids: list[int] = []
    spans = iter([*marked.spans, (len(marked.text) + 1, len(marked.text) + 1)])
    start, end = next(spans)
    for token_id, (first, last) in tokenizer.encode_with_offsets(marked.text, add_special_tokens=add_special_tokens):
        while end <= first:
            start, end = next(spans)
        is_client_text = last > start and first < last and token_id in tokenizer.special_ids
        ids += ordinary_ids(tokenizer, marked.text[first:last]) if is_client_text else [token_id]
    return ids


def ordinary_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return ordinary token ids for the text of a control token: it is split until none is read."""
    ids = _continuation_ids(tokenizer, text[:1]) + _continuation_ids(tokenizer, text[1:])
    if tokenizer.special_ids.isdisjoint(ids):
        return ids
    return [token_id for char in text for token_id in _continuation_ids(tokenizer, char)]


def _continuation_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text as they are after other text."""
    found = tokenizer.encode_with_offsets(BEFORE + text, add_special_tokens=False)
    return [token_id for token_id, (_, last) in found if last > len(BEFORE)]


def trie_pattern(texts: Collection[str]) -> str:
    """Return a pattern that matches the longest of these texts; as a trie, thousands cost no more than a few."""
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
