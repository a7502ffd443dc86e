"""Parses TGI's bodies into engine requests: `{"inputs": text, "parameters": {…}, "stream": bool}`.

As in TGI, decoding is greedy without `do_sample` or a parameter that implies it. A stop sequence is part of the text.
`watermark` is not supported and refused; `adapter_id` names an adapter of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from tokenmill.engine.input_processor import require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.params import INT64_MAX, MAX_STOP_STRINGS, NUMBERS, Guided, SamplingParams
from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.gate import ServedEngine
from tokenmill.types import PromptRequest

MAX_NEW_TOKENS = 2**31 - 1
MAX_BEST_OF = 20
MAX_TOP_TOKENS = 5
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")  # each of these implies do_sample


@dataclass(frozen=True)
class TextGenerationCall:
    """A parsed body of /generate, and what its reply includes."""

    request: PromptRequest
    is_stream: bool
    shown_prompt: str  # the prompt, if the client requested the full text; else ""
    wants_details: bool
    first_prompt_token: tuple[int, str] | None  # set if the client requested the prompt's tokens
    num_top_tokens: int


def parse_text_generation(body: dict[str, Any], engine: ServedEngine, is_stream: bool | None) -> TextGenerationCall:
    """`is_stream`: whether the route streams; None: the body decides."""
    fields, info = BodyFields(body), engine.info
    text = fields.required_text("inputs")
    if not text:
        refuse("inputs", "must not be empty")
    parameters = fields.object("parameters") or BodyFields({}, "parameters.")
    parameters.refuse_any(("watermark",))
    truncate = parameters.integer("truncate", 1, MAX_NEW_TOKENS)
    if truncate is None:
        require_plausible_length(len(text), info.max_context, "inputs")
    stream = fields.boolean("stream") if is_stream is None else is_stream
    wants_prompt = parameters.boolean("decoder_input_details")
    if wants_prompt and stream:
        refuse(parameters.name("decoder_input_details"), "does not combine with stream")
    num_top = parameters.integer("top_n_tokens", 0, MAX_TOP_TOKENS) or 0
    wants_details = parameters.boolean("details") or wants_prompt
    params = _params(parameters, info, stream=stream, num_logprobs=num_top if stream or wants_details else None)
    if wants_prompt:
        params["prompt_logprobs"] = 0
    prompt = _prompt(text, truncate, engine)
    return TextGenerationCall(
        request=PromptRequest(prompt=prompt, params=SamplingParams(**params)),
        is_stream=stream,
        shown_prompt=text if parameters.boolean("return_full_text") else "",
        wants_details=wants_details,
        first_prompt_token=_first_token(prompt, engine) if wants_prompt else None,
        num_top_tokens=num_top,
    )


def _prompt(text: str, truncate: int | None, engine: ServedEngine) -> str | list[int]:
    """Return the text, or its last `truncate` tokens if it has more."""
    if truncate is None:
        return text
    ids = engine.tokenize(text)
    return text if len(ids) <= truncate else ids[-truncate:]


def _first_token(prompt: str | list[int], engine: ServedEngine) -> tuple[int, str]:
    first = engine.tokenize(prompt)[0] if isinstance(prompt, str) else prompt[0]
    return first, engine.token_bytes([first])[0].decode("utf-8", "replace")


def _params(parameters: BodyFields, info: ModelInfo, *, stream: bool, num_logprobs: int | None) -> dict[str, Any]:
    best_of = parameters.integer("best_of", 1, MAX_BEST_OF)
    if best_of is not None and best_of > 1 and stream:
        refuse(parameters.name("best_of"), "above 1 does not combine with stream")
    implies_sampling = (best_of or 1) > 1 or any(parameters.get(name) is not None for name in SAMPLING)
    samples = parameters.boolean("do_sample") or implies_sampling
    temperature = parameters.number("temperature", *NUMBERS["temperature"])
    settings = {
        "temperature": (1.0 if temperature is None else temperature) if samples else 0.0,
        "top_k": parameters.integer("top_k", 0, info.vocab_size),
        "top_p": parameters.number("top_p", *NUMBERS["top_p"]),
        "typical_p": parameters.number("typical_p", *NUMBERS["typical_p"]),
        "repetition_penalty": parameters.number("repetition_penalty", *NUMBERS["repetition_penalty"]),
        "frequency_penalty": parameters.number("frequency_penalty", *NUMBERS["frequency_penalty"]),
        "max_tokens": parameters.integer("max_new_tokens", 1, MAX_NEW_TOKENS),
        "seed": parameters.integer("seed", 0, INT64_MAX),
        "stop": _stops(parameters),
        "best_of": best_of if best_of is not None and best_of > 1 else None,
        "guided": _grammar(parameters),
        "logprobs": num_logprobs,
    }
    present = {name: value for name, value in settings.items() if value is not None}
    return {**info.defaults, **present, "include_stop": True}


def _stops(parameters: BodyFields) -> list[str]:
    lists = [parameters.items(name, MAX_STOP_STRINGS) or [] for name in ("stop", "stop_sequences")]
    stops = [stop for stops in lists for stop in stops]
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            refuse(parameters.name("stop"), f"must be a list of strings, none of them empty, got {shown(stop)}")
    return stops


def _grammar(parameters: BodyFields) -> Guided | None:
    """Parse `{"type": "json", "value": schema}` (an object or its text) or `{"type": "regex", "value": pattern}`."""
    grammar = parameters.object("grammar")
    if grammar is None:
        return None
    kind = grammar.one_of("type", ("json", "regex", "json_schema"))
    if kind is None:
        refuse(grammar.name("type"), "is required: json, regex or json_schema")
    if kind == "regex":
        pattern = grammar.required_text("value")
        if not pattern:
            refuse(grammar.name("value"), "must not be empty")
        return Guided("regex", pattern)
    return Guided.schema(_schema(grammar, is_named=kind == "json_schema"))


def _schema(grammar: BodyFields, *, is_named: bool) -> dict[str, Any]:
    value = grammar.get("value")
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            refuse(grammar.name("value"), f"is not valid JSON: {error}")
    if is_named and isinstance(value, dict):
        value = value.get("schema")
    if not isinstance(value, dict):
        refuse(grammar.name("value"), "must be a JSON schema")
    return value
