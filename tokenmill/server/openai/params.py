"""Parses the parameters of a generation, named as by OpenAI and vLLM, into `SamplingParams`.

OpenAI's fields have OpenAI's ranges; the extensions of vLLM and llama.cpp have their own.

A constraint on the answer is set by `response_format` or by the fields of other engines: vLLM's `guided_...`,
llama.cpp's `json_schema` and `grammar`, SGLang's `regex` and `ebnf`, Ollama's `format`. `strict` makes no difference: a
schema is always followed exactly, or refused. The engine decides whether a schema or a grammar is supported, before the
first byte of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from tokenmill.config.server import ServerConfig
from tokenmill.engine.status import ModelInfo
from tokenmill.params import (
    INT64_MAX,
    INT64_MIN,
    INTEGERS,
    MAX_BREAKERS,
    MAX_GUIDED_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_STOP_REGEXES,
    MAX_STOP_STRINGS,
    MAX_WATERMARK_CONTEXT,
    NUMBERS,
    BeamParams,
    Guided,
    SamplingParams,
    Watermark,
)
from tokenmill.server.body import BodyFields, refuse, shown

MAX_COUNT = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_LEGACY_LOGPROBS = 5
MAX_BEST_OF = 20
DEFAULT_COMPLETION_TOKENS = 16
MAX_SALT_LENGTH = 1024
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

UNSUPPORTED = (
    "bad_words",
    "documents",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "logits_processors",
    "mm_processor_kwargs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "vllm_xargs",
)


def parse_chat_params(fields: BodyFields, info: ModelInfo, config: ServerConfig) -> SamplingParams:
    settings = _shared(fields, info, config)
    aliases = [key for key in ("max_completion_tokens", "max_tokens") if fields.get(key) is not None]
    limits = [fields.integer(key, 1, MAX_COUNT) for key in aliases]  # both are checked, the first one is used
    settings["max_tokens"] = limits[0] if limits else None
    wants_logprobs = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top is not None and not wants_logprobs:
        refuse("top_logprobs", "needs logprobs to be true")
    settings["logprobs"] = (num_top or 0) if wants_logprobs else None
    return _build(settings, info)


def parse_completion_params(fields: BodyFields, info: ModelInfo, config: ServerConfig) -> SamplingParams:
    settings = _shared(fields, info, config)
    max_tokens = fields.integer("max_tokens", 0, MAX_COUNT)
    settings["max_tokens"] = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    settings["logprobs"] = fields.integer("logprobs", 0, MAX_LEGACY_LOGPROBS)
    if fields.boolean("echo") and settings["logprobs"] is not None:
        settings["prompt_logprobs"] = max(settings["logprobs"], settings.get("prompt_logprobs") or 0)
    return _build(settings, info)


def _build(settings: dict[str, Any], info: ModelInfo) -> SamplingParams:
    """Build the parameters. What the client did not set keeps the model's default, or else that of SamplingParams."""
    present = {name: value for name, value in settings.items() if value is not None}
    return SamplingParams(**{**info.defaults, **present})


def _shared(fields: BodyFields, info: ModelInfo, config: ServerConfig) -> dict[str, Any]:
    """Parse the fields that chat and text completions have in common, each by its function in SETTINGS."""
    fields.refuse_any(UNSUPPORTED)
    rows = [(key, SETTINGS[key]) for key in fields.values if key in SETTINGS]  # iterate over the body: it has few
    settings = {name: read(fields, key, info) for key, (name, read) in rows}
    if settings.get("prompt_logprobs") is not None and fields.boolean("stream"):
        refuse("prompt_logprobs", "does not combine with stream")
    return {**settings, **_choices(fields, config), "guided": parse_guided(fields)}


