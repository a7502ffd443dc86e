"""The parameters of one generation and how they combine.

Defaults change nothing: temperature 1, no truncation, no penalties. `max_tokens=None` means "up to the end of the
context". Guided decoding, beam search and watermark are separate structs that validate their own fields;
`SamplingParams` checks their combination with other parameters. An error names the parameter, and `true` is not
accepted as a number. docs/SAMPLING.md explains every parameter.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.params.checks import refuse, require_int, require_list, require_number, require_texts
from tokenmill.params.guided import Guided
from tokenmill.params.other_names import ParamsMeta

MAX_CHOICES = 128  # answers to one prompt: n, best_of, beams
MAX_WATERMARK_CONTEXT = 8
MAX_LENGTH_PENALTY = 30.0  # keeps length ** penalty finite and above 0 for any length
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 4096
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
MAX_BREAKERS = 32
MAX_BREAKER_LENGTH = 40  # characters, as llama.cpp
MAX_STOP_REGEXES = 8
MAX_PROCESSORS = 16
INT32_MAX = 2**31 - 1


class BeamParams(msgspec.Struct, frozen=True):
    """Beam search: keep `width` hypotheses; score = sum of logprobs / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False  # True: stop as soon as `width` hypotheses are finished

    def __post_init__(self) -> None:
        require_int("beam.width", self.width, 1, MAX_CHOICES)
        require_number("beam.length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


class Watermark(msgspec.Struct, frozen=True):
    """A statistical watermark, which `tokenmill detect` finds with the same key (Kirchenbauer et al. 2023).

    At each position the key and the last `context` tokens select a share `gamma` of the vocabulary as green, and
    `delta` is added to the logits of green tokens.
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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=ParamsMeta):
    """Sampling parameters of one request: `SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100)`.

    Values are validated on creation. Defaults change nothing; every parameter is explained in docs/SAMPLING.md. vLLM's
    equivalents are accepted: `top_k=-1`, `stop="x"`, `include_stop_str_in_output`, `structured_outputs`.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # keep logits within this many standard deviations of the highest; 0 = off
    top_a: float = 0.0  # keep tokens with probability >= top_a * (highest probability) ** 2; 0 = off
    epsilon_cutoff: float = 0.0  # keep tokens with at least this probability; 0 = off
    eta_cutoff: float = 0.0  # the same, with a lower limit where the entropy is high; 0 = off
    dynatemp_range: float = 0.0  # temperature varies by up to this much, depending on the entropy; 0 = off
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 2 = keep the surprise of each token near mirostat_tau bits (version 2); 0 = off
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1  # learning rate of the correction
    xtc_probability: float = 0.0  # probability of removing the most likely tokens above xtc_threshold; 0 = never
    xtc_threshold: float = 0.1
    no_repeat_ngram_size: int = 0  # no sequence of this many tokens occurs twice; 0 = off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # subtracted from the logit of a token that would extend a repeated passage; 0 = off
    dry_base: float = 1.75  # ... multiplied by this for each token of the repeat beyond dry_allowed_length
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # number of last tokens that are searched for repeats; -1 = all
    dry_sequence_breakers: list[str] | None = None  # texts that end a repeat; None: DRY_BREAKERS
    watermark: Watermark | None = None
    logits_processors: list[Any] = []  # functions (output ids, logits) -> logits; only with an in-process engine
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
    logprobs: int | None = None  # number of alternatives beside the sampled token; 0 = the sampled one only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    beam: BeamParams | None = None
    guided: Guided | None = None  # a constraint that the answer must satisfy
    context_shift: bool | None = None  # continue past the context by dropping the oldest tokens; None: engine setting
    context_keep: int | None = None  # number of first tokens that are always kept; None: engine setting
    thinking_budget: int | None = None  # maximum tokens in think sections, after which the closing marker is forced
    thinking_markers: tuple[str, str] | None = None  # opening and closing marker; None: those of the chat template

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_lists(self)
        _check_parts(self)
        _check_combinations(self)
        if self.thinking_markers is not None:
            _check_markers(self)
        if self.beam is not None:
            _check_beam(self, self.beam)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that the engine runs in parallel for this request."""
        return self.beam.width if self.beam else (self.best_of or self.n)


# Ranges of numeric parameters: low, high.
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
# Parameters of sampling on a GPU: a row of float64 for each sequence, in this order, padded to a power of two.
DEVICE_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
DEVICE_PARAM_SLOTS = 8
INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "top_k": (0, INT32_MAX),
    "no_repeat_ngram_size": (0, 1024),
    "mirostat": (0, 2),
    "dry_allowed_length": (0, INT32_MAX),
    "dry_penalty_last_n": (-1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
}
OPTIONAL_INTEGERS: dict[str, tuple[int, int]] = {
    "best_of": (1, MAX_CHOICES),
    "seed": (INT64_MIN, INT64_MAX),
    "max_tokens": (0, INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "thinking_budget": (0, INT32_MAX),
    "context_keep": (0, INT32_MAX),
}


# Parameters that are lists of strings: maximum number, maximum length.
STRING_LISTS: dict[str, tuple[int, int]] = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_LENGTH),
    "stop_regex": (MAX_STOP_REGEXES, MAX_STOP_LENGTH),
    "dry_sequence_breakers": (MAX_BREAKERS, MAX_BREAKER_LENGTH),
}
TOKEN_LISTS: dict[str, int | None] = {
    "stop_token_ids": MAX_STOP_STRINGS,
    "allowed_token_ids": None,  # up to the whole vocabulary; the input processor checks the ids
    "banned_token_ids": None,
}


def _check_ranges(params: SamplingParams) -> None:
    for name, (low, high) in NUMBERS.items():
        number = getattr(params, name)
        if type(number) is not float or not low <= number <= high:  # fast path: a valid float needs no further check
            require_number(name, number, low, high)
    for name, (minimum, maximum) in INTEGERS.items():
        count = getattr(params, name)
        if type(count) is not int or not minimum <= count <= maximum:
            require_int(name, count, minimum, maximum)
    for name, (minimum, maximum) in OPTIONAL_INTEGERS.items():
        if (value := getattr(params, name)) is not None:
            require_int(name, value, minimum, maximum)
    if params.mirostat == 1:
        refuse("mirostat", "must be 2 (version 2) or 0 (off)")


def _check_lists(params: SamplingParams) -> None:
    for name, (max_entries, max_length) in STRING_LISTS.items():
        if (texts := getattr(params, name)) is not None:
            require_texts(name, texts, max_entries, max_length)
    for name, max_ids in TOKEN_LISTS.items():
        if (ids := getattr(params, name)) is not None:
            require_list(name, ids, max_ids)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        refuse("allowed_token_ids", "must not be empty")
    bias: Any = {} if params.logit_bias is None else params.logit_bias
    if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS or not all(isinstance(key, int) for key in bias):
        refuse("logit_bias", f"must map token ids to numbers, with at most {MAX_LOGIT_BIAS} entries")
    for value in bias.values():
        require_number("logit_bias", value, -100.0, 100.0)
    processors: Any = params.logits_processors
    require_list("logits_processors", processors, MAX_PROCESSORS)
    if not all(callable(one) for one in processors):
        refuse("logits_processors", "must contain only functions")


def _check_parts(params: SamplingParams) -> None:
    for name, kind in (("beam", BeamParams), ("guided", Guided), ("watermark", Watermark)):
        value = getattr(params, name)
        if value is not None and not isinstance(value, kind):
            refuse(name, f"must be a {kind.__name__}, got {value!r}")


def _check_combinations(params: SamplingParams) -> None:
    if params.best_of is not None and params.best_of < params.n:
        refuse("best_of", f"must be at least n ({params.n}), got {params.best_of}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        refuse("min_tokens", f"must not exceed max_tokens ({params.max_tokens}), got {params.min_tokens}")
    if params.context_shift is False and params.context_keep is not None:
        refuse("context_keep", "needs context_shift to be on")


def _check_markers(params: SamplingParams) -> None:
    if params.thinking_budget is None:
        refuse("thinking_markers", "need a thinking_budget")
    require_texts("thinking_markers", params.thinking_markers, 2, MAX_STOP_LENGTH)
    if len(params.thinking_markers or ()) != 2:
        refuse("thinking_markers", "must be two strings: the opening and the closing marker of a think section")


# Parameters that remove unlikely tokens, and all others that have a meaning only when tokens are sampled.
TRUNCATION_PARAMS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "top_a", "epsilon_cutoff", "eta_cutoff")
SAMPLING_ONLY_PARAMS = (*TRUNCATION_PARAMS, "dynatemp_range", "mirostat", "xtc_probability")


def _check_beam(params: SamplingParams, beam: BeamParams) -> None:
    if params.n > beam.width:
        refuse("n", f"must not exceed the beam width ({beam.width})")
    if params.best_of is not None:
        refuse("best_of", "does not combine with beam search")
    if params.temperature not in (0.0, 1.0):
        refuse("temperature", "does not combine with beam search, which does not sample; use 0 or 1")
    defaults = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
    for name in SAMPLING_ONLY_PARAMS:
        if getattr(params, name) != defaults[name]:
            refuse(name, "does not combine with beam search, which does not sample")
    if params.stop_regex:
        refuse("stop_regex", "does not combine with beam search; use stop")
    if params.context_shift:
        refuse("context_shift", "does not combine with beam search")
