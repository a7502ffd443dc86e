"""Parses the bodies of llama.cpp's native endpoints into engine requests.

Fields that llama.cpp shares with OpenAI and vLLM go through their parser. Its own fields mean:

| field | meaning here |
|---|---|
| n_predict | max_tokens; -1 and -2: up to the end of the context; 0: only process the prompt |
| repeat_penalty | repetition_penalty, over the whole context (`repeat_last_n` -1); `repeat_last_n` 0 turns it off |
| n_probs | logprobs |
| grammar, json_schema | constraint on the answer |
| logit_bias | a list of pairs (token or text, number or false), or an object |
| cache_prompt false | a unique cache salt |
| n_keep | context_keep, if the context shifts |

Defaults are llama.cpp's: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05. A field that can't be honoured is refused
with its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.config.server import ServerConfig
from tokenmill.engine.input_processor import require_plausible_length
from tokenmill.params import INT64_MAX, NUMBERS, SamplingParams
from tokenmill.server.body import BodyFields, kind_of, refuse, require_token_ids, shown
from tokenmill.server.gate import ServedEngine
from tokenmill.server.openai.params import MAX_COUNT, MAX_TOP_LOGPROBS, parse_completion_params
from tokenmill.server.request_ids import new_id
from tokenmill.types import PromptRequest

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SHARED = (
    *("dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("dynatemp_exponent", "dynatemp_range", "frequency_penalty", "ignore_eos", "min_p", "mirostat", "mirostat_eta"),
    *("mirostat_tau", "presence_penalty", "stop", "stream", "temperature", "top_k", "top_n_sigma", "top_p"),
    *("typical_p", "xtc_probability", "xtc_threshold"),
)
ONLY_DEFAULT = {"n_indent": 0, "min_keep": 0, "t_max_predict_ms": 0, "id_slot": -1, "n_discard": 0}
UNSUPPORTED = ("lora", "post_sampling_probs", "response_fields", "return_progress", "samplers", "timings_per_token")
MAX_FILES = 256


@dataclass(frozen=True)
class NativeCall:
    """A parsed body of /completion or /infill, and what its reply includes."""

    requests: list[PromptRequest]
    is_stream: bool
    is_listed: bool  # the body had a list of prompts, so the reply is a list
    wants_tokens: bool


def parse_native_completion(body: dict[str, Any], engine: ServedEngine, config: ServerConfig) -> NativeCall:
    fields = BodyFields(body)
    params = _params(fields, engine, config)
    value: Any = body.get("prompt")
    is_listed = _is_list_of_prompts(value)
    if is_listed and len(value) > config.max_prompts:
        refuse("prompt", f"takes at most {config.max_prompts} prompts, got {len(value)}")
    prompts = [_prompt(prompt, engine) for prompt in (value if is_listed else [value])]
    salt = _cache_salt(fields)
    requests = [PromptRequest(prompt=prompt, params=params, cache_salt=salt) for prompt in prompts]
    return NativeCall(requests, fields.boolean("stream"), is_listed, fields.boolean("return_tokens"))


def parse_infill(body: dict[str, Any], engine: ServedEngine, config: ServerConfig) -> NativeCall:
    """Parse a request for the text between `input_prefix` (and `prompt`, the line so far) and `input_suffix`."""
    fields, info = BodyFields(body), engine.info
    params = _params(fields, engine, config)
    if not info.can_fill_in:
        refuse("input_prefix", "needs a model with fill-in-the-middle tokens, which this one does not have")
    prefix = fields.required_text("input_prefix") + (fields.text("prompt") or "")
    suffix = fields.required_text("input_suffix")
    files = _files(fields)
    size = len(prefix) + len(suffix) + sum(len(text) for _, text in files)
    require_plausible_length(size, info.max_context, "input_prefix")
    request = PromptRequest(prompt=prefix, suffix=suffix, files=files, params=params, cache_salt=_cache_salt(fields))
    return NativeCall(
        [request], fields.boolean("stream"), is_listed=False, wants_tokens=fields.boolean("return_tokens")
    )


def _cache_salt(fields: BodyFields) -> str:
    """Return a unique salt if the prefix cache must not be used."""
    return "" if fields.boolean("cache_prompt", True) else new_id()


def _files(fields: BodyFields) -> list[tuple[str, str]]:
    files = []
    for number, value in enumerate(fields.items("input_extra", MAX_FILES) or []):
        if not isinstance(value, dict):
            refuse(f"input_extra[{number}]", f"must be an object with filename and text, got {kind_of(value)}")
        file = BodyFields(value, f"input_extra[{number}].")
        files.append((file.text("filename", 1024) or "tmp", file.required_text("text")))
    return files


# ── prompts ────────────────────────────────────────────────────────────────────────────────────────────


def _is_list_of_prompts(value: Any) -> bool:
    """Return whether a list holds several prompts. A list with token ids (and perhaps texts) is one prompt."""
    return isinstance(value, list) and bool(value) and not any(type(item) is int for item in value)


def _prompt(value: Any, engine: ServedEngine) -> str | list[int]:
    """Parse a text, token ids, or a mixture of both, in which only a text at the beginning gets special tokens."""
    info = engine.info
    if isinstance(value, dict):
        value = BodyFields(value, "prompt.").required_text("prompt_string")
    if isinstance(value, str):
        require_plausible_length(len(value), info.max_context, "prompt")
        return value
    if not isinstance(value, list) or not value:
        refuse("prompt", "is required: a text, token ids, a mixture of both, or a list of these")
    ids: list[int] = []
    for number, item in enumerate(value):
        if isinstance(item, str):
            require_plausible_length(len(item), info.max_context, "prompt")
            ids += engine.tokenize(item, add_special_tokens=number == 0)
        else:
            require_token_ids([item], "prompt", info.vocab_size)
            ids.append(item)
    return ids


# ── parameters ─────────────────────────────────────────────────────────────────────────────────────────


def _params(fields: BodyFields, engine: ServedEngine, config: ServerConfig) -> SamplingParams:
    fields.refuse_any(UNSUPPORTED)
    for name, default in ONLY_DEFAULT.items():
        if fields.get(name) not in (None, default):
            refuse(name, f"other than {default} is not supported by this server")
    info = engine.info
    present = {name: fields.get(name) for name in SHARED if fields.get(name) is not None}
    shared = {**DEFAULTS, **present, **_biases(fields, engine), **_constraint(fields)}
    params = parse_completion_params(BodyFields(shared), info, config)
    count = fields.integer("n_predict", -2, MAX_COUNT)
    count = fields.integer("max_tokens", -2, MAX_COUNT) if count is None else count
    seed = fields.integer("seed", -1, INT64_MAX)
    keep = fields.integer("n_keep", -1, MAX_COUNT) or 0
    return msgspec.structs.replace(
        params,
        max_tokens=None if count is None or count < 0 else count,
        seed=None if seed == -1 else seed,
        logprobs=fields.integer("n_probs", 0, MAX_TOP_LOGPROBS) or None,
        repetition_penalty=_repetition_penalty(fields),
        context_keep=min(keep, info.max_context // 2) if keep > 0 and info.shifts_context else None,
    )


def _repetition_penalty(fields: BodyFields) -> float:
    penalty = fields.number("repeat_penalty", *NUMBERS["repetition_penalty"])
    window = fields.integer("repeat_last_n", -1, MAX_COUNT)
    if penalty is None or penalty == 1.0 or window == 0:
        return 1.0
    if window not in (None, -1):
        refuse(
            "repeat_last_n",
            f"must be -1 (the whole context) or 0 (no penalty), got {window}",
            hint="repeat_penalty applies to the whole context here",
        )
    return penalty


def _constraint(fields: BodyFields) -> dict[str, Any]:
    """Parse the grammar or schema of the answer; an empty grammar counts as absent."""
    grammar, schema = fields.text("grammar") or None, fields.get("json_schema")
    if schema is not None and not isinstance(schema, dict):
        refuse("json_schema", f"must be an object, got {shown(schema)}")
    if grammar is not None and schema is not None:
        refuse("json_schema", "does not combine with grammar: an answer can follow only one of them")
    return {name: value for name, value in (("guided_grammar", grammar), ("guided_json", schema)) if value is not None}


def _biases(fields: BodyFields, engine: ServedEngine) -> dict[str, Any]:
    value = fields.get("logit_bias")
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, dict) else fields.items("logit_bias", engine.info.vocab_size) or []
    biases: dict[str, Any] = {}
    banned: list[int] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            refuse("logit_bias", f"must hold pairs of a token or text and a number or false, got {shown(pair)}")
        ids = _bias_ids(pair[0], engine, is_key=isinstance(value, dict))
        if pair[1] is False:
            banned += ids
        else:
            biases.update(dict.fromkeys(map(str, ids), pair[1]))
    return {**({"logit_bias": biases} if biases else {}), **({"banned_token_ids": banned} if banned else {})}


def _bias_ids(token: Any, engine: ServedEngine, *, is_key: bool) -> list[int]:
    if is_key and isinstance(token, str) and token.isdecimal() and len(token) <= 10:
        token = int(token)
    if isinstance(token, str):
        return engine.tokenize(token, add_special_tokens=False)
    require_token_ids([token], "logit_bias", engine.info.vocab_size)
    return [int(token)]
