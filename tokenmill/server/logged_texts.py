"""The texts of one request for the request log, collected while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import msgspec

from tokenmill.engine.input_processor import ClientRequest
from tokenmill.params import SamplingParams
from tokenmill.types import ChatRequest, EmbedRequest, Event

DEFAULTS: dict[str, Any] = msgspec.to_builtins(SamplingParams())


class LoggedTexts:
    """The prompt of a request, and the visible text of each answer, for the request log."""

    def __init__(self, requests: Sequence[ClientRequest]) -> None:
        self._requests = requests
        self._answers: dict[int, StringIO] = {}

    def add(self, choice: int, event: Event) -> None:
        answer = self._answers.get(choice)
        if answer is None:
            answer = self._answers[choice] = StringIO()
        answer.write(event.text)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a log line: messages or prompts, parameters that differ from their defaults, answers."""
        first, fields = self._requests[0], dict[str, Any]()
        if isinstance(first, ChatRequest):
            fields["messages"] = msgspec.to_builtins(first.messages)
            fields["tools"] = [tool.name for tool in first.tools]
        else:
            fields["prompts"] = [one.prompt for one in self._requests if not isinstance(one, ChatRequest)]
        if not isinstance(first, EmbedRequest):
            params = msgspec.to_builtins(first.params)
            fields["params"] = {name: value for name, value in params.items() if value != DEFAULTS.get(name)}
        return fields | {"answers": [self._answers[choice].getvalue() for choice in sorted(self._answers)]}
