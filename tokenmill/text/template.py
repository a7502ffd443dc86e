"""Chat templates: a conversation becomes the text its model was trained on.

Each model brings its own layout as a Jinja template. It is compiled once, run in a sandbox within bounds, and its
faults are told apart: what it refuses (`raise_exception`) or can't do with this conversation is the caller's
error; a template that can't even render "hi", does not compile or runs out of bounds is the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import jinja2

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.messages import has_null, renditions, without_null
from tokenmill.text.template_bounds import Bounds, Budget, OutOfBounds, current_budget
from tokenmill.text.template_sandbox import ChatSandbox, Refusal

# The layout to fall back on for a model without a template; whether to use it is the caller's decision.
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
            return self._without_none(variables, self._first_rendered(variables))
        except Refusal as refusal:
            raise InvalidRequest(f"the model's chat template refuses this: {refusal}", param="messages") from refusal
        except (OutOfBounds, RecursionError, MemoryError) as excess:
            raise ModelError(f"the model's chat template was stopped: {str(excess) or 'too deep'}") from excess
        except _RUNTIME_FAULTS as fault:
            raise self._blamed(fault) from fault

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
                plain = self._first_rendered({**variables, "messages": without_null(variables["messages"])})
                return plain if plain.count("None") < text.count("None") else text
        return text

    def _run(self, variables: dict[str, Any]) -> str:
        budget = Budget(self._bounds)
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
