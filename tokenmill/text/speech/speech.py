"""A model's tool-call and reasoning formats, and which of their markers are control tokens.

Detected once per model (`detect.py`). It provides the reader of an answer, the grammar that restricts an answer to
valid calls, and what the input side needs: whether a prompt ends inside a think section, call ids that the template
accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tokenmill.text.speech.call_format import CallFormat, to_json
from tokenmill.text.speech.grammar import AnswerGrammar
from tokenmill.text.speech.reader import SpeechReader
from tokenmill.text.speech.reading import Reading
from tokenmill.text.speech.thinking import CHANNEL_FORMATS, ChannelFormat, ThinkingFormat
from tokenmill.types import Tool, ToolCall, ToolChoice


@dataclass(frozen=True)
class SpeechStart:
    """Where an answer begins: inside a think section, or after the beginning of a marker (`primer`)."""

    is_thinking: bool = False
    primer: str = ""


START = SpeechStart()


@dataclass(frozen=True)
class Speech:
    """The formats of one model. `lead`: white space that its template writes between an answer's text and its calls."""

    calls: CallFormat | None = None
    thinking: ThinkingFormat | None = None
    control: Mapping[str, int] = field(default_factory=dict)  # markers that are tokens of the vocabulary
    lead: str = ""
    arguments_as: Literal["object", "text"] = "object"  # of a call in the history, for the template
    describes_tools: bool = True  # the template shows the tools to the model; otherwise `system_text` must
    is_proved: bool = False  # the template itself writes calls in the format `calls`

    @property
    def channels(self) -> ChannelFormat | None:
        name = self.thinking.name if self.thinking else self.calls.name if self.calls else ""
        return CHANNEL_FORMATS.get(name)

    @cached_property
    def reading(self) -> Reading:
        """The formats prepared for reading, with calls."""
        return self._reading(self.calls)

    @cached_property
    def reading_without_calls(self) -> Reading:
        return self._reading(None)

    def _reading(self, calls: CallFormat | None) -> Reading:
        thinking = None if self.channels else self.thinking
        return Reading(calls, thinking, self.channels, self.control, self.lead)

    def start(self, prompt: str) -> SpeechStart:
        """Return how an answer to this prompt begins; the last few hundred characters of the prompt suffice."""
        if self.thinking is not None and self.thinking.is_open_at_end(prompt):
            return SpeechStart(is_thinking=True)
        primers = (self.channels.prompt if self.channels else "", self.calls.prompt if self.calls else "")
        primer = next((text for text in primers if text and prompt.endswith(text)), "")
        return SpeechStart(primer=primer)

    def reader(self, tools: Sequence[Tool], start: SpeechStart = START, *, reads_calls: bool = True) -> SpeechReader:
        """Return the reader of one answer; without tools it finds no calls."""
        reading = self.reading if tools and reads_calls and self.calls else self.reading_without_calls
        known = tools if reads_calls and self.calls else ()
        return SpeechReader(reading, known, starts_thinking=start.is_thinking, primer=start.primer)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        start: SpeechStart = START,
        *,
        may_think: bool = True,
        answer: str | None = None,
    ) -> str:
        """Return the grammar of an answer that calls only these tools, as Lark text for llguidance.

        `answer`: the right-hand side of a rule for an answer without calls; None: any text. Raises InvalidRequest for
        a schema that can't be enforced in this model's format.
        """
        reading = self.reading if tools and self.calls else self.reading_without_calls
        built = AnswerGrammar(reading, self.thinking, tools if self.calls else (), choice)
        return built.text(is_thinking=start.is_thinking, may_think=may_think, primer=start.primer, answer=answer)

    def system_text(self, tools: Sequence[Tool]) -> str:
        """Return the description of the tools for a system message, for a chat template that does not show them."""
        assert self.calls is not None, "tools are described only to models with a call format"
        lines = [to_json({"type": "function", "function": _described(tool)}) for tool in tools]
        example = self.calls.write([ToolCall(id="", name="function-name", arguments='{"argument": "value"}')])
        return _SYSTEM_TEXT.format(tools="\n".join(lines), example=example)

    def history_id(self, call_id: str) -> str:
        """Return the id of an earlier call in the form that the template accepts."""
        return self.calls.history_id(call_id) if self.calls else call_id


_SYSTEM_TEXT = """\
You may call functions to help with the user's request. The functions, as JSON schemas, one a line:
<tools>
{tools}
</tools>
To call functions, write for each call one JSON object with its name and arguments, and nothing else:
{example}"""


def _described(tool: Tool) -> dict[str, object]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description or "", "parameters": parameters}
