"""Parameters with fields of their own: guided decoding, beam search, watermark.

Each validates its own fields when it is created; `SamplingParams` checks how they combine with other parameters.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from tokenmill.params.checks import refuse, require_int, require_number, require_unicode

MAX_CHOICES = 128  # answers to one prompt: n, best_of, beams
MAX_GUIDED_CHOICES = 10_000  # texts that a guided answer may be one of
MAX_GUIDED_BYTES = 128 << 10
MAX_WATERMARK_CONTEXT = 8
MAX_LENGTH_PENALTY = 30.0  # length ** penalty stays finite and above 0 for any length
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

GuidedKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


class Guided(msgspec.Struct, frozen=True):
    """A constraint on the answer: a JSON schema, any JSON object, a regex, one of several texts, or a grammar.

    `text` is the schema, the regex or the grammar as it is written; for `choice` a JSON list of strings.
    """

    kind: GuidedKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuidedKind):
            refuse("guided.kind", f"must be one of {', '.join(get_args(GuidedKind))}, got {self.kind!r}")
        is_empty = self.kind == "json_object"
        if not isinstance(self.text, str) or (self.text == "") is not is_empty:
            refuse("guided.text", f"must be {'empty' if is_empty else 'given'} for {self.kind}")
        require_unicode("guided.text", self.text)
        if len(self.text.encode()) > MAX_GUIDED_BYTES:
            refuse("guided.text", f"must be at most {MAX_GUIDED_BYTES >> 10} KiB long")

    @classmethod
    def schema(cls, schema: dict[str, Any] | bool) -> Guided:
        return cls("json_schema", _as_json(schema))

    @classmethod
    def choice(cls, texts: list[str]) -> Guided:
        return cls("choice", _as_json(texts))


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        refuse("guided.text", f"can't be written as JSON: {error}")


class BeamParams(msgspec.Struct, frozen=True):
    """Beam search: keep `width` hypotheses; score = sum of logprobs / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False  # True: stop as soon as `width` hypotheses are finished

    def __post_init__(self) -> None:
        require_int("beam.width", self.width, 1, MAX_CHOICES)
        require_number("beam.length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


class Watermark(msgspec.Struct, frozen=True):
    """A watermark in the choice of tokens, which `tokenmill detect` finds with the same key (Kirchenbauer et al. 2023).

    At each position the key and the last `context` tokens select a share `gamma` of the vocabulary as green; green
    tokens get `delta` added to their logit.
    """

    key: int
    gamma: float = 0.25
    delta: float = 2.0
    context: int = 1

    def __post_init__(self) -> None:
        require_int("watermark.key", self.key, 0, INT64_MAX)
        require_number("watermark.gamma", self.gamma, 0.0, 1.0)
        if self.gamma in (0.0, 1.0):
            refuse("watermark.gamma", f"must be above 0 and below 1, got {self.gamma!r}")
        require_number("watermark.delta", self.delta, 0.0, 100.0)
        require_int("watermark.context", self.context, 1, MAX_WATERMARK_CONTEXT)
