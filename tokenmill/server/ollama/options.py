"""Parses Ollama's `options` (and the PARAMETERs of a Modelfile) into `SamplingParams`.

| option | meaning here |
|---|---|
| temperature, top_k, top_p, min_p, typical_p, seed, stop, presence_penalty, frequency_penalty, mirostat… | the same |
| repeat_penalty | repetition_penalty, over the whole context (`repeat_last_n` -1); `repeat_last_n` 0 turns it off |
| num_predict | max_tokens; 0 and below: up to the end of the context |
| num_ctx | only checked: more than the served context is refused |
| num_keep | context_keep, if the context shifts |

Options for loading a model (num_gpu, num_thread, …) are refused with their name: the model is loaded already.
Temperature, top_k and top_p default to Ollama's values; its default repeat penalty is not applied.
"""

from __future__ import annotations

from typing import Any

from tokenmill.engine.status import ModelInfo
from tokenmill.params import INT64_MAX, INT64_MIN, INTEGERS, MAX_STOP_STRINGS, NUMBERS, SamplingParams
from tokenmill.server.body import BodyFields, refuse, shown

MAX_COUNT = 2**31 - 1
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
LOADING_OPTIONS = {
    "numa": "is not supported",
    "num_batch": "is set by the server's --token-budget",
    "num_gpu": "is set by the server's --device",
    "main_gpu": "is set by the server's --device",
    "low_vram": "is not supported",
    "f16_kv": "is set by the server's --kv-dtype",
    "logits_all": "is not supported",
    "vocab_only": "is not supported",
    "use_mmap": "is not supported",
    "use_mlock": "is not supported",
    "embedding_only": "is not supported",
    "num_thread": "is set by the server's --threads",
}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def require_options(options: dict[str, Any]) -> None:
    """Refuse options that are invalid for every model. Limits of a certain model are checked with each request."""
    sampling_settings(options, max_context=None)


def parse_options(options: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for a request: Ollama's defaults, the model's defaults, its options."""
    settings = sampling_settings(options, max_context=info.max_context)
    return {**DEFAULTS, **info.defaults, **settings}


def sampling_settings(options: dict[str, Any], *, max_context: int | None) -> dict[str, Any]:
    """Check options and return them as arguments of `SamplingParams`. `max_context`: of the model; None if unknown."""
    fields = BodyFields({name: value for name, value in options.items() if value is not None}, "options.")
    _refuse_loading(fields)
    settings = {**_numbers(fields), "stop": _stops(fields)}
    settings["max_tokens"] = _max_tokens(fields)
    _require_context(fields, max_context)
    keep = fields.integer("num_keep", -1, MAX_COUNT)
    if keep is not None and keep >= 0 and max_context is not None:
        settings["context_keep"] = min(keep, max_context // 2)
    settings = {name: value for name, value in settings.items() if value is not None}
    if fields.get("num_predict") is not None:
        settings["max_tokens"] = _max_tokens(fields)  # even None, which overrides a default of the model
    settings.update(_penalty_window(fields, settings))
    SamplingParams(**settings)  # refuses invalid combinations
    return settings


def _refuse_loading(fields: BodyFields) -> None:
    for name, reason in LOADING_OPTIONS.items():
        if fields.get(name) is not None:
            refuse(fields.name(name), reason, hint="the model is loaded already")
    if fields.get("tfs_z") not in (None, 1, 1.0):
        refuse(fields.name("tfs_z"), "other than 1 (off) is not supported")
    if not fields.boolean("penalize_newline", True):
        refuse(fields.name("penalize_newline"), "false is not supported")


def _numbers(fields: BodyFields) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        name: fields.number(name, low, high) for name, (low, high) in NUMBERS.items() if name != "repetition_penalty"
    }
    integers = {name: fields.integer(name, *INTEGERS[name]) for name in INTEGERS if name not in ("n", "top_k")}
    top_k = fields.integer("top_k", -1, MAX_COUNT)
    repetition, repeat = (
        fields.number(name, *NUMBERS["repetition_penalty"]) for name in ("repetition_penalty", "repeat_penalty")
    )
    seed = fields.integer("seed", INT64_MIN, INT64_MAX)
    return {
        **numbers,
        **integers,
        "repetition_penalty": repetition if repeat is None else repeat,
        "top_k": 0 if top_k == -1 else top_k,
        "seed": None if seed == -1 else seed,  # Ollama's -1 means a random seed
    }


def _penalty_window(fields: BodyFields, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that `repeat_last_n` changes. Penalties apply to the whole context here, so any other window
    is refused if there is a repetition penalty."""
    window = fields.integer("repeat_last_n", -1, MAX_COUNT)
    if window is None or window == -1:
        return {}
    if window == 0:
        return {
            name: SamplingParams.__struct_defaults__[SamplingParams.__struct_fields__.index(name)] for name in PENALTIES
        }
    if settings.get("repetition_penalty", 1.0) != 1.0:
        refuse(
            fields.name("repeat_last_n"),
            f"must be -1 (the whole context) or 0 (no penalty), got {window}",
            hint="repeat_penalty applies to the whole context here",
        )
    return {}


def _max_tokens(fields: BodyFields) -> int | None:
    count = fields.integer("num_predict", -2, MAX_COUNT)
    return count if count is not None and count > 0 else None


def _require_context(fields: BodyFields, max_context: int | None) -> None:
    num_ctx = fields.integer("num_ctx", 1, MAX_COUNT)
    if num_ctx is not None and max_context is not None and num_ctx > max_context:
        refuse(
            fields.name("num_ctx"),
            f"{num_ctx} is more than this server's context of {max_context}",
            hint="start it with a larger --max-context",
        )


def _stops(fields: BodyFields) -> list[str] | None:
    stop = fields.get("stop")
    texts = [stop] if isinstance(stop, str) else fields.items("stop", MAX_STOP_STRINGS)
    for text in texts or []:
        if not isinstance(text, str) or not text:
            refuse(fields.name("stop"), f"must hold non-empty strings, got {shown(text)}")
    return texts
