"""TGI's request bodies into native requests: `{"inputs": text, "parameters": {…}, "stream": bool}`.

Without `do_sample`, and without a parameter that means it, the most likely token is always taken, as TGI does. A stop
sequence stays in the text. `watermark` can't be honoured and is refused; `adapter_id` names an adapter of the model.
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
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")  # each of these means that tokens are drawn


@dataclass(frozen=True)
class TextGenerationCall:
    """One call of /generate, and what its reply has to show."""

    request: PromptRequest
    is_stream: bool
    shown_prompt: str  # before the answer, if the client wants the full text
    wants_details: bool
    first_prompt_token: tuple[int, str] | None  # set if the client wants to see the prompt's tokens
    num_top_tokens: int


def parse_text_generation(body: dict[str, Any], engine: ServedEngine, is_stream: bool | None) -> TextGenerationCall:
    """`is_stream`: what the route says; None: the body does."""
    fields, info = BodyFields(body), engine.info
    text = fields.required_text("inputs")
    if not text:
        refuse("inputs", "must not be empty")
    given = fields.object("parameters") or BodyFields({}, "parameters.")
    given.refuse_any(("watermark",))
    truncate = given.integer("truncate", 1, MAX_NEW_TOKENS)
    if truncate is None:
        require_plausible_length(len(text), info.max_context, "inputs")
    stream = fields.boolean("stream") if is_stream is None else is_stream
    wants_prompt = given.boolean("decoder_input_details")
    if wants_prompt and stream:
        refuse(given.name("decoder_input_details"), "does not combine with stream")
    top = given.integer("top_n_tokens", 0, MAX_TOP_TOKENS) or 0
    wants_details = given.boolean("details") or wants_prompt
    params = _params(given, info, stream=stream, num_logprobs=top if stream or wants_details else None)
    if wants_prompt:
        params["prompt_logprobs"] = 0
    prompt = _prompt(text, truncate, engine)
    return TextGenerationCall(
        request=PromptRequest(prompt=prompt, params=SamplingParams(**params)),
        is_stream=stream,
        shown_prompt=text if given.boolean("return_full_text") else "",
        wants_details=wants_details,
        first_prompt_token=_first_token(prompt, engine) if wants_prompt else None,
        num_top_tokens=top,
    )


def _prompt(text: str, truncate: int | None, engine: ServedEngine) -> str | list[int]:
    """The text; or its last tokens, where it is to be truncated."""
    if truncate is None:
        return text
    ids = engine.tokenize(text)
    return text if len(ids) <= truncate else ids[-truncate:]


def _first_token(prompt: str | list[int], engine: ServedEngine) -> tuple[int, str]:
    first = engine.tokenize(prompt)[0] if isinstance(prompt, str) else prompt[0]
    return first, engine.token_bytes([first])[0].decode("utf-8", "replace")


def _params(given: BodyFields, info: ModelInfo, *, stream: bool, num_logprobs: int | None) -> dict[str, Any]:
    best_of = given.integer("best_of", 1, MAX_BEST_OF)
    if best_of is not None and best_of > 1 and stream:
        refuse(given.name("best_of"), "above 1 does not combine with stream")
    draws = given.boolean("do_sample") or any(given.get(name) is not None for name in SAMPLING) or (best_of or 1) > 1
    temperature = given.number("temperature", *NUMBERS["temperature"])
    settings = {
        "temperature": (1.0 if temperature is None else temperature) if draws else 0.0,
        "top_k": given.integer("top_k", 0, info.vocab_size),
        "top_p": given.number("top_p", *NUMBERS["top_p"]),
        "typical_p": given.number("typical_p", *NUMBERS["typical_p"]),
        "repetition_penalty": given.number("repetition_penalty", *NUMBERS["repetition_penalty"]),
        "frequency_penalty": given.number("frequency_penalty", *NUMBERS["frequency_penalty"]),
        "max_tokens": given.integer("max_new_tokens", 1, MAX_NEW_TOKENS),
        "seed": given.integer("seed", 0, INT64_MAX),
        "stop": _stops(given),
        "best_of": best_of if best_of is not None and best_of > 1 else None,
        "guided": _grammar(given),
        "logprobs": num_logprobs,
    }
    chosen = {name: value for name, value in settings.items() if value is not None}
    return {**info.defaults, **chosen, "include_stop": True}


def _stops(given: BodyFields) -> list[str]:
    stops = [*(given.items("stop", MAX_STOP_STRINGS) or []), *(given.items("stop_sequences", MAX_STOP_STRINGS) or [])]
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            refuse(given.name("stop"), f"must be a list of strings, none of them empty, got {shown(stop)}")
    return stops


def _grammar(given: BodyFields) -> Guided | None:
    """`{"type": "json", "value": schema}`, `{"type": "regex", "value": pattern}`; a schema may be text too."""
    wanted = given.object("grammar")
    if wanted is None:
        return None
    kind = wanted.one_of("type", ("json", "regex", "json_schema"))
    if kind is None:
        refuse(wanted.name("type"), "is required: json, regex or json_schema")
    if kind == "regex":
        pattern = wanted.required_text("value")
        if not pattern:
            refuse(wanted.name("value"), "must not be empty")
        return Guided("regex", pattern)
    return Guided.schema(_schema(wanted, is_named=kind == "json_schema"))


def _schema(wanted: BodyFields, *, is_named: bool) -> dict[str, Any]:
    value = wanted.get("value")
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            refuse(wanted.name("value"), f"is not valid JSON: {error}")
    if is_named and isinstance(value, dict):
        value = value.get("schema")
    if not isinstance(value, dict):
        refuse(wanted.name("value"), "must be a JSON schema")
    return value
