"""Every knob of one generation, validated once, here.

`SamplingParams` is what users write, what travels to the engine process and what the sampler reads.
A value that cannot be honoured raises `InvalidRequest` naming the field; nobody checks again later.
Defaults change nothing: temperature 1, no truncation, no penalties. `max_tokens=None` means "up to the
end of the context".
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from tokenmill.errors import InvalidRequest

MAX_CHOICES = 128
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 4096
MAX_GUIDED_BYTES = 128 << 10
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

GuidedKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


class Guided(msgspec.Struct, frozen=True):
    """The answer must follow this: a JSON schema, any JSON object, a regex, one of several texts, a grammar.

    `text` is the schema, the regex or the grammar as it is written; for `choice` a JSON list of strings.
    """

    kind: GuidedKind
    text: str = ""

    @classmethod
    def schema(cls, schema: dict[str, Any] | bool) -> Guided:
        return cls("json_schema", msgspec.json.encode(schema).decode())

    @classmethod
    def choice(cls, texts: list[str]) -> Guided:
        return cls("choice", msgspec.json.encode(texts).decode())


class BeamParams(msgspec.Struct, frozen=True):
    """Beam search: keep `width` hypotheses; score = sum of logprobs / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False  # True: stop as soon as `width` hypotheses are finished


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # keep logits within so many standard deviations of the highest; 0 = off
    top_a: float = 0.0  # keep tokens with probability >= top_a * (highest probability) ** 2; 0 = off
    epsilon_cutoff: float = 0.0  # keep tokens with at least this probability; 0 = off
    xtc_probability: float = 0.0  # how often the most likely tokens above xtc_threshold are left out; 0 = never
    xtc_threshold: float = 0.1
    no_repeat_ngram_size: int = 0  # no run of so many tokens occurs twice; 0 = off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    logprobs: int | None = None  # how many alternatives beside the chosen token; 0 = the chosen one only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    beam: BeamParams | None = None
    guided: Guided | None = None  # what the answer must follow
    context_shift: bool | None = None  # go on past the context, forgetting what is oldest; None: as the engine is set
    context_keep: int | None = None  # how many of the first tokens are never forgotten; None: as the engine is set

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_lists(self)
        _check_combinations(self)
        _check_guided(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """How many sequences the engine runs at once for this request."""
        return self.beam.width if self.beam else (self.best_of or self.n)


def _refuse(param: str, problem: str) -> None:
    raise InvalidRequest(f"{param} {problem}", param=param)


def _require_number(params: SamplingParams, name: str, low: float, high: float) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(name, f"must be a finite number, got {value!r}")
    if not low <= value <= high:
        _refuse(name, f"must be between {low:g} and {high:g}, got {value!r}")


def _require_int(params: SamplingParams, name: str, low: int, high: int) -> None:
    value: Any = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        _refuse(name, f"must be between {low} and {high}, got {value!r}")


def _check_ranges(params: SamplingParams) -> None:
    _require_int(params, "n", 1, MAX_CHOICES)
    _require_number(params, "temperature", 0.0, 100.0)
    _require_int(params, "top_k", 0, 2**31 - 1)
    _require_number(params, "top_p", 0.0, 1.0)
    _require_number(params, "min_p", 0.0, 1.0)
    _require_number(params, "typical_p", 0.0, 1.0)
    _require_number(params, "top_n_sigma", 0.0, 100.0)
    for name in ("top_a", "epsilon_cutoff", "xtc_probability", "xtc_threshold"):
        _require_number(params, name, 0.0, 1.0)
    _require_int(params, "no_repeat_ngram_size", 0, 1024)
    _require_number(params, "repetition_penalty", 1e-3, 1e3)
    _require_number(params, "presence_penalty", -2.0, 2.0)
    _require_number(params, "frequency_penalty", -2.0, 2.0)
    _require_int(params, "min_tokens", 0, 2**31 - 1)
    for name, low, high in (
        ("best_of", 1, MAX_CHOICES),
        ("seed", INT64_MIN, INT64_MAX),
        ("max_tokens", 0, 2**31 - 1),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
        ("context_keep", 0, 2**31 - 1),
    ):
        if getattr(params, name) is not None:
            _require_int(params, name, low, high)


def _check_lists(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        _refuse("stop", f"takes at most {MAX_STOP_STRINGS} strings, got {len(params.stop)}")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            _refuse("stop", "must hold non-empty strings")
        if len(text) > MAX_STOP_LENGTH:
            _refuse("stop", f"strings must be at most {MAX_STOP_LENGTH} characters long")
    if len(params.stop_token_ids) > MAX_STOP_STRINGS:
        _refuse("stop_token_ids", f"takes at most {MAX_STOP_STRINGS} ids")
    bias = params.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        _refuse("logit_bias", f"takes at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    for value in bias.values():
        if not math.isfinite(value) or not -100.0 <= value <= 100.0:
            _refuse("logit_bias", f"values must be between -100 and 100, got {value!r}")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        _refuse("allowed_token_ids", "must not be empty")


def _check_combinations(params: SamplingParams) -> None:
    if params.best_of is not None and params.best_of < params.n:
        _refuse("best_of", f"must be at least n ({params.n}), got {params.best_of}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _refuse("min_tokens", f"must not exceed max_tokens ({params.max_tokens}), got {params.min_tokens}")
    if params.beam is not None:
        if not 1 <= params.beam.width <= MAX_CHOICES:
            _refuse("beam.width", f"must be between 1 and {MAX_CHOICES}")
        if params.n > params.beam.width:
            _refuse("n", f"must not exceed the beam width ({params.beam.width})")
        if params.best_of is not None:
            _refuse("best_of", "does not combine with beam search")
        if params.context_shift:
            _refuse("context_shift", "does not combine with beam search")
    if params.context_shift is False and params.context_keep is not None:
        _refuse("context_keep", "needs context_shift to be on")


def _check_guided(params: SamplingParams) -> None:
    guided = params.guided
    if guided is None:
        return
    if guided.kind not in get_args(GuidedKind):
        _refuse("guided.kind", f"must be one of {', '.join(get_args(GuidedKind))}, got {guided.kind!r}")
    if not isinstance(guided.text, str) or (not guided.text) is not (guided.kind == "json_object"):
        _refuse("guided.text", f"must be {'empty' if guided.kind == 'json_object' else 'given'} for {guided.kind}")
    if len(guided.text.encode("utf-8", "replace")) > MAX_GUIDED_BYTES:
        _refuse("guided.text", f"must be at most {MAX_GUIDED_BYTES >> 10} KiB long")
    # A finished grammar leaves nothing to draw but the end; these two would forbid it.
    if params.ignore_eos:
        _refuse("ignore_eos", "does not combine with a schema or grammar: it is the grammar that says where to end")
    if params.min_tokens:
        _refuse("min_tokens", "does not combine with a schema or grammar: write the least length into it")