def _choices(fields: BodyFields, config: ServerConfig) -> dict[str, Any]:
    n = fields.integer("n", 1, config.max_choices) or 1
    best_of = fields.integer("best_of", 1, min(MAX_BEST_OF, config.max_choices))
    if best_of is not None and best_of < n:
        refuse("best_of", f"must be at least n ({n}), got {best_of}")
    beam = _beam(fields, best_of or n)
    if fields.boolean("stream"):
        if beam is not None:
            refuse("use_beam_search", "does not combine with stream")
        if best_of is not None and best_of > n:
            refuse("best_of", "above n does not combine with stream")
    return {"n": n, "best_of": None if beam or best_of == n else best_of, "beam": beam}


def _beam(fields: BodyFields, width: int) -> BeamParams | None:
    length_penalty = fields.number("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    early_stopping = fields.boolean("early_stopping")
    if fields.boolean("use_beam_search"):
        return BeamParams(width, 1.0 if length_penalty is None else length_penalty, early_stopping)
    if early_stopping or length_penalty not in (None, 1.0):
        refuse("early_stopping" if early_stopping else "length_penalty", "needs use_beam_search to be true")
    return None


def _texts(fields: BodyFields, key: str, max_items: int) -> list[str] | None:
    """Parse one string, or a list of strings."""
    value = fields.get(key)
    texts = [value] if isinstance(value, str) else fields.items(key, max_items)
    for text in texts or []:
        if not isinstance(text, str) or not text:
            refuse(key, f"must be a string or a list of strings, none of them empty, got {shown(text)}")
    return texts


def _thinking_markers(fields: BodyFields) -> tuple[str, str] | None:
    texts = _texts(fields, "thinking_markers", 2)
    if texts is None:
        return None
    if len(texts) != 2:
        refuse("thinking_markers", "must be two strings: the start and the end of a thinking section")
    return texts[0], texts[1]


def _watermark(fields: BodyFields) -> Watermark | None:
    watermark = fields.object("watermark")
    if watermark is None:
        return None
    key = watermark.integer("key", 0, INT64_MAX)
    if key is None:
        refuse("watermark.key", "is required")
    settings = {
        "gamma": watermark.number("gamma", 0.0, 1.0),
        "delta": watermark.number("delta", 0.0, 100.0),
        "context": watermark.integer("context", 1, MAX_WATERMARK_CONTEXT),
    }
    changes = {name: value for name, value in settings.items() if value is not None}
    return msgspec.structs.replace(Watermark(key), **changes)


def _logit_bias(fields: BodyFields, vocab_size: int) -> dict[int, float] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    if len(biases.values) > MAX_LOGIT_BIAS:
        refuse("logit_bias", f"takes at most {MAX_LOGIT_BIAS} entries, got {len(biases.values)}")
    return {_bias_token(key, vocab_size): _bias_value(biases, key) for key in biases.values}


def _bias_token(key: str, vocab_size: int) -> int:
    is_number = key.isascii() and key.isdigit() and len(key) <= 10
    if not is_number or int(key) >= vocab_size:
        refuse("logit_bias", f"keys must be token ids between 0 and {vocab_size - 1}, got {shown(key)}")
    return int(key)


def _bias_value(biases: BodyFields, key: str) -> float:
    value = biases.values[key]
    if type(value) not in (int, float) or not -100 <= value <= 100:
        refuse("logit_bias", f"values must be numbers between -100 and 100, got {shown(value)}")
    return float(value)


def _top_k(fields: BodyFields, key: str, info: ModelInfo) -> int | None:
    value = fields.integer(key, -1, MAX_COUNT)
    return 0 if value == -1 else value  # vLLM writes -1 for "all"


def _top_n_sigma(fields: BodyFields, key: str, info: ModelInfo) -> float | None:
    value = fields.number(key, -1.0, NUMBERS["top_n_sigma"][1])
    return None if value is None else max(0.0, value)  # llama.cpp writes -1 for "off"


def _number(low: float, high: float) -> Read:
    return lambda fields, key, info: fields.number(key, low, high)


def _integer(low: int, high: int) -> Read:
    return lambda fields, key, info: fields.integer(key, low, high)


def _text_list(max_items: int) -> Read:
    return lambda fields, key, info: _texts(fields, key, max_items)


def _flag(fields: BodyFields, key: str, info: ModelInfo) -> bool | None:
    return None if fields.get(key) is None else fields.boolean(key)


def _token_ids(fields: BodyFields, key: str, info: ModelInfo) -> list[int] | None:
    return fields.token_ids(key, info.vocab_size, info.vocab_size)


Read = Callable[[BodyFields, str, ModelInfo], Any]  # parses a field; None if it is null
SETTINGS: dict[str, tuple[str, Read]] = {
    **{name: (name, _number(low, high)) for name, (low, high) in NUMBERS.items()},
    **{name: (name, _integer(low, high)) for name, (low, high) in INTEGERS.items() if name != "n"},
    "temperature": ("temperature", _number(0.0, 2.0)),
    "top_k": ("top_k", _top_k),
    "top_n_sigma": ("top_n_sigma", _top_n_sigma),
    "seed": ("seed", _integer(INT64_MIN, INT64_MAX)),
    "thinking_token_budget": ("thinking_budget", _integer(0, MAX_COUNT)),
    "thinking_markers": ("thinking_markers", lambda fields, key, info: _thinking_markers(fields)),
    "logit_bias": ("logit_bias", lambda fields, key, info: _logit_bias(fields, info.vocab_size)),
    "allowed_token_ids": ("allowed_token_ids", _token_ids),
    "banned_token_ids": ("banned_token_ids", _token_ids),
    "stop_token_ids": (
        "stop_token_ids",
        lambda fields, key, info: fields.token_ids(key, MAX_STOP_STRINGS, info.vocab_size),
    ),
    "stop": ("stop", _text_list(MAX_STOP_STRINGS)),
    "stop_regex": ("stop_regex", _text_list(MAX_STOP_REGEXES)),
    "dry_sequence_breakers": ("dry_sequence_breakers", _text_list(MAX_BREAKERS)),
    "watermark": ("watermark", lambda fields, key, info: _watermark(fields)),
    "prompt_logprobs": ("prompt_logprobs", _integer(0, MAX_TOP_LOGPROBS)),
    "ignore_eos": ("ignore_eos", _flag),
    "include_stop_str_in_output": ("include_stop", _flag),
    "skip_special_tokens": ("skip_special_tokens", _flag),
    "context_shift": ("context_shift", _flag),
    "context_keep": ("context_keep", lambda fields, key, info: fields.integer(key, 0, info.max_context // 2)),
}
"""Field of a body, named as by vLLM and llama.cpp ─► name in SamplingParams, and the function that parses its value."""


def parse_metadata(fields: BodyFields) -> dict[str, str]:
    """Parse the metadata that a client attaches to a stored object: a few short strings by name."""
    metadata = fields.object("metadata")
    values = {} if metadata is None else metadata.values
    if len(values) > MAX_METADATA:
        refuse(fields.name("metadata"), f"takes at most {MAX_METADATA} pairs, got {len(values)}")
    for key, value in values.items():
        if not isinstance(value, str) or len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            refuse(
                fields.name("metadata"),
                f"must hold strings of at most {MAX_METADATA_VALUE} characters by names of at most {MAX_METADATA_KEY}",
            )
    return values


# ── constraints on the answer ──────────────────────────────────────────────────────────────────────────


def guided_field(body: dict[str, Any]) -> str | None:
    """Return the name of the field that constrains the answer (a schema, a grammar, a regex); None if there is none."""
    return next((key for key in READERS if body.get(key) is not None), None)


def parse_guided(fields: BodyFields) -> Guided | None:
    present = [key for key in READERS if key in fields.values]
    constraints = {key: guided for key in present if (guided := READERS[key](fields, key)) is not None}
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        refuse(second, f"does not combine with {first}: an answer can follow only one of them")
    return next(iter(constraints.values()), None)


def _response_format(fields: BodyFields, key: str) -> Guided | None:
    response_format = fields.object(key)
    if response_format is None:
        return None
    kind = response_format.required_text("type")
    bare = response_format.object("schema")  # the form of llama.cpp and others
    if kind == "json_schema":
        return _named_schema(response_format) if bare is None else Guided.schema(bare.values)
    if kind == "json_object" and bare is not None:
        return Guided.schema(bare.values)
    if kind not in ("text", "json_object"):
        refuse(f"{key}.type", f"must be text, json_object or json_schema, got {shown(kind)}")
    return Guided("json_object") if kind == "json_object" else None


def _named_schema(response_format: BodyFields) -> Guided:
    named = response_format.object("json_schema")
    if named is None:
        refuse(response_format.name("json_schema"), "is required")
    return schema_of(named)


def schema_of(named: BodyFields) -> Guided:
    """Parse an object with the fields name, description, strict and schema."""
    named.text("name")
    named.text("description")
    named.boolean("strict")
    schema = named.object("schema")
    if schema is None:
        refuse(named.name("schema"), "is required")
    return Guided.schema(schema.values)


def _guided_json(fields: BodyFields, key: str) -> Guided | None:
    """Parse a JSON schema, given as an object or as its text."""
    if not isinstance(fields.get(key), str):
        schema = fields.object(key)
        return None if schema is None else Guided.schema(schema.values)
    text = _text(fields, key)
    try:
        orjson.loads(text or "")
    except orjson.JSONDecodeError as error:
        refuse(fields.name(key), f"is not valid JSON: {error}")
    return Guided("json_schema", text or "")


def _regex(fields: BodyFields, key: str) -> Guided | None:
    text = _text(fields, key)
    return None if text is None else Guided("regex", text)


def _choice(fields: BodyFields, key: str) -> Guided | None:
    texts = fields.items(key, MAX_GUIDED_CHOICES)
    if texts is None:
        return None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        refuse(fields.name(key), "must be a list of strings, none of them empty")
    return Guided.choice(texts)


def _grammar(fields: BodyFields, key: str) -> Guided | None:
    text = _text(fields, key)
    return None if text is None else Guided.grammar(text)


def _structured_outputs(fields: BodyFields, key: str) -> Guided | None:
    """Parse vLLM's newer field: an object with exactly one constraint."""
    outer = fields.object(key)
    if outer is None:
        return None
    unknown = [name for name, value in outer.values.items() if name not in STRUCTURED and value not in (None, False)]
    if unknown:
        refuse(outer.name(unknown[0]), f"is not supported; {key} takes one of {', '.join(STRUCTURED)}")
    constraints = [guided for name, read in STRUCTURED.items() if (guided := read(outer, name)) is not None]
    if len(constraints) != 1:
        refuse(key, f"must hold exactly one of {', '.join(STRUCTURED)}")
    return constraints[0]


def _format(fields: BodyFields, key: str) -> Guided | None:
    """Parse Ollama's field: "json", or a schema."""
    return Guided.json() if fields.get(key) == "json" else _guided_json(fields, key)


def _any_object(fields: BodyFields, key: str) -> Guided | None:
    return Guided("json_object") if fields.boolean(key) else None


def _text(fields: BodyFields, key: str) -> str | None:
    text = fields.text(key)
    if text == "":
        refuse(fields.name(key), "must not be empty")
    return text


STRUCTURED: dict[str, Callable[[BodyFields, str], Guided | None]] = {
    "json": _guided_json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
}
READERS: dict[str, Callable[[BodyFields, str], Guided | None]] = {
    "response_format": _response_format,
    "guided_json": _guided_json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
    "json_schema": _guided_json,  # llama.cpp, SGLang
    "grammar": _grammar,  # llama.cpp
    "regex": _regex,  # SGLang
    "ebnf": _grammar,  # SGLang
    "format": _format,  # Ollama
}
