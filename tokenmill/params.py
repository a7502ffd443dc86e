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
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
MAX_BREAKERS = 32
MAX_BREAKER_LENGTH = 40  # characters, as llama.cpp
MAX_STOP_REGEXES = 8
MAX_PROCESSORS = 16
MAX_WATERMARK_CONTEXT = 8
INT32_MAX = 2**31 - 1
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


class Watermark(msgspec.Struct, frozen=True):
    """Leaves a mark in the choice of words that `tokenmill detect` finds with the same key (Kirchenbauer et al. 2023).

    At each place a share `gamma` of the vocabulary is green, told by the key and the last `context` tokens; green
    tokens get `delta` added to their logit.
    """

    key: int
    gamma: float = 0.25
    delta: float = 2.0
    context: int = 1


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
    eta_cutoff: float = 0.0  # the same, with less where the distribution is flat; 0 = off
    dynatemp_range: float = 0.0  # temperature moves this far to both sides, with the entropy; 0 = off
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 2 = keep the surprise of each token near mirostat_tau bits (version 2); 0 = off
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1  # how quickly it corrects itself
    xtc_probability: float = 0.0  # how often the most likely tokens above xtc_threshold are left out; 0 = never
    xtc_threshold: float = 0.1
    no_repeat_ngram_size: int = 0  # no run of so many tokens occurs twice; 0 = off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # what a token that would go on repeating an earlier passage loses; 0 = off
    dry_base: float = 1.75  # ... times this for each token that the repeat is longer than dry_allowed_length
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # how many tokens back repeats are looked for; -1 = all
    dry_sequence_breakers: list[str] | None = None  # a repeat does not reach beyond these; None: DRY_BREAKERS
    watermark: Watermark | None = None
    logits_processors: list[Any] = []  # functions (output ids, logits) -> logits; where the engine runs in-process
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: list[str] = []
    stop_regex: list[str] = []  # a match of one of these ends the answer
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
    thinking_budget: int | None = None  # the most tokens inside think sections; then their end is written
    thinking_markers: tuple[str, str] | None = None  # what opens and closes them; None: as the chat template writes it

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_lists(self)
        _check_lists_of_text(self)
        _check_watermark(self)
        _check_combinations(self)
        _check_beam(self)
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


NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "top_a": (0.0, 1.0),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
}
WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "top_k": (0, INT32_MAX),
    "no_repeat_ngram_size": (0, 1024),
    "mirostat": (0, 2),
    "dry_allowed_length": (0, INT32_MAX),
    "dry_penalty_last_n": (-1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
}
MAYBE_WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "best_of": (1, MAX_CHOICES),
    "seed": (INT64_MIN, INT64_MAX),
    "max_tokens": (0, INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "thinking_budget": (0, INT32_MAX),
    "context_keep": (0, INT32_MAX),
}


def _check_ranges(params: SamplingParams) -> None:
    for name, (low, high) in NUMBERS.items():
        _require_number(params, name, low, high)
    for name, (least, most) in WHOLE_NUMBERS.items():
        _require_int(params, name, least, most)
    for name, (least, most) in MAYBE_WHOLE_NUMBERS.items():
        if getattr(params, name) is not None:
            _require_int(params, name, least, most)
    if params.mirostat == 1:
        _refuse("mirostat", "knows version 2 only (0 turns it off)")


def _check_lists(params: SamplingParams) -> None:
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


def _check_lists_of_text(params: SamplingParams) -> None:
    for name, most, longest in (
        ("stop", MAX_STOP_STRINGS, MAX_STOP_LENGTH),
        ("stop_regex", MAX_STOP_REGEXES, MAX_STOP_LENGTH),
        ("dry_sequence_breakers", MAX_BREAKERS, MAX_BREAKER_LENGTH),
    ):
        texts = getattr(params, name) or []
        if len(texts) > most:
            _refuse(name, f"takes at most {most} strings, got {len(texts)}")
        for text in texts:
            if not isinstance(text, str) or not text:
                _refuse(name, "must hold non-empty strings")
            if len(text) > longest:
                _refuse(name, f"strings must be at most {longest} characters long")


def _check_watermark(params: SamplingParams) -> None:
    mark = params.watermark
    if mark is None:
        return
    if isinstance(mark.key, bool) or not isinstance(mark.key, int) or not 0 <= mark.key <= INT64_MAX:
        _refuse("watermark.key", f"must be a whole number between 0 and {INT64_MAX}")
    if not isinstance(mark.gamma, int | float) or not 0.0 < mark.gamma < 1.0:
        _refuse("watermark.gamma", f"must be above 0 and below 1, got {mark.gamma!r}")
    if not isinstance(mark.delta, int | float) or not 0.0 <= mark.delta <= 100.0:
        _refuse("watermark.delta", f"must be between 0 and 100, got {mark.delta!r}")
    if not isinstance(mark.context, int) or not 1 <= mark.context <= MAX_WATERMARK_CONTEXT:
        _refuse("watermark.context", f"must be between 1 and {MAX_WATERMARK_CONTEXT}, got {mark.context!r}")


def _check_combinations(params: SamplingParams) -> None:
    if params.best_of is not None and params.best_of < params.n:
        _refuse("best_of", f"must be at least n ({params.n}), got {params.best_of}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _refuse("min_tokens", f"must not exceed max_tokens ({params.max_tokens}), got {params.min_tokens}")
    if params.context_shift is False and params.context_keep is not None:
        _refuse("context_keep", "needs context_shift to be on")
    if len(params.logits_processors) > MAX_PROCESSORS or not all(callable(one) for one in params.logits_processors):
        _refuse("logits_processors", f"must hold at most {MAX_PROCESSORS} functions")
    if params.thinking_markers is not None:
        if params.thinking_budget is None:
            _refuse("thinking_markers", "need a thinking_budget")
        if len(params.thinking_markers) != 2 or not all(0 < len(m) <= MAX_STOP_LENGTH for m in params.thinking_markers):
            _refuse("thinking_markers", "must be two texts: what opens a think section and what closes it")


# What only a draw has a use for.
DRAWING_KNOBS = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "top_a",
    "epsilon_cutoff",
    "eta_cutoff",
    "dynatemp_range",
    "mirostat",
    "xtc_probability",
)


def _check_beam(params: SamplingParams) -> None:
    if params.beam is None:
        return
    if not 1 <= params.beam.width <= MAX_CHOICES:
        _refuse("beam.width", f"must be between 1 and {MAX_CHOICES}")
    if params.n > params.beam.width:
        _refuse("n", f"must not exceed the beam width ({params.beam.width})")
    if params.best_of is not None:
        _refuse("best_of", "does not combine with beam search")
    if params.temperature not in (0.0, 1.0):
        _refuse("temperature", "does not combine with beam search, which draws nothing; leave it at 0 or 1")
    defaults = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
    for name in DRAWING_KNOBS:
        if getattr(params, name) != defaults[name]:
            _refuse(name, "does not combine with beam search, which draws nothing")
    if params.stop_regex:
        _refuse("stop_regex", "does not combine with beam search; use stop")
    if params.context_shift:
        _refuse("context_shift", "does not combine with beam search")


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
    if params.thinking_budget is not None:
        _refuse("thinking_budget", "does not combine with a schema or grammar, which admits no think section")
