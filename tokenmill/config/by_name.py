"""Engine configs from keyword arguments: `LLM("smollm2:135m", max_context=2048)`.

A keyword is looked up in the parts of the config by its name. Its value has not been checked by a command line parser,
so it is checked against the field's type here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tokenmill.config.adapters import adapter_settings
from tokenmill.config.engine import CacheConfig, EngineConfig, ModelConfig, OpsConfig, ParallelConfig, SchedulerConfig
from tokenmill.config.other_names import OTHER_NAMES, by_other_name, our_value
from tokenmill.errors import InvalidConfig

PARTS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "ops": OpsConfig,
    "parallel": ParallelConfig,
}
WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}


def engine_config(model: str | Path | EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the model's config with some fields replaced, which may have the names of other engines; raise
    InvalidConfig for a wrong name or value."""
    given: Any = model
    if not isinstance(given, str | Path | EngineConfig):
        raise InvalidConfig(f"a model is a name, a path or an EngineConfig, got {given!r}", param="model")
    config = given if isinstance(given, EngineConfig) else EngineConfig(ModelConfig(model=str(given)))
    hints = {part: get_type_hints(kind) for part, kind in PARTS.items()}
    changed: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    if isinstance(adapters := settings.get("adapters"), Mapping):
        settings = {**settings, "adapter": adapter_settings(adapters)}
        del settings["adapters"]
    for name, value in _by_our_names(settings):
        part = _part_with(name, hints)
        if not _fits(value, hint := hints[part][name]):
            raise InvalidConfig(f"{name} must be {_in_words(hint)}, got {value!r}", param=name)
        changed[part][name] = value
    return replace(config, **{part: replace(getattr(config, part), **values) for part, values in changed.items()})


def settings_signature() -> Signature:
    """Return the signature of `LLM(...)` with every setting as a keyword, for tab completion and `help`."""
    model = Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=ModelConfig().model)
    named = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for part in PARTS.values()
        for field in fields(part)
        if field.name != "model"
    ]
    return Signature([model, *named, Parameter("other_names", Parameter.VAR_KEYWORD)])


def _by_our_names(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if name == "seed" and settings.get("load_format") != "dummy":
            raise InvalidConfig(
                "seed is the seed of random weights (load_format='dummy')",
                param=name,
                hint="use SamplingParams(seed=…)",
            )
        found = by_other_name(name, value) if name in OTHER_NAMES else (name, our_value(name, value))
        if found is not None and found[0] in settings and found[0] != name:
            raise InvalidConfig(f"{name} means the same as {found[0]}; pass only one of them", param=name)
        if found is not None:
            yield found


def _part_with(name: str, hints: dict[str, dict[str, Any]]) -> str:
    for part, named in hints.items():
        if name in named:
            return part
    near = difflib.get_close_matches(name, [field for named in hints.values() for field in named], n=1)
    raise InvalidConfig(f"there is no setting {name!r}{f'; did you mean {near[0]}?' if near else ''}", param=name)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(one, get_args(hint)[0]) for one in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_in_words(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"a tuple, each {_in_words(get_args(hint)[0])}"
    return WORDS[hint]
